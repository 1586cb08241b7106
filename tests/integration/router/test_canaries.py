"""Canaries over loopback: they verify and warm every pair, and add no load that dispatch or metrics count."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import permutations
from typing import Any

import aiohttp
import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_core.values import Role
from fulcrum_router.control.state_port import build_router_state
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.kv_transfer.canaries import CanaryScheduler
from fulcrum_router.policy import PairKey, TransferOutcome
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    make_kv_transfer_params,
    respond_with_status,
    run_router,
)
from tests.waiting import wait_until, wait_until_time

BOTH_WAYS = [PairKey("d1", "p1"), PairKey("p1", "d1")]


def reports_cached_tokens(
    cached: int | None, *, handshake_s: float = 0.0, without_transfer: int | None = None
) -> Script:
    """A decode engine that reports `cached` tokens after a KV transfer, `without_transfer` without one.

    Its response to a transfer takes `handshake_s`.
    """

    async def script(response: ResponseWriter) -> None:
        is_transfer = "kv_transfer_params" in response.request.body
        if is_transfer:
            await wait_until_time(time.monotonic() + handshake_s, "the router measures this time")
        count = cached if is_transfer else without_transfer
        details = None if count is None else {"cached_tokens": count}
        usage = {"prompt_tokens": 261, "prompt_tokens_details": details}
        await response.json(200, {"choices": [{"text": "a"}], "usage": usage})

    return script


async def wait_for_a_check(world: RunningRouter) -> None:
    """Wait until the scheduler has looked for due canaries."""
    delays = world.router.pairs.prefill_delays  # each check replaces it
    await wait_until(
        lambda: world.router.pairs.prefill_delays is not delays, "the scheduler checks the pairs"
    )


@asynccontextmanager
async def canaries_running(
    world: RunningRouter, *, interval_s: float = 300.0
) -> AsyncIterator[RunningRouter]:
    """Send canaries during the block."""
    canaries = asyncio.ensure_future(
        CanaryScheduler(world.router, interval_s=interval_s, rng=random.Random(1)).run()
    )
    try:
        yield world
    finally:
        canaries.cancel()
        with suppress(asyncio.CancelledError):
            await canaries


def reasons(world: RunningRouter) -> dict[PairKey, str]:
    return {key: pair.reason for key, pair in sorted(world.router.pairs.pairs.items())}


def bodies(world: RunningRouter) -> list[dict[str, Any]]:
    return [request.body for engine in world.engines.values() for request in engine.requests]


async def test_both_directions_are_verified_before_the_first_request() -> None:
    engines = [
        FakeEngine("p1", decode=reports_cached_tokens(261)),
        FakeEngine("d1", decode=reports_cached_tokens(261)),
    ]
    async with run_router(*engines) as world, canaries_running(world):
        await wait_until(
            lambda: reasons(world) == dict.fromkeys(BOTH_WAYS, "Verified"), "both pairs are verified"
        )
        await wait_until(lambda: not world.router.pairs.prefill_delays, "and warm")
        assert world.ledgers_are_empty()
        assert world.router.counters.tiers == {}
        sent = bodies(world)
        assert len({body["cache_salt"] for body in sent}) == 2, "each canary has its own salt, on both legs"
        assert {len(body["prompt"]) > 2 * 16 for body in sent} == {True}
        assert {body["priority"] for body in sent} == {1_000_000}
        assert {
            (p.prefill, p.decode, p.verified) for p in build_router_state(world.router, now_s=0.0).pairs
        } == {
            ("d1", "p1", 1),
            ("p1", "d1", 1),
        }


async def test_a_pair_without_traffic_gets_another_canary() -> None:
    engines = [
        FakeEngine("p1", decode=reports_cached_tokens(261)),
        FakeEngine("d1", decode=reports_cached_tokens(261)),
    ]
    async with run_router(*engines) as world, canaries_running(world, interval_s=0.0):
        pair = world.router.pairs[PairKey("p1", "d1")]
        await wait_until(lambda: sum(pair.counts.values()) >= 2, "a second canary")


async def _is_standby(world: RunningRouter) -> None:
    world.router.active = False


async def _is_busy(world: RunningRouter) -> None:
    for instance in world.router.fleet.instances:
        instance.ledger.add_prefill(tokens=1, predicted_s=0.1, now_s=0.0)


async def _has_one_instance(world: RunningRouter) -> None:
    world.router.fleet["p1"].assign(None)


async def _waits_for_an_unresponsive_engine(world: RunningRouter) -> None:
    await _has_one_instance(world)
    world.router.fleet["p1"].starting = True


@pytest.mark.parametrize(
    "state",
    [_is_standby, _is_busy, _has_one_instance, _waits_for_an_unresponsive_engine],
    ids=["is a standby", "is busy", "has one instance", "waits for an engine that does not respond"],
)
async def test_no_canary_is_sent_by_a_router_that(state: Any) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        await state(world)
        async with canaries_running(world):
            for _ in range(2):
                await wait_for_a_check(world)
            assert bodies(world) == []


async def test_an_engine_that_refuses_a_role_gets_no_canary_until_its_role_changes() -> None:
    refusing = FakeEngine("d1", prefill=respond_with_status(400), decode=reports_cached_tokens(261))
    prefill = FakeEngine("p1", decode=reports_cached_tokens(261))
    async with run_router(prefill, refusing) as world, canaries_running(world, interval_s=0.05):
        verified = world.router.pairs[PairKey("p1", "d1")].counts
        await wait_until(lambda: sum(verified.values()) >= 2, "the other direction gets more canaries")
        assert len(refusing.prefills) == 1
        assert sum(world.router.pairs[PairKey("d1", "p1")].counts.values()) == 0
        world.router.fleet["d1"].assign(Role.BOTH)
        await wait_until(lambda: len(refusing.prefills) == 2, "a canary after the change of its role")


async def test_an_unreachable_side_channel_is_detected_and_bypassed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fulcrum_router.kv_transfer.verification.HANDSHAKE_TIMEOUT_S", 0.1)
    decode = FakeEngine("d1", decode=reports_cached_tokens(0, handshake_s=0.2))
    async with (
        run_router(FakeEngine("p1", decode=reports_cached_tokens(261)), decode) as world,
        canaries_running(world),
    ):
        await wait_until(
            lambda: reasons(world).get(BOTH_WAYS[1]) == "HandshakeFailed", "the failed handshake"
        )
        await wait_until(
            lambda: world.router.pairs.broken_prefill_instances == ("p1",), "the prefill instance is broken"
        )
        before = len(world["p1"].prefills)
        async with aiohttp.ClientSession() as client, client.post(world.url(), json=PROMPT) as response:
            assert response.status == 200
            assert response.headers["x-fulcrum-local-prefill"] == "kv_transfer_broken"
        assert len(world["p1"].prefills) == before
        decode.decode = reports_cached_tokens(261)
        world.router.pairs.invalidate("p1")  # as after a restart of the engine
        await wait_until(lambda: reasons(world)[BOTH_WAYS[1]] == "Verified", "the pair is verified")
        await wait_until(
            lambda: not world.router.pairs.broken_prefill_instances, "the prefill instance is used again"
        )


@pytest.mark.parametrize(
    ("without_transfer", "expected"),
    [(256, "Incompatible"), (None, "NotReported")],
    ids=["that reports it without a transfer", "that never reports it"],
)
async def test_an_engine_without_cached_token_counts_gets_one_check_request(
    without_transfer: int | None, expected: str
) -> None:
    decode = FakeEngine("d1", decode=reports_cached_tokens(None, without_transfer=without_transfer))
    async with (
        run_router(FakeEngine("p1", decode=reports_cached_tokens(261)), decode) as world,
        canaries_running(world),
    ):
        await wait_until(lambda: reasons(world).get(BOTH_WAYS[1]) == expected, expected)


async def test_a_new_engine_process_gets_canaries_at_once() -> None:
    engines = [
        FakeEngine("p1", decode=reports_cached_tokens(261)),
        FakeEngine("d1", decode=reports_cached_tokens(261)),
    ]
    async with run_router(*engines) as world, canaries_running(world):
        await wait_until(
            lambda: reasons(world) == dict.fromkeys(BOTH_WAYS, "Verified"), "both pairs are verified"
        )
        instance = world.router.fleet["d1"]
        instance.clear_endpoint()
        instance.set_endpoint("127.0.0.1", world["d1"].port)
        counts = [world.router.pairs[key].counts for key in BOTH_WAYS]
        await wait_until(lambda: [sum(c.values()) for c in counts] == [2, 2], "verified once more")


REQUESTS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


async def test_pairs_of_a_starting_instance_are_warmed_while_the_others_are_busy() -> None:
    new = FakeEngine("d2", decode=reports_cached_tokens(261), metrics=REQUESTS)
    engines = [
        FakeEngine("p1", decode=reports_cached_tokens(261)),
        FakeEngine("d1", decode=reports_cached_tokens(261)),
        new,
    ]
    ways = [PairKey(*pair) for pair in permutations(("d1", "d2", "p1"), 2) if "d2" in pair]
    async with run_router(*engines) as world:
        instance = world.router.fleet["d2"]
        instance.assign(None)
        for other in ("p1", "d1"):
            world.router.fleet[other].ledger.add_prefill(tokens=1, predicted_s=0.1, now_s=0.0)
        async with canaries_running(world):
            instance.starting = True
            await wait_until(
                lambda: reasons(world) == dict.fromkeys(sorted(ways), "Verified"), "all four pairs"
            )
        world.router.pairs.refresh(world.router.fleet.instances, now_s=time.monotonic())
        assert world.router.pairs.broken_prefill_instances == ()
        assert set(world.router.pairs.prefill_delays) == {"p1"}, "the only pair of serving instances is cold"


def test_an_instance_warms_up_only_until_it_serves() -> None:
    instance = Instance("d")
    instance.set_endpoint("127.0.0.1", 1)
    instance.starting, instance.engine_requests = True, 0
    before = instance.is_warming_up
    instance.assign(Role.DECODE)  # relabelled: it serves while its new role is verified
    assert (before, instance.serving, instance.is_warming_up) == (True, True, False)


async def return_long_transfer_params(response: ResponseWriter) -> None:
    tokens = len(response.request.body["prompt"])
    params = make_kv_transfer_params(response.engine)
    await response.json(
        200, {"choices": [{}], "usage": {"prompt_tokens": tokens}, "kv_transfer_params": params}
    )


async def test_a_slow_pair_gets_a_canary_long_enough_to_measure_its_speed() -> None:
    prefill = FakeEngine("p1", prefill=return_long_transfer_params, decode=reports_cached_tokens(3000))
    engines = [prefill, FakeEngine("d1", decode=reports_cached_tokens(3000))]
    async with run_router(*engines) as world:
        world.router.fleet["d1"].prefill_model = PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)
        pair = world.router.pairs[PairKey("p1", "d1")]
        for _ in range(3):  # far slower than any response within the deadline of a test
            pair.record_duration(9 * DEADLINE_S, tokens=3000, recompute_s=DEADLINE_S, cold=False)
        pair.record(TransferOutcome.VERIFIED, now_s=time.monotonic() - 400.0)
        assert pair.reason == "SlowTransport"
        async with canaries_running(world):
            await wait_until(lambda: pair.reason == "Verified", "the pair is fast again")
        assert {len(body["prompt"]) for body in world["d1"].decodes} == {3000}
