"""The page `/requests` of the metrics port: the recorded requests in numbers, without text."""

import json

import aiohttp
from aiohttp.test_utils import TestServer

from fulcrum_cli.regret.recorded_traffic import parse_page
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.metrics_port import make_metrics_app
from fulcrum_router.control.requests_page import MAX_AGE_S, MIN_INTERVAL_S, RequestsPage
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    RunningRouter,
    respond_with_status,
    run_router,
)

SECRET = "canary-text"


async def fetch(client: aiohttp.ClientSession, world: RunningRouter, clock_s: list[float]) -> list[str]:
    """Read the page twice at once, and once more when it is too old; its clock is `clock_s[0]`."""
    page = RequestsPage(world.router, clock=lambda: clock_s[0])

    async def get() -> str:
        async with client.get(server.make_url("/requests")) as response:
            assert response.status == 200
            return await response.text()

    async with TestServer(make_metrics_app(build_registry(world.router), page)) as server:
        texts = [await get(), await get()]
        clock_s[0] += MIN_INTERVAL_S
        return [*texts, await get()]


async def test_a_request_is_recorded_in_numbers(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        for number in range(25):
            body = {**PROMPT, "prompt": f"{SECRET} {number}", "stream": number % 2 == 0, "user": SECRET}
            async with client.post(world.url(), json=body) as response:
                assert response.status == 200
                await response.read()
        text, same, later = await fetch(client, world, [0.0])
    assert (text == same, json.loads(text)["at_s"] < json.loads(later)["at_s"]) == (True, True)
    assert SECRET not in text
    traffic = parse_page(json.loads(text), "page")
    assert len(traffic.requests) == 25
    assert {each.output_tokens for each in traffic.requests} == {1, 3}  # whole responses report no usage here
    assert (traffic.ran_as.prefill, traffic.ran_as.instances, traffic.attainment) == (1, 2, 1.0)


async def test_requests_that_engines_reject_overwrite_no_recorded_ones(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1", respond_with_status(400)), FakeEngine("d1")) as world:
        async with client.post(world.url(), json=PROMPT) as response:
            assert response.status == 400
        text, *_ = await fetch(client, world, [0.0])
    assert json.loads(text)["requests"] == []


async def test_slow_readers_keep_one_page_in_memory(client: aiohttp.ClientSession) -> None:
    """A page of a full recorder has 10 MB: one for each slow reader would fill the router's memory."""
    clock_s = [0.0]
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        page = RequestsPage(world.router, clock=lambda: clock_s[0])
        async with TestServer(make_metrics_app(build_registry(world.router), page)) as server:

            async def read_time() -> float:
                async with client.get(server.make_url("/requests")) as response:
                    return float((await response.json())["at_s"])

            first = await read_time()
            page._readers += 1  # one that is slow
            clock_s[0] = MAX_AGE_S - 1
            kept = await read_time()
            clock_s[0] = MAX_AGE_S
            too_old = await read_time()
            page._readers -= 1
            clock_s[0] += MIN_INTERVAL_S
            last = await read_time()
            clock_s[0] += MIN_INTERVAL_S
            page._forget_outdated()
    assert (kept == first, kept < too_old < last, page._slices) == (True, True, [])
