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

from fulcrum_router.policy import Proof
from tests.conftest import Figure
from tests.engines.asking import Answer, Ask, alone, ask, prefilled
from tests.engines.own_router import CANARY_TOKENS, Recording, ids, members_of, of_ids, own_router
from tests.engines.real import D, P, RealService
from tests.engines.short import BLOCK, KV_BYTES, LEASE_S, LONGEST, TRANSFER

pytestmark = pytest.mark.timeout(600)

EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


async def test_engine_and_router_go_by_the_lease_that_the_engine_was_started_with(short: RealService) -> None:
    """It stands in the user's own arguments here. That nothing has expired is told before anything has."""
    for name, instance in (await short.instances()).items():
        command = Path(f"/proc/{await short.leader(name)}/cmdline").read_text(encoding="utf-8").split("\0")
        given = [value for option, value in pairwise(command) if option == "--kv-transfer-config"]
        told = instance.status.identity
        assert told is not None
        assert (json.loads(given[-1]), told.kv_lease, told.block_size) == (TRANSFER, LEASE_S, BLOCK)
        metrics = (await short.client.get(f"{await short.engine_url(name)}/metrics")).text
        assert f"\n{EXPIRED}{{" in metrics


# --- held back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("held", [RealService.paused, RealService.stopped], ids=["paused", "stopped"])
async def test_a_decode_leg_that_is_held_back_longer_than_the_lease_gives_right_tokens(
    short: RealService,
    rng: random.Random,
    held: Callable[[RealService, str], AbstractAsyncContextManager[None]],
    *,
    stream: bool,
) -> None:
    prefill, decode = await short.engine(P), await short.engine(D)
    url = await short.engine_url(decode)
    asked, bare = (of_ids(ids(rng, 250), stream=stream) for _ in range(2))
    expected = [await alone(short.client, url, one) for one in (asked, bare)]
    async with churning(short, prefill, rng) as churn, held(short, decode):
        routed = asyncio.create_task(ask(short.client, short.url, asked))
        params = await prefilled(short.client, await short.engine_url(prefill), bare)
        direct = asyncio.create_task(
            ask(short.client, url, replace(bare, more={**bare.more, "kv_transfer_params": params}))
        )
        await asyncio.sleep(LEASE_S)  # the lease itself
        await churn.overwrites()
    unguarded, answer = await direct, await routed
    assert (unguarded.status, unguarded.tokens != expected[1]) == (200, True)  # so the hazard is there
    assert (answer.status, answer.tokens) == (200, expected[0])


@dataclass(slots=True)
class Churn:
    """How many long prompts an engine has computed one after the other."""

    prompts: int = 0

    async def overwrites(self) -> None:
        """Returns once every block that is free now holds something else."""
        enough = self.prompts + 2 + KV_BYTES // (1024 * LONGEST)
        while self.prompts < enough:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def churning(short: RealService, name: str, rng: random.Random) -> AsyncIterator[Churn]:
    """The engine looks at leases in here, and reuses what is free: it is never without work."""
    url, done = await short.engine_url(name), Churn()

    async def churn() -> None:
        while True:
            await ask(short.client, url, of_ids(ids(rng, LONGEST - 8), 1))
            done.prompts += 1

    task = asyncio.create_task(churn())
    try:
        yield done
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


# --- the race -----------------------------------------------------------------------------------------------

AGES_S = {
    "in time": [0.3 + 0.08 * n for n in range(20)],
    "near it": [LEASE_S + 0.05 * (n - 10) for n in range(20)],
    "late": [LEASE_S + 0.1 * n for n in range(20)],
}
"""How long before decode is let go its legs are asked for."""


async def test_hand_offs_let_go_around_their_deadline_give_right_tokens(
    short: RealService, figure: Figure, rng: random.Random
) -> None:
    """Twenty at a time, each of another age; and who asks the same while decode may hold wrong KV for it."""
    prefill, decode = await short.engine(P), await short.engine(D)
    url = await short.engine_url(decode)
    for name, ages_s in AGES_S.items():
        asked = [of_ids(ids(rng, rng.randint(140, 250)), stream=n % 2 == 0) for n in range(len(ages_s))]
        expected = [await alone(short.client, url, one) for one in asked]
        async with churning(short, prefill, rng):
            waiting = await let_go_together(short, decode, asked, ages_s)
            again = await asyncio.gather(*(ask(short.client, short.url, one) for one in asked))
        answers = await asyncio.gather(*waiting)
        for what, given in (("", answers), (", asked again at once", again)):
            wrong = [n for n, one in enumerate(given) if (one.status, one.tokens) != (200, expected[n])]
            local = [one.local for one in given if one.local]
            figure(
                f"20 hand-offs let go {min(ages_s):.2f} to {max(ages_s):.2f} s old, lease {LEASE_S} s{what}: "
                f"{len(given) - len(local)} handed on, {len(local)} computed again, {len(wrong)} wrong"
            )
            assert (name, wrong) == (name, [])
        sources = [one.local for one in answers]
        if name == "in time":
            assert None in sources
        if name == "late":
            assert "lease_expired" in sources


async def let_go_together(
    short: RealService, decode: str, asked: list[Ask], ages_s: list[float]
) -> list[asyncio.Task[Answer]]:
    """Each is asked so long before decode, which is held back, is let go."""
    go_s = time.monotonic() + max(ages_s) + 0.1
    waiting: dict[int, asyncio.Task[Answer]] = {}
    async with short.paused(decode):
        for number in sorted(range(len(asked)), key=lambda n: -ages_s[n]):
            await asyncio.sleep(max(0.0, go_s - ages_s[number] - time.monotonic()))
            waiting[number] = asyncio.create_task(ask(short.client, short.url, asked[number]))
        await asyncio.sleep(max(0.0, go_s - time.monotonic()))
    return [waiting[number] for number in range(len(asked))]


# --- a canary that is late ----------------------------------------------------------------------------------


async def test_a_canary_that_fetched_too_late_proves_nothing_and_leaves_nothing_that_a_client_gets(
    short: RealService, rng: random.Random, seed: int
) -> None:
    """What it has cached is another prompt's KV: under its own salt."""
    prefill, decode = await members_of(short)
    chosen = Recording(seed)
    async with own_router(prefill, decode) as own, AsyncExitStack() as held:
        churn = await held.enter_async_context(churning(short, prefill.name, rng))
        await held.enter_async_context(short.paused(decode.name))
        async with own.canaries(chosen):
            await asyncio.sleep(LEASE_S)  # the lease itself
            await churn.overwrites()
            own.router.active = False  # no other one is sent after it, as to a suspect pair it would be
            await held.aclose()
            counts = own.pair(prefill.name, decode.name).counts
            await short.until(lambda: _counted(counts))
            assert counts == {Proof.PROVEN: 0, Proof.RECOMPUTED: 1, Proof.UNKNOWN: 0}
    url = await short.engine_url(decode.name)
    asked = of_ids(chosen.given[:CANARY_TOKENS])
    expected = await alone(short.client, url, asked)
    for where in (url, short.url):
        answer = await ask(short.client, where, asked)
        assert (answer.status, answer.tokens) == (200, expected)


async def _counted(counts: dict[Proof, int]) -> bool:
    return sum(counts.values()) > 0
