"""Engines that stop responding (dead nodes, hung processes): no request fails before its first byte."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import aiohttp
import pytest

from fulcrum_router.fleet import instances as fleet_instances
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.observe import engines as engine_probes
from tests.integration.router.fake_engines import (
    FakeEngine,
    RunningRouter,
    never_respond,
    route_to_servers,
    run_router,
    settings_with_short_timeouts,
)
from tests.integration.simulator.servers import MODEL, expected_text, launch, ready
from tests.integration.simulator.servers import Server as Engine
from tests.waiting import run_pending_tasks, wait_until

TOKENS = 8
EJECTION_DEADLINE_S = 6.0
"""Three probes of a second each, the time to the first one, and a margin for a busy machine."""


@contextmanager
def open_unresponsive_port() -> Iterator[int]:
    """A port whose listen queue is full: connecting times out, as with a dead node."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            yield port
        finally:
            for filler in fillers:
                filler.close()


def move_instance(world: RunningRouter, name: str, port: int) -> Instance:
    instance = world.router.fleet[name]
    instance.set_endpoint("127.0.0.1", port)
    return instance


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_an_unreachable_instance_is_ejected_after_one_connect_timeout(
    client: aiohttp.ClientSession, name: str
) -> None:
    """Every request succeeds; the first connect time-out ejects the instance."""
    engines = [FakeEngine(n) for n in ("p1", "p2", "d1", "d2")]
    with open_unresponsive_port() as port:
        async with run_router(*engines, settings=settings_with_short_timeouts(connect=0.2)) as world:
            unreachable = move_instance(world, name, port)

            async def post() -> int:
                body = {"model": "m", "prompt": "p", "max_tokens": 2}
                async with client.post(world.url(), json=body) as response:
                    return response.status

            assert await asyncio.gather(*(post() for _ in range(20))) == [200] * 20
            assert (unreachable.health.ejected, unreachable.serving) == (True, False)
            assert [r for r in world.router.counters.ejections if "unreachable" not in r] == []
            began_s = time.monotonic()
            assert await post() == 200
            assert time.monotonic() - began_s < 0.2, "the ejected instance is not tried"
            assert world.ledgers_are_empty()


async def test_a_connect_timeout_of_an_engine_that_responds_elsewhere_is_not_unreachable() -> None:
    with open_unresponsive_port() as port:
        instance = Instance("d1")
        instance.set_endpoint("127.0.0.1", port)
        assert instance.connection_pool is not None
        connecting = asyncio.ensure_future(instance.connection_pool.connect(0.2))
        await run_pending_tasks()  # the connection attempt has started
        instance.connection_pool.last_streamed_s = time.monotonic()
        with pytest.raises(Exception, match="no connection in time") as failed:
            await connecting
    assert failed.value.failure == "timeout"  # type: ignore[attr-defined]


async def test_a_request_waiting_on_a_removed_instance_moves_to_another(
    client: aiohttp.ClientSession,
) -> None:
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=never_respond), FakeEngine("d2")]
    async with run_router(*engines) as world:
        body = {"model": "m", "prompt": "p", "max_tokens": 2}
        request_task = asyncio.ensure_future(client.post(world.url(), json=body))
        await wait_until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        world.router.fleet.keep_only(["p1", "d2"])
        async with await request_task as response:
            assert (response.status, response.headers["x-fulcrum-decode"]) == (200, "d2")
        assert world.ledgers_are_empty()
        await wait_until(lambda: bool(world["d1"].abandoned), "the engine sees the disconnect")


async def test_a_request_waiting_on_an_engine_that_stopped_listening_moves_to_another(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does this at the end of its shutdown: it closes the port and does not respond to open requests."""
    monkeypatch.setattr(engine_probes, "PROBE_INTERVAL_S", 0.05)
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=never_respond), FakeEngine("d2")]
    async with run_router(*engines, settings=settings_with_short_timeouts(first_byte=60.0)) as world:
        body = {"model": "m", "prompt": "p", "max_tokens": 2}
        request_task = asyncio.ensure_future(client.post(world.url(), json=body))
        await wait_until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        world.servers["d1"].close()
        await wait_until(lambda: close_idle_connections(world, "d1").health.ejected, "probes fail")
        async with await request_task as response:
            assert (response.status, response.headers["x-fulcrum-decode"]) == (200, "d2")
        assert world.ledgers_are_empty()


def close_idle_connections(world: RunningRouter, name: str) -> Instance:
    """Close the idle connections, as if the engine had."""
    instance = world.router.fleet[name]
    assert instance.connection_pool is not None
    while (idle := instance.connection_pool.take_idle()) is not None:
        idle.abort()
    return instance


# --- real engine servers that are stopped ------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    processes = {name: launch("laptop", "--port", "0") for name in ("p1", "p2", "d1", "d2")}
    made = {name: ready(process) for name, process in processes.items()}
    yield made
    for engine in made.values():
        engine.kill()


DEFAULT_TIMEOUTS_S = {"connect": 1.0, "prefill": 60.0, "first_byte": 60.0, "idle": 60.0}
"""Time-outs of a PDService that sets none."""


@contextmanager
def suspended(engine: Engine) -> Iterator[None]:
    """Stop the process: its kernel accepts connections, but nothing responds."""
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_hung_engine_is_ejected_and_its_waiting_requests_move_to_another(
    client: aiohttp.ClientSession, engines: dict[str, Engine], name: str
) -> None:
    async with route_to_servers(engines, **DEFAULT_TIMEOUTS_S) as (router, url):

        async def request_completion(number: int) -> tuple[int, str]:
            prompt = f"request {number} of {name}, once upon a time"
            body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS}
            async with client.post(url, json=body) as response:
                text = (await response.json())["choices"][0]["text"]
                return response.status, "right" if text == expected_text(prompt, TOKENS) else text

        assert await request_completion(0) == (200, "right")
        with suspended(engines[name]):
            began_s = time.monotonic()
            responses = await asyncio.gather(*(request_completion(n) for n in range(1, 41)))
            assert responses == [(200, "right")] * 40
            await wait_until(lambda: router.fleet[name].health.ejected, "the hung engine is ejected")
            assert time.monotonic() - began_s < EJECTION_DEADLINE_S
        await wait_until(lambda: router.fleet[name].serving, "the engine is readmitted")


async def test_a_stream_of_a_hung_engine_ends_in_an_error_event_before_the_idle_timeout(
    client: aiohttp.ClientSession, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_instances, "UNRESPONSIVE_STREAM_TIMEOUT_S", 0.5)
    two = {name: engines[name] for name in ("p1", "d1")}
    async with route_to_servers(two, **DEFAULT_TIMEOUTS_S) as (router, url):
        body = {"model": MODEL, "prompt": "a long one", "max_tokens": 400, "stream": True}
        async with client.post(url, json=body) as response:
            await response.content.readuntil(b"\n\n")
            with suspended(engines["d1"]):
                last = await read_last_event(response)
                assert router.fleet["d1"].health.ejected
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "upstream_error"


async def read_last_event(response: aiohttp.ClientResponse) -> bytes:
    """The last event of a stream that ends without its last chunk."""
    event = b""
    with suppress(aiohttp.ClientPayloadError):
        while True:
            event = await response.content.readuntil(b"\n\n")
    return event
