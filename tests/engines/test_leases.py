"""vLLM with a KV lease of two seconds: clients get right tokens even if decode fetches KV after the lease.

The router uses the lease that the engine was started with.
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
from tests.engines.completions import (
    CompletionRequest,
    CompletionResponse,
    compute_reference_tokens,
    request_prefill,
    send,
)
from tests.engines.in_process_router import (
    CANARY_TOKENS,
    RecordingRandom,
    build_token_request,
    generate_token_ids,
    list_engine_entries,
    run_in_process_router,
)
from tests.engines.services import DEADLINE_S, D, P, VllmService
from tests.engines.short_lease import BLOCK, KV_BYTES, KV_TRANSFER_CONFIG, LEASE_S, MAX_MODEL_LENGTH
from tests.waiting import wait_until, wait_until_time

pytestmark = pytest.mark.timeout(600)

EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


async def test_engine_status_reports_the_lease_that_the_engine_was_started_with(
    short_lease: VllmService,
) -> None:
    """`engine.args` sets the lease. The metric of expired transfers exists before the first one expires."""
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


# --- a delayed decode leg -----------------------------------------------------------------------------------


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
        await wait_until_time(time.monotonic() + LEASE_S, "the lease has to expire")
        await churn.wait_for_overwrite()
    unguarded, response = await direct, await routed
    assert (unguarded.status, unguarded.tokens != expected[1]) == (200, True)  # wrong without router
    assert (response.status, response.tokens) == (200, expected[0])


@dataclass(slots=True)
class BlockChurn:
    """Number of long prompts that an engine has computed so far; they overwrite its free KV blocks."""

    prompts: int = 0

    async def wait_for_overwrite(self) -> None:
        """Wait until each KV block that is free now was overwritten."""
        enough = self.prompts + 2 + KV_BYTES // (1024 * MAX_MODEL_LENGTH)
        await wait_until(lambda: self.prompts >= enough, f"{enough} prompts computed", timeout_s=DEADLINE_S)


@asynccontextmanager
async def churn_blocks(short_lease: VllmService, name: str, rng: random.Random) -> AsyncIterator[BlockChurn]:
    """Send long prompts during the block: only a busy engine checks leases and reuses KV blocks."""
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


# --- transfers shortly before and after the end of the lease ------------------------------------------------

TRANSFER_AGES_S = {
    "in time": [0.3 + 0.08 * n for n in range(20)],
    "near it": [LEASE_S + 0.05 * (n - 10) for n in range(20)],
    "late": [LEASE_S + 0.1 * n for n in range(20)],
}
"""Age of each KV transfer when the decode engine is resumed."""


async def test_kv_transfers_started_around_the_lease_deadline_give_right_tokens(
    short_lease: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    """20 transfers of different ages start together; decode may cache wrong KV, so all are sent again."""
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
                f"20 KV transfers {min(ages_s):.2f} to {max(ages_s):.2f} s old, lease {LEASE_S} s{what}: "
                f"{len(given) - len(local)} used, {len(local)} computed again, {len(wrong)} wrong"
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
    """Send the requests while decode is paused. When it is resumed, each request has its age of `ages_s`."""
    resume_at_s = time.monotonic() + max(ages_s) + 0.1
    waiting: dict[int, asyncio.Task[CompletionResponse]] = {}
    async with short_lease.pause_engine(decode):
        for number in sorted(range(len(requests)), key=lambda n: -ages_s[n]):
            await wait_until_time(resume_at_s - ages_s[number], "each transfer has an age of its own")
            waiting[number] = asyncio.create_task(send(short_lease.client, short_lease.url, requests[number]))
        await wait_until_time(resume_at_s, "each transfer has an age of its own")
    return [waiting[number] for number in range(len(requests))]


# --- late canaries ------------------------------------------------------------------------------------------


async def test_late_canary_counts_as_recomputed_and_its_cached_kv_reaches_no_client(
    short_lease: VllmService, rng: random.Random, seed: int
) -> None:
    """Decode caches wrong KV for the late canary. The canary's own cache salt keeps clients from using it."""
    prefill, decode = await list_engine_entries(short_lease)
    chosen = RecordingRandom(seed)
    async with run_in_process_router(prefill, decode) as in_process, AsyncExitStack() as held:
        churn = await held.enter_async_context(churn_blocks(short_lease, prefill.name, rng))
        await held.enter_async_context(short_lease.pause_engine(decode.name))
        async with in_process.canaries(chosen):
            await wait_until_time(time.monotonic() + LEASE_S, "the lease has to expire")
            await churn.wait_for_overwrite()
            in_process.router.active = False  # otherwise the suspect pair would get another canary
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
