"""Canaries over loopback: they warm and prove every pair, stand in no books, and get in nobody's way."""

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
from fulcrum_router.control.state_port import picture
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.kv_transfer.canaries import Canaries
from fulcrum_router.policy import PairKey, Proof
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    Answering,
    FakeEngine,
    Script,
    World,
    answer_status,
    handoff,
    running,
    until,
)

PROMPT = {"model": "m", "prompt": "once upon a time", "max_tokens": 3}
BOTH_WAYS = [PairKey("d1", "p1"), PairKey("p1", "d1")]


def says(cached: int | None, *, after_s: float = 0.0, again: int | None = None) -> Script:
    """A decode that reports so many cached tokens to a hand-off, and `again` to a plain request."""

    async def script(answering: Answering) -> None:
        handed = "kv_transfer_params" in answering.asked.body
        if handed:
            await asyncio.sleep(after_s)
        count = cached if handed else again
        details = None if count is None else {"cached_tokens": count}
        usage = {"prompt_tokens": 261, "prompt_tokens_details": details}
        await answering.json(200, {"choices": [{"text": "a"}], "usage": usage})

    return script


@asynccontextmanager
async def watched(world: World, *, interval_s: float = 300.0) -> AsyncIterator[World]:
    """With canaries flying."""
    canaries = asyncio.ensure_future(
        Canaries(world.router, interval_s=interval_s, rng=random.Random(1)).run()
    )
    try:
        yield world
    finally:
        canaries.cancel()
        with suppress(asyncio.CancelledError):
            await canaries


def reasons(world: World) -> dict[PairKey, str]:
    return {key: pair.reason for key, pair in sorted(world.router.pairs.pairs.items())}


def bodies(world: World) -> list[dict[str, Any]]:
    return [asked.body for engine in world.engines.values() for asked in engine.asked]


async def test_both_directions_are_proven_before_anybody_asks() -> None:
    engines = [FakeEngine("p1", decode=says(261)), FakeEngine("d1", decode=says(261))]
    async with running(*engines) as world, watched(world):
        await until(lambda: reasons(world) == dict.fromkeys(BOTH_WAYS, "Proven"), "both pairs are proven")
        await until(lambda: not world.router.pairs.delays, "and warm")
        assert world.ledgers_are_empty()
        assert world.router.books.tiers == {}
        sent = bodies(world)
        assert len({body["cache_salt"] for body in sent}) == 2, (
            "a salt for each canary, the same on both legs"
        )
        assert {len(body["prompt"]) > 2 * 16 for body in sent} == {True}
        assert {body["priority"] for body in sent} == {1_000_000}
        assert {(p.prefill, p.decode, p.proven) for p in picture(world.router, now_s=0.0).pairs} == {
            ("d1", "p1", 1),
            ("p1", "d1", 1),
        }


async def test_a_pair_without_traffic_is_tried_again() -> None:
    engines = [FakeEngine("p1", decode=says(261)), FakeEngine("d1", decode=says(261))]
    async with running(*engines) as world, watched(world, interval_s=0.0):
        pair = world.router.pairs[PairKey("p1", "d1")]
        await until(lambda: sum(pair.counts.values()) >= 2, "a second canary")


async def _stands_by(world: World) -> None:
    world.router.active = False


async def _is_busy(world: World) -> None:
    for instance in world.router.fleet.all:
        instance.ledger.open_prefill(tokens=1, seconds=0.1)


async def _is_alone(world: World) -> None:
    world.router.fleet["p1"].assign(None)


async def _waits_for_an_engine(world: World) -> None:
    await _is_alone(world)
    world.router.fleet["p1"].starting = True


@pytest.mark.parametrize(
    "state",
    [_stands_by, _is_busy, _is_alone, _waits_for_an_engine],
    ids=["standby", "busy", "alone", "waits for an engine that does not answer"],
)
async def test_no_canary_flies_from_a_router_that(state: Any) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        await state(world)
        async with watched(world):
            looked = world.router.pairs.refresh
            seen: list[float] = []

            def refresh(instances: Any, *, now_s: float) -> None:
                seen.append(now_s)
                looked(instances, now_s=now_s)

            world.router.pairs.refresh = refresh  # type: ignore[method-assign]
            await until(lambda: len(seen) >= 2, "it has looked twice")
            assert bodies(world) == []


async def test_engines_that_refuse_a_role_are_left_alone_until_roles_change() -> None:
    refusing = FakeEngine("d1", prefill=answer_status(400), decode=says(261))
    giver = FakeEngine("p1", decode=says(261))
    async with running(giver, refusing) as world, watched(world, interval_s=0.05):
        proven = world.router.pairs[PairKey("p1", "d1")].counts
        await until(lambda: sum(proven.values()) >= 2, "the other direction is tried again and again")
        assert len(refusing.prefills) == 1
        assert sum(world.router.pairs[PairKey("d1", "p1")].counts.values()) == 0
        world.router.fleet["d1"].assign(Role.BOTH)
        await until(lambda: len(refusing.prefills) == 2, "its role has changed")


async def test_a_side_channel_that_cannot_be_reached_is_found_and_gone_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fulcrum_router.kv_transfer.verification.HANDSHAKE_TIMEOUT_S", 0.1)
    decode = FakeEngine("d1", decode=says(0, after_s=0.2))
    async with running(FakeEngine("p1", decode=says(261)), decode) as world, watched(world):
        await until(lambda: reasons(world).get(BOTH_WAYS[1]) == "HandshakeFailed", "found")
        await until(lambda: world.router.pairs.broken == ("p1",), "drawn the conclusion")
        before = len(world["p1"].prefills)
        async with aiohttp.ClientSession() as client, client.post(world.url(), json=PROMPT) as answer:
            assert (answer.status, answer.headers["x-fulcrum-local-prefill"]) == (200, "no_kv_transfer")
        assert len(world["p1"].prefills) == before
        decode.decode = says(261)
        world.router.pairs.cool("p1")  # what a new engine process does
        await until(lambda: reasons(world)[BOTH_WAYS[1]] == "Proven", "healed")
        await until(lambda: not world.router.pairs.broken, "used again")


@pytest.mark.parametrize(
    ("again", "expected"), [(256, "NotCompatible"), (None, "CannotTell")], ids=["it does", "it never does"]
)
async def test_an_engine_that_does_not_say_is_asked_whether_it_ever_does(
    again: int | None, expected: str
) -> None:
    decode = FakeEngine("d1", decode=says(None, again=again))
    async with running(FakeEngine("p1", decode=says(261)), decode) as world, watched(world):
        await until(lambda: reasons(world).get(BOTH_WAYS[1]) == expected, expected)


async def test_a_new_engine_process_is_tried_at_once() -> None:
    engines = [FakeEngine("p1", decode=says(261)), FakeEngine("d1", decode=says(261))]
    async with running(*engines) as world, watched(world):
        await until(lambda: reasons(world) == dict.fromkeys(BOTH_WAYS, "Proven"), "both pairs are proven")
        instance = world.router.fleet["d1"]
        instance.leave()
        instance.place("127.0.0.1", world["d1"].port)
        counts = [world.router.pairs[key].counts for key in BOTH_WAYS]
        await until(lambda: [sum(c.values()) for c in counts] == [2, 2], "proven once more")


REQUESTS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


async def test_the_pairs_of_an_instance_that_does_not_serve_yet_are_warmed_though_the_others_are_busy() -> (
    None
):
    new = FakeEngine("d2", decode=says(261), metrics=REQUESTS)
    engines = [FakeEngine("p1", decode=says(261)), FakeEngine("d1", decode=says(261)), new]
    ways = [PairKey(*pair) for pair in permutations(("d1", "d2", "p1"), 2) if "d2" in pair]
    async with running(*engines) as world:
        instance = world.router.fleet["d2"]
        instance.assign(None)
        for other in ("p1", "d1"):
            world.router.fleet[other].ledger.open_prefill(tokens=1, seconds=0.1)
        async with watched(world):
            instance.starting = True
            await until(lambda: reasons(world) == dict.fromkeys(sorted(ways), "Proven"), "all four pairs")
        world.router.pairs.refresh(world.router.fleet.all, now_s=time.monotonic())
        assert world.router.pairs.broken == ()
        assert set(world.router.pairs.delays) == {"p1"}, "of those that serve the one pair is cold"


def test_canaries_wait_for_nobody_only_while_an_instance_does_not_serve() -> None:
    instance = Instance("d")
    instance.place("127.0.0.1", 1)
    instance.starting, instance.engine_requests = True, 0
    before = instance.warms_up
    instance.assign(Role.DECODE)  # relabelled, and looked at while it serves
    assert (before, instance.serving, instance.warms_up) == (True, True, False)


async def give_long_handoff(answering: Answering) -> None:
    tokens = len(answering.asked.body["prompt"])
    params = handoff(answering.engine)
    await answering.json(
        200, {"choices": [{}], "usage": {"prompt_tokens": tokens}, "kv_transfer_params": params}
    )


async def test_a_slow_pair_is_tried_with_a_prompt_that_tells() -> None:
    giver = FakeEngine("p1", prefill=give_long_handoff, decode=says(3000))
    engines = [giver, FakeEngine("d1", decode=says(3000))]
    async with running(*engines) as world:
        world.router.fleet["d1"].prefill_model = PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)
        pair = world.router.pairs[PairKey("p1", "d1")]
        for _ in range(3):  # slow beside computing it there, as no answer within a test's deadline is
            pair.timed(9 * DEADLINE_S, tokens=3000, recompute_s=DEADLINE_S, cold=False)
        pair.record(Proof.PROVEN, now_s=time.monotonic() - 400.0)
        assert pair.reason == "SlowTransport"
        async with watched(world):
            await until(lambda: pair.reason == "Proven", "it is quick again")
        assert {len(body["prompt"]) for body in world["d1"].decodes} == {3000}
