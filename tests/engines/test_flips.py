"""Flips of real engines while requests run: no request fails and every token is right."""

import asyncio
import os
import random
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from fulcrum_cli.local.cores import list_threads
from fulcrum_core.router_state import RouterState
from tests.conftest import RecordMeasurement
from tests.engines.completions import (
    CompletionRequest,
    compute_reference_tokens,
    generate_mixed_requests,
    generate_prompts,
    send,
    send_until_routed,
)
from tests.engines.services import D, P, VllmService
from tests.waiting import wait_until_time

pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")

REQUESTS, CONCURRENCY = 200, 8


async def test_flips_each_second_fail_no_request_and_change_no_token(
    pair: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    requests = generate_mixed_requests(rng, REQUESTS)
    before = await pair.read_state()
    flips = asyncio.create_task(flip_both_each_second(pair))
    began_s = time.monotonic()
    sending = gather_bounded([send(pair.client, pair.url, one) for one in requests])
    responses = await asyncio.wait_for(sending, 300)
    took_s = time.monotonic() - began_s
    flips.cancel()
    flips_made = (await asyncio.gather(flips, return_exceptions=True))[0]
    assert isinstance(flips_made, int)
    await pair.wait_until_idle()
    reference_url = await pair.engine_url(await pair.find_instance(D))
    expected = await gather_bounded(
        [compute_reference_tokens(pair.client, reference_url, one) for one in requests]
    )
    wrong = [n for n, response in enumerate(responses) if response.tokens != expected[n]]
    transferred = sum(response.prefill not in (None, response.decode) for response in responses)
    directions = {response.route for response in responses}
    after = await pair.read_state()
    verified, recomputed, unknown = (
        now - then
        for now, then in zip(count_transfer_outcomes(after), count_transfer_outcomes(before), strict=True)
    )
    record_measurement(
        f"{REQUESTS} requests, {CONCURRENCY} at a time, {flips_made} flips of both in {took_s:.1f} s: "
        f"{REQUESTS - len(wrong)} token-identical, {transferred} transferred between engines; "
        f"{verified} KV transfers verified, {recomputed} recomputed, {unknown} unknown"
    )
    assert ([response.status for response in responses], wrong) == ([200] * REQUESTS, [])
    assert flips_made >= 3
    assert transferred > REQUESTS / 2
    assert len({pair for pair in directions if pair[0] != pair[1]}) >= 2
    assert count_failures(after) == count_failures(before)


async def test_engines_may_use_all_cores(pair: VllmService) -> None:
    for name in await pair.list_instances():
        cores = []
        for thread in list_threads(await pair.find_leader_pid(name)):
            with suppress(ProcessLookupError):  # it has just ended
                cores.append(os.sched_getaffinity(thread))
        assert cores == [os.sched_getaffinity(0)] * len(cores), name
        assert len(cores) > 1


async def gather_bounded(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all, at most `CONCURRENCY` at a time; return their results in order."""
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(each: Coroutine[Any, Any, T]) -> T:
        async with limit:
            return await each

    return await asyncio.gather(*map(one, coroutines))


async def flip_both_each_second(pair: VllmService) -> int:
    """Flip both instances once a second until cancelled; return how often."""
    flips_made = 0
    try:
        while True:
            await wait_until_time(time.monotonic() + 1.0, "the published figure is for a flip each second")
            await pair.flip_both()
            flips_made += 1
    except asyncio.CancelledError:
        return flips_made


def count_failures(state: RouterState) -> tuple[int, int]:
    """Return the numbers of failed requests and broken streams."""
    return sum(tier.failed for tier in state.tiers), sum(tier.broken for tier in state.tiers)


def count_transfer_outcomes(state: RouterState) -> tuple[int, int, int]:
    """Return the numbers of verified, recomputed and unknown KV transfers."""
    pairs = state.pairs
    return sum(p.verified for p in pairs), sum(p.recomputed for p in pairs), sum(p.unknown for p in pairs)


async def test_first_token_after_a_flip_of_a_warm_pair_is_right(
    pair: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    for _ in range(2):  # both directions have a KV transfer before the measurement
        await send(pair.client, pair.url, CompletionRequest(generate_prompts(rng, 1)[0], 2))
        await pair.flip_both()
        await pair.wait_until_idle()
    waits_s = [await measure_flip_to_token_s(pair, rng) for _ in range(6)]
    record_measurement(f"flip of a warm pair, decision to first correct token: {format_ms(waits_s)} ms")


async def measure_flip_to_token_s(pair: VllmService, rng: random.Random) -> float:
    """Return the time from the write of a flip to the first token of a request with the new route."""
    request = CompletionRequest(generate_prompts(rng, 1, (60, 60))[0], 1)
    old = await pair.find_instance(P), await pair.find_instance(D)
    right = await compute_reference_tokens(pair.client, await pair.engine_url(old[1]), request)
    began_s = time.monotonic()
    await pair.flip_both()
    await send_until_routed(old[::-1], lambda one: send(pair.client, pair.url, one), request, right)
    return time.monotonic() - began_s


def format_ms(waits_s: list[float]) -> str:
    return ", ".join(f"{wait_s * 1000:.0f}" for wait_s in waits_s)
