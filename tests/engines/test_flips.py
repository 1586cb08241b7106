"""Flips of real engines while requests run, and that every token is the right one."""

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from fulcrum_core.state import RouterState
from tests.conftest import Figure
from tests.engines.asking import Ask, alone, ask, every_kind, prompts, until_answered_by
from tests.engines.real import D, P, RealService

pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")

REQUESTS, CONCURRENCY = 200, 8


async def test_flips_each_second_lose_no_request_and_change_no_token(
    pair: RealService, figure: Figure, rng: random.Random
) -> None:
    asked = every_kind(rng, REQUESTS)
    before = await pair.state()
    flips = asyncio.create_task(flip_each_second(pair))
    began_s = time.monotonic()
    asking = few_at_a_time([ask(pair.client, pair.url, one) for one in asked])
    answers = await asyncio.wait_for(asking, 300)
    took_s = time.monotonic() - began_s
    flips.cancel()
    swaps = (await asyncio.gather(flips, return_exceptions=True))[0]
    assert isinstance(swaps, int)
    await pair.at_rest()
    alone_on = await pair.engine_url(await pair.engine(D))
    expected = await few_at_a_time([alone(pair.client, alone_on, one) for one in asked])
    wrong = [n for n, answer in enumerate(answers) if answer.tokens != expected[n]]
    handed = sum(answer.prefill not in (None, answer.decode) for answer in answers)
    directions = {answer.way for answer in answers}
    after = await pair.state()
    proven, recomputed, unknown = (
        now - then for now, then in zip(proofs(after), proofs(before), strict=True)
    )
    figure(
        f"{REQUESTS} requests, {CONCURRENCY} at a time, {swaps} swaps of both roles in {took_s:.1f} s: "
        f"{REQUESTS - len(wrong)} token-identical, {handed} handed over between engines; "
        f"{proven} hand-offs proven, {recomputed} recomputed, {unknown} unknown"
    )
    assert ([answer.status for answer in answers], wrong) == ([200] * REQUESTS, [])
    assert swaps >= 3
    assert handed > REQUESTS / 2
    assert len({pair for pair in directions if pair[0] != pair[1]}) >= 2
    assert failures(after) == failures(before)


async def few_at_a_time(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they all return."""
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(each: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await each

    return await asyncio.gather(*map(one, asked))


async def flip_each_second(pair: RealService) -> int:
    """Swaps the roles until cancelled; how often."""
    swaps = 0
    try:
        while True:
            await asyncio.sleep(1.0)
            await pair.swap()
            swaps += 1
    except asyncio.CancelledError:
        return swaps


def failures(state: RouterState) -> tuple[int, int]:
    """Requests that failed and streams that broke."""
    return sum(tier.failed for tier in state.tiers), sum(tier.broken for tier in state.tiers)


def proofs(state: RouterState) -> tuple[int, int, int]:
    """Hand-offs that were proven, recomputed, and of which nobody can tell."""
    pairs = state.pairs
    return sum(p.proven for p in pairs), sum(p.recomputed for p in pairs), sum(p.unknown for p in pairs)


async def test_a_flip_of_a_warm_pair_gives_right_tokens_at_once(
    pair: RealService, figure: Figure, rng: random.Random
) -> None:
    for _ in range(2):  # both directions have handed over before
        await ask(pair.client, pair.url, Ask(prompts(rng, 1)[0], 2))
        await pair.swap()
        await pair.at_rest()
    waits_s = [await first_token_s(pair, rng) for _ in range(6)]
    figure(f"flip of a warm pair, decision to first correct token: {listed_ms(waits_s)} ms")


async def first_token_s(pair: RealService, rng: random.Random) -> float:
    """From the write of a flip to the first token of a request that took the new way."""
    asked = Ask(prompts(rng, 1, (60, 60))[0], 1)
    old = await pair.engine(P), await pair.engine(D)
    right = await alone(pair.client, await pair.engine_url(old[1]), asked)
    began_s = time.monotonic()
    await pair.swap()
    await until_answered_by(old[::-1], lambda one: ask(pair.client, pair.url, one), asked, right)
    return time.monotonic() - began_s


def listed_ms(waits_s: list[float]) -> str:
    return ", ".join(f"{wait_s * 1000:.0f}" for wait_s in waits_s)
