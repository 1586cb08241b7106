"""What ejects an instance: its own failures do, load and clients do not. Never are all of a role ejected."""

import time
from collections.abc import Awaitable

import aiohttp
import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_router.fleet.health import MAX_REJECTIONS
from fulcrum_router.observe.outliers import ERROR_RATE, INTERVAL_S, OutlierDetector
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    respond_with_status,
    run_router,
    send_kv_transfer_params,
    send_source_name,
)

REQUESTS = 12


async def send_ten_megabytes(response: ResponseWriter) -> None:
    await response.json(200, {"choices": [{"prompt_logprobs": "x" * (10 * 1024 * 1024)}]})


async def post(client: aiohttp.ClientSession, world: RunningRouter, count: int = REQUESTS) -> list[int]:
    statuses = []
    for _ in range(count):
        async with client.post(world.url(), json=PROMPT) as response:
            await response.read()
            statuses.append(response.status)
    return statuses


@pytest.mark.parametrize(
    ("script", "blame"),
    [
        pytest.param(respond_with_status(503), "load", id="an engine that sheds load"),
        pytest.param(send_ten_megabytes, "client", id="an answer with prompt_logprobs"),
    ],
)
async def test_load_and_clients_eject_no_instance(
    client: aiohttp.ClientSession, script: Script, blame: str
) -> None:
    engines = [FakeEngine("p1", prefill=script), FakeEngine("p2", prefill=script), FakeEngine("d1")]
    async with run_router(*engines) as world:
        assert await post(client, world) == [200] * REQUESTS, "the decode instance computes the prompts"
        counters = world.router.counters
        assert set(counters.leg_failures) == {("prefill", blame)}
        assert (world.router.fleet["p1"].error_share > 0) is (blame == "load"), "others are preferred"
        assert (dict(counters.ejections), [i.serving for i in world.router.fleet.instances]) == (
            {},
            [True] * 3,
        )


async def test_engines_that_all_fail_are_not_all_ejected(client: aiohttp.ClientSession) -> None:
    """The first requests may be at fault; then the engines are known to fail, and decode computes prompts."""
    fails = respond_with_status(500)
    engines = [*(FakeEngine(name, prefill=fails) for name in ("p1", "p2", "p3", "p4")), FakeEngine("d1")]
    async with run_router(*engines) as world:
        statuses = await post(client, world, 4 * REQUESTS)
        assert statuses[-REQUESTS:] == [200] * REQUESTS
        assert sum(i.serving for i in world.router.fleet.instances if i.name.startswith("p")) == 2
        assert world.router.counters.ejections == {"status": 2}
        assert world.router.fleet.withheld_ejections["status"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_request_that_every_engine_answers_with_5xx_reaches_two_and_ejects_none(
    client: aiohttp.ClientSession, path: str
) -> None:
    async def fail_on_fatal_request(response: ResponseWriter) -> None:
        if response.request.body.get("fatal"):
            return await respond_with_status(500)(response)
        script = send_kv_transfer_params if response.request.is_prefill else send_source_name()
        return await script(response)

    names = ("p1", "p2", "p3", "d1", "d2", "d3")
    async with run_router(
        *(FakeEngine(n, fail_on_fatal_request, fail_on_fatal_request) for n in names)
    ) as world:
        for _ in range(30):
            before = sum(len(world[n].requests) for n in names)
            async with client.post(world.url(path), json=PROMPT | {"fatal": True}) as response:
                assert (response.status, response.headers.get("x-should-retry")) == (502, "false")
            assert sum(len(world[n].requests) for n in names) == before + 2
            assert await post(client, world, 2) == [200, 200], "good requests in between"
        counters = world.router.counters
        assert (dict(counters.ejections), {blame for _, blame in counters.leg_failures}) == ({}, {"client"})
        assert world.router.journeys.retry_budget.retries == 0


async def test_an_engine_that_fails_what_others_serve_is_ejected(client: aiohttp.ClientSession) -> None:
    engines = [
        FakeEngine("p1", respond_with_status(500)),
        FakeEngine("p2"),
        FakeEngine("p3"),
        FakeEngine("d1"),
    ]
    async with run_router(*engines) as world:
        fleet = world.router.fleet
        for _ in range(3):
            fleet["p1"].health.error_share = fleet["p1"].error_share = 0.0  # as after some seconds
            for name in ("p2", "p3"):
                fleet[name].prefill_model = PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)
            assert await post(client, world, 1) == [200]
        assert (fleet["p1"].serving, dict(world.router.counters.ejections)) == (False, {"status": 1})


async def test_the_only_instance_of_a_role_is_not_ejected_for_errors(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=respond_with_status(500))) as world:
        await post(client, world)
        assert world.router.fleet["d1"].serving


async def test_an_engine_that_fails_every_second_leg_is_ejected_as_an_outlier(
    client: aiohttp.ClientSession,
) -> None:
    """It never fails three times in a row, and would be the least loaded one for ever."""
    failing = FakeEngine("p1")
    async with run_router(failing, FakeEngine("p2"), FakeEngine("d1")) as world:
        router = world.router
        p1, p2 = router.fleet["p1"], router.fleet["p2"]
        for instance in (p1, p2):
            instance.health.answered = 30
        p1.health.answered, p1.health.failed = 10, 20
        detector = OutlierDetector(router.fleet, on_ejection=router.record_ejection)
        now_s = time.monotonic()
        detector.tick(now_s)
        detector.tick(now_s + INTERVAL_S)  # without legs in between nothing is judged
        assert (p1.serving, p2.serving, router.counters.ejections) == (False, True, {ERROR_RATE: 1})
        assert await post(client, world, 3) == [200] * 3
        assert failing.prefills == []


async def test_an_engine_that_cannot_fetch_an_image_is_not_blamed_if_another_one_can(
    client: aiohttp.ClientSession,
) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://images.example/1.png"}}
    body = {"model": "test", "messages": [{"role": "user", "content": [part]}]}
    async with run_router(
        FakeEngine("p1", respond_with_status(500)), FakeEngine("p2"), FakeEngine("d1")
    ) as world:
        for _ in range(5):
            world.router.fleet["p2"].prefill_model = PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)
            async with client.post(world.url("/v1/chat/completions"), json=body) as response:
                assert response.status == 200
        counters, health = world.router.counters, world.router.fleet["p1"].health
        assert (dict(counters.leg_failures), counters.ejections) == ({("prefill", "client"): 5}, {})
        assert (len(world["p1"].prefills), health.error_share) == (5, 0.0)


def reject_all(response: ResponseWriter) -> Awaitable[None]:
    return respond_with_status(404)(response)


@pytest.mark.parametrize("sick", ["p1", "d1"])
async def test_an_engine_that_rejects_what_others_serve_is_ejected(
    client: aiohttp.ClientSession, sick: str
) -> None:
    """It answers at once and is always free, so that it would get every request."""
    names = ("p1", "p2", "d1", "d2")
    engines = [FakeEngine(n, reject_all, reject_all) if n == sick else FakeEngine(n) for n in names]
    async with run_router(*engines) as world:
        sick_instance, peer = world.router.fleet[sick], world.router.fleet[sick[0] + "2"]
        statuses, deadline_s = [], time.monotonic() + DEADLINE_S
        while sick_instance.serving and time.monotonic() < deadline_s:
            sick_instance.health.error_share = sick_instance.error_share = 0.0  # as after some seconds
            peer.prefill_model = PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)
            peer.decode_model = DecodeModel(intercept=DEADLINE_S, slope=0.0)
            statuses += await post(client, world, 1)
        assert (statuses[:MAX_REJECTIONS], statuses.count(200)) == ([404] * MAX_REJECTIONS, 3)
        assert dict(world.router.counters.ejections) == {"status": 1}


async def test_requests_that_all_engines_reject_eject_none_and_reach_two_engines_now_and_then(
    client: aiohttp.ClientSession,
) -> None:
    engines = [FakeEngine(name, reject_all, reject_all) for name in ("p1", "p2", "d1", "d2")]
    async with run_router(*engines) as world:
        assert await post(client, world, 50) == [404] * 50
        counters, fleet = world.router.counters, world.router.fleet
        legs = sum(len(world[name].requests) for name in ("p1", "p2"))
        assert 50 < legs < 60
        assert ({i.error_share for i in fleet.instances}, dict(counters.ejections)) == ({0.0}, {})
        assert {blame for _, blame in counters.leg_failures} == {"client"}
        assert world.router.journeys.retry_budget.retries == 0
