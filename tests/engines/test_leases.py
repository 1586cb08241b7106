"""A lease of two seconds: what decode fetches after it reaches no client, however near to it.

The lease is one value: an engine is started with it, and the router goes by what the engine was started with.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from fulcrum_router.policy import TransferOutcome
from tests.conftest import RecordMeasurement
from tests.engines.in_process_router import (
    CANARY_TOKENS,
    RecordingRandom,
    build_token_request,
    generate_token_ids,
    list_engine_entries,
    run_in_process_router,
)
from tests.engines.requests import (
    CompletionRequest,
    CompletionResponse,
    compute_reference_tokens,
    request_prefill,
    send,
)
from tests.engines.services import D, P, VllmService
from tests.engines.short_lease import BLOCK, KV_BYTES, KV_TRANSFER_CONFIG, LEASE_S, MAX_MODEL_LENGTH

pytestmark = pytest.mark.timeout(600)

EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


async def test_engine_status_reports_the_lease_that_the_engine_was_started_with(
    short_lease: VllmService,
) -> None:
    """It stands in the user's own arguments here. That nothing has expired is reported before anything
    has."""
    for name, instance in (await short_lease.list_instances()).items():
        command = (
            Path(f"/proc/{await short_lease.find_leader_pid(name)}/cmdline")
            .read_text(encoding="utf-8")
            .split("\0")
        )
        given = [value for option, value in pairwise(command) if option == "--kv-transfer-config"]
        identity = instance.status.identity
        assert identity is not None
        assert (json.loads(given[-1]), identity.kv_lease, identity.block_size) == (
            KV_TRANSFER_CONFIG,
            LEASE_S,
            BLOCK,
        )
        metrics = (await short_lease.client.get(f"{await short_lease.engine_url(name)}/metrics")).text
        assert f"\n{EXPIRED}{{" in metrics


# --- held back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "hold", [VllmService.pause_engine, VllmService.suspend_process], ids=["paused", "stopped"]
)
async def test_decode_leg_delayed_beyond_the_lease_gives_right_tokens(
    short_lease: VllmService,
    rng: random.Random,
    hold: Callable[[VllmService, str], AbstractAsyncContextManager[None]],
    *,
    stream: bool,
) -> None:
    prefill, decode = await short_lease.find_instance(P), await short_lease.find_instance(D)
    url = await short_lease.engine_url(decode)
    request, bare = (build_token_request(generate_token_ids(rng, 250), stream=stream) for _ in range(2))
    expected = [await compute_reference_tokens(short_lease.client, url, one) for one in (request, bare)]
    async with churn_blocks(short_lease, prefill, rng) as churn, hold(short_lease, decode):
        routed = asyncio.create_task(send(short_lease.client, short_lease.url, request))
        params = await request_prefill(short_lease.client, await short_lease.engine_url(prefill), bare)
        direct = asyncio.create_task(
            send(short_lease.client, url, replace(bare, extra={**bare.extra, "kv_transfer_params": params}))
        )
        await asyncio.sleep(LEASE_S)  # the lease itself
        await churn.wait_for_overwrite()
    unguarded, response = await direct, await routed
    assert (unguarded.status, unguarded.tokens != expected[1]) == (200, True)  # so the hazard is there
    assert (response.status, response.tokens) == (200, expected[0])


@dataclass(slots=True)
class BlockChurn:
    """How many long prompts an engine has computed one after the other."""

    prompts: int = 0

    async def wait_for_overwrite(self) -> None:
        """Returns once every block that is free now holds something else."""
        enough = self.prompts + 2 + KV_BYTES // (1024 * MAX_MODEL_LENGTH)
        while self.prompts < enough:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def churn_blocks(short_lease: VllmService, name: str, rng: random.Random) -> AsyncIterator[BlockChurn]:
    """The engine looks at leases in here, and reuses what is free: it is never without work."""
    url, done = await short_lease.engine_url(name), BlockChurn()

    async def churn() -> None:
        while True:
            await send(
                short_lease.client, url, build_token_request(generate_token_ids(rng, MAX_MODEL_LENGTH - 8), 1)
            )
            done.prompts += 1

    task = asyncio.create_task(churn())
    try:
        yield done
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


# --- the race -----------------------------------------------------------------------------------------------

TRANSFER_AGES_S = {
    "in time": [0.3 + 0.08 * n for n in range(20)],
    "near it": [LEASE_S + 0.05 * (n - 10) for n in range(20)],
    "late": [LEASE_S + 0.1 * n for n in range(20)],
}
"""How long before decode is resumed its requests are sent."""


async def test_kv_transfers_started_around_the_lease_deadline_give_right_tokens(
    short_lease: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    """Twenty at a time, each of another age; and who asks the same while decode may hold wrong KV for it."""
    prefill, decode = await short_lease.find_instance(P), await short_lease.find_instance(D)
    url = await short_lease.engine_url(decode)
    for name, ages_s in TRANSFER_AGES_S.items():
        requests = [
            build_token_request(generate_token_ids(rng, rng.randint(140, 250)), stream=n % 2 == 0)
            for n in range(len(ages_s))
        ]
        expected = [await compute_reference_tokens(short_lease.client, url, one) for one in requests]
        async with churn_blocks(short_lease, prefill, rng):
            waiting = await resume_decode_together(short_lease, decode, requests, ages_s)
            again = await asyncio.gather(
                *(send(short_lease.client, short_lease.url, one) for one in requests)
            )
        responses = await asyncio.gather(*waiting)
        for what, given in (("", responses), (", sent again at once", again)):
            wrong = [n for n, one in enumerate(given) if (one.status, one.tokens) != (200, expected[n])]
            local = [one.local_prefill_reason for one in given if one.local_prefill_reason]
            record_measurement(
                f"20 hand-offs let go {min(ages_s):.2f} to {max(ages_s):.2f} s old, lease {LEASE_S} s{what}: "
                f"{len(given) - len(local)} handed on, {len(local)} computed again, {len(wrong)} wrong"
            )
            assert (name, wrong) == (name, [])
        sources = [one.local_prefill_reason for one in responses]
        if name == "in time":
            assert None in sources
        if name == "late":
            assert "lease_expired" in sources


async def resume_decode_together(
    short_lease: VllmService, decode: str, requests: list[CompletionRequest], ages_s: list[float]
) -> list[asyncio.Task[CompletionResponse]]:
    """Send each request that long before decode, which is paused, is resumed."""
    resume_at_s = time.monotonic() + max(ages_s) + 0.1
    waiting: dict[int, asyncio.Task[CompletionResponse]] = {}
    async with short_lease.pause_engine(decode):
        for number in sorted(range(len(requests)), key=lambda n: -ages_s[n]):
            await asyncio.sleep(max(0.0, resume_at_s - ages_s[number] - time.monotonic()))
            waiting[number] = asyncio.create_task(send(short_lease.client, short_lease.url, requests[number]))
        await asyncio.sleep(max(0.0, resume_at_s - time.monotonic()))
    return [waiting[number] for number in range(len(requests))]


# --- a canary that is late ----------------------------------------------------------------------------------


async def test_late_canary_counts_as_recomputed_and_its_cached_kv_reaches_no_client(
    short_lease: VllmService, rng: random.Random, seed: int
) -> None:
    """What it has cached is another prompt's KV: under its own salt."""
    prefill, decode = await list_engine_entries(short_lease)
    chosen = RecordingRandom(seed)
    async with run_in_process_router(prefill, decode) as in_process, AsyncExitStack() as held:
        churn = await held.enter_async_context(churn_blocks(short_lease, prefill.name, rng))
        await held.enter_async_context(short_lease.pause_engine(decode.name))
        async with in_process.canaries(chosen):
            await asyncio.sleep(LEASE_S)  # the lease itself
            await churn.wait_for_overwrite()
            in_process.router.active = (
                False  # no other one is sent after it, as to a suspect pair it would be
            )
            await held.aclose()
            counts = in_process.pair(prefill.name, decode.name).counts
            await short_lease.wait_until(lambda: _has_outcome(counts))
            assert counts == {
                TransferOutcome.VERIFIED: 0,
                TransferOutcome.RECOMPUTED: 1,
                TransferOutcome.UNKNOWN: 0,
            }
    url = await short_lease.engine_url(decode.name)
    request = build_token_request(chosen.drawn[:CANARY_TOKENS])
    expected = await compute_reference_tokens(short_lease.client, url, request)
    for where in (url, short_lease.url):
        response = await send(short_lease.client, where, request)
        assert (response.status, response.tokens) == (200, expected)


async def _has_outcome(counts: dict[TransferOutcome, int]) -> bool:
    return sum(counts.values()) > 0
