"""Requests that wait in the router until a prefill instance can use them (dispatch mode Queue)."""

import asyncio
from dataclasses import replace

import aiohttp

from fulcrum_core.latency import PrefillModel
from fulcrum_router.policy.waiting.waiting_room import WaitingRoom
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    run_router,
    send_kv_transfer_params,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until

SETTINGS = replace(settings_with_short_timeouts(prefill=20.0), prefill_ahead_s=0.5)


def prefill_when(free: asyncio.Event) -> Script:
    """A prefill script that answers when `free` is set."""

    async def script(response: ResponseWriter) -> None:
        await free.wait()
        await send_kv_transfer_params(response)

    return script


def predict_long_prefills(world: RunningRouter) -> None:
    """Predict a minute for each prompt: one is enough work for an instance."""
    for instance in world.router.fleet.instances:
        instance.prefill_model = PrefillModel(c0=60.0, c1=0.0, c2=0.0)


async def post(client: aiohttp.ClientSession, world: RunningRouter, tier: str = "") -> tuple[int, str]:
    headers = {"x-customer-tier": tier} if tier else {}
    async with client.post(world.url(), json=PROMPT, headers=headers) as response:
        return response.status, await response.text()


async def test_a_request_waits_in_the_router_and_goes_to_the_instance_that_is_free_first(
    client: aiohttp.ClientSession,
) -> None:
    free = {"p1": asyncio.Event(), "p2": asyncio.Event()}
    engines = [FakeEngine(name, prefill=prefill_when(event)) for name, event in free.items()]
    async with run_router(*engines, FakeEngine("d1"), settings=SETTINGS) as world:
        predict_long_prefills(world)
        tasks = [asyncio.ensure_future(post(client, world)) for _ in range(3)]
        room = world.router.journeys.waiting_room
        await wait_until(lambda: all(world[name].prefills for name in free), "both instances have work")
        assert (len(room), [len(world[name].prefills) for name in free]) == (1, [1, 1])
        free["p2"].set()
        await wait_until(lambda: len(world["p2"].prefills) == 2, "the request that waited is sent to p2")
        free["p1"].set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3
        assert (len(room), world.ledgers_are_empty()) == (0, True)


async def test_a_passed_through_request_that_generates_waits_for_decode_instances(
    client: aiohttp.ClientSession,
) -> None:
    """Its prompt is computed there: it counts until its first byte, and the next one waits in the router."""
    free = asyncio.Event()

    async def answer_when_free(response: ResponseWriter) -> None:
        await free.wait()
        await response.json(200, {})

    async def send(path: str) -> int:
        async with client.post(world.url(path), json={"input": "word " * 100}) as response:
            return response.status

    d1 = FakeEngine("d1", decode=answer_when_free)
    async with run_router(FakeEngine("p1"), d1, settings=SETTINGS) as world:
        predict_long_prefills(world)
        tasks = [asyncio.ensure_future(send("/v1/responses")) for _ in range(2)]
        room, ledger = world.router.journeys.waiting_room, world.router.fleet["d1"].ledger
        await wait_until(lambda: bool(d1.requests), "the first request is sent")
        assert (len(room), len(d1.requests), ledger.local_prefills, ledger.prefill_tokens) == (1, 1, 1, 125)
        free.set()
        assert await asyncio.gather(*tasks) == [200, 200]
        world.router.journeys.waiting_room = WaitingRoom(prefill_ahead_s=0.0, max_requests=0)
        assert await send("/v1/messages") == 503
        assert world.ledgers_are_empty()
        passed_through = world.router.counters.passed_through
        assert passed_through == {("/v1/responses", "ok"): 2, ("/v1/messages", "failed"): 1}


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(
    client: aiohttp.ClientSession,
) -> None:
    free = asyncio.Event()
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1"), settings=SETTINGS
    ) as world:
        predict_long_prefills(world)
        first = asyncio.ensure_future(post(client, world))
        room = world.router.journeys.waiting_room
        await wait_until(lambda: bool(world["p1"].prefills), "the first request is sent")
        second = asyncio.ensure_future(post(client, world))
        await wait_until(lambda: len(room) == 1, "the second request waits")
        second.cancel()
        await wait_until(lambda: not room.members, "its place is free")
        free.set()
        assert (await first)[0] == 200
        assert (len(world["p1"].prefills), world.ledgers_are_empty()) == (1, True)


async def test_a_full_waiting_room_is_a_503_that_says_so(client: aiohttp.ClientSession) -> None:
    free = asyncio.Event()
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1"), settings=SETTINGS
    ) as world:
        predict_long_prefills(world)
        world.router.journeys.waiting_room = WaitingRoom(prefill_ahead_s=0.5, max_requests=0)
        first = asyncio.ensure_future(post(client, world))
        await wait_until(lambda: bool(world["p1"].prefills), "the first request is sent")
        status, text = await post(client, world)
        assert (status, "wait" in text) == (503, True)
        free.set()
        assert (await first)[0] == 200


async def test_requests_that_wait_leave_when_no_prefill_instance_is_left(
    client: aiohttp.ClientSession,
) -> None:
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(asyncio.Event())), FakeEngine("d1"), settings=SETTINGS
    ) as world:
        predict_long_prefills(world)
        tasks = [asyncio.ensure_future(post(client, world)) for _ in range(2)]
        await wait_until(lambda: len(world.router.journeys.waiting_room) == 1, "one request waits")
        world.router.fleet.keep_only(["d1"])
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
        assert world.ledgers_are_empty()


async def test_a_premium_request_passes_those_that_wait_without_a_tier(client: aiohttp.ClientSession) -> None:
    free = asyncio.Event()
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1"), settings=SETTINGS
    ) as world:
        predict_long_prefills(world)
        room = world.router.journeys.waiting_room

        async def send(name: str, tier: str) -> None:
            headers = {"x-customer-tier": tier}
            async with client.post(world.url(), json={**PROMPT, "prompt": name}, headers=headers) as response:
                await response.read()

        first = asyncio.ensure_future(send("first", "default"))
        await wait_until(lambda: bool(world["p1"].prefills), "the first one is sent")
        later = asyncio.ensure_future(send("free", "default"))
        await wait_until(lambda: len(room) == 1, "one waits")
        last = asyncio.ensure_future(send("gold", "premium"))
        await wait_until(lambda: len(room) == 2, "two wait")
        free.set()
        await asyncio.gather(first, later, last)
        served = [body["prompt"] for body in world["p1"].prefills]
    assert served == ["first", "gold", "free"]


async def test_requests_of_a_tier_that_is_deleted_are_served_and_the_next_one_has_the_default_tier(
    client: aiohttp.ClientSession,
) -> None:
    """One request is computed and one waits while the tier is deleted; nothing of them is left behind."""
    free = asyncio.Event()
    engines = FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1")
    async with run_router(*engines, settings=SETTINGS) as world:
        predict_long_prefills(world)
        tasks = [asyncio.ensure_future(post(client, world, "premium")) for _ in range(2)]
        router = world.router
        await wait_until(lambda: len(router.journeys.waiting_room) == 1, "the second request waits")
        router.configure(replace(SETTINGS, tiers={}), last_prefill_to_decode_s=None)
        free.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 2
        headers = {"x-customer-tier": "premium"}
        async with client.post(world.url(), json=PROMPT, headers=headers) as response:
            told = response.headers["x-fulcrum-tier"]
        assert (response.status, told) == (200, "default; ignored=unknown")
        assert (world.ledgers_are_empty(), len(router.journeys.waiting_room)) == (True, 0)
