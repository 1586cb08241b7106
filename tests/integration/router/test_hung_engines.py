"""Engines that go without a word: dead nodes, hung processes. No request fails before its first byte."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import aiohttp
import pytest

from fulcrum_router.fleet import instances as fleet_instances
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.observe import engines as engine_probes
from tests.integration.router.fake_engines import (
    FakeEngine,
    World,
    hang,
    quick_settings,
    routed,
    running,
    until,
)
from tests.integration.simulator.servers import DEADLINE_S, MODEL, answer_to, launch, ready
from tests.integration.simulator.servers import Server as Engine

TOKENS = 8
HUNG_S = 6.0
"""Three probes of a second, the time to the first of them, and a busy machine."""


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(DEADLINE_S)
    ) as session:
        yield session


@contextmanager
def black_hole() -> Iterator[int]:
    """A port whose queue is full: nobody answers a further connection, as in front of a dead node."""
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


def move(world: World, name: str, port: int) -> Instance:
    instance = world.router.fleet[name]
    instance.place("127.0.0.1", port)
    return instance


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_dead_node_costs_a_connect_time_out_once(client: aiohttp.ClientSession, name: str) -> None:
    """Every request is answered; the first that notices has the instance left out at once."""
    engines = [FakeEngine(n) for n in ("p1", "p2", "d1", "d2")]
    with black_hole() as port:
        async with running(*engines, settings=quick_settings(connect=0.2)) as world:
            gone = move(world, name, port)

            async def ask() -> int:
                body = {"model": "m", "prompt": "p", "max_tokens": 2}
                async with client.post(world.url(), json=body) as answer:
                    return answer.status

            assert await asyncio.gather(*(ask() for _ in range(20))) == [200] * 20
            assert (gone.health.ejected, gone.serving) == (True, False)
            assert [r for r in world.router.books.ejections if "unreachable" not in r] == []
            began_s = time.monotonic()
            assert await ask() == 200
            assert time.monotonic() - began_s < 0.2, "nobody waits for it any more"
            assert world.ledgers_are_empty()


async def test_an_engine_with_a_full_backlog_that_answers_others_is_not_dead() -> None:
    with black_hole() as port:
        instance = Instance("d1")
        instance.place("127.0.0.1", port)
        assert instance.pool is not None
        connecting = asyncio.ensure_future(instance.pool.connect(0.2))
        await asyncio.sleep(0)
        instance.pool.heard_s = time.monotonic()
        with pytest.raises(Exception, match="no connection in time") as failed:
            await connecting
    assert failed.value.failure == "timeout"  # type: ignore[attr-defined]


async def test_what_waits_for_an_instance_that_left_goes_elsewhere(client: aiohttp.ClientSession) -> None:
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=hang), FakeEngine("d2")]
    async with running(*engines) as world:
        body = {"model": "m", "prompt": "p", "max_tokens": 2}
        asking = asyncio.ensure_future(client.post(world.url(), json=body))
        await until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        world.router.fleet.keep_only(["p1", "d2"])
        async with await asking as answer:
            assert (answer.status, answer.headers["x-fulcrum-decode"]) == (200, "d2")
        assert world.ledgers_are_empty()
        await until(lambda: bool(world["d1"].abandoned), "the engine is rid of it")


async def test_what_waits_for_an_engine_that_takes_no_connections_any_more_goes_elsewhere(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM at the end of its shutdown: it listens no more, and who is connected gets no answer."""
    monkeypatch.setattr(engine_probes, "INTERVAL_S", 0.05)
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=hang), FakeEngine("d2")]
    async with running(*engines, settings=quick_settings(first_byte=60.0)) as world:
        body = {"model": "m", "prompt": "p", "max_tokens": 2}
        asking = asyncio.ensure_future(client.post(world.url(), json=body))
        await until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        world.servers["d1"].close()
        await until(lambda: close_idle(world, "d1").health.ejected, "no probe gets through")
        async with await asking as answer:
            assert (answer.status, answer.headers["x-fulcrum-decode"]) == (200, "d2")
        assert world.ledgers_are_empty()


def close_idle(world: World, name: str) -> Instance:
    """No idle connection to the engine is left, as if it had closed them."""
    instance = world.router.fleet[name]
    assert instance.pool is not None
    while (idle := instance.pool.kept()) is not None:
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


BY_DEFAULT = {"connect": 1.0, "prefill": 60.0, "first_byte": 60.0, "idle": 60.0}
"""The time-outs that a service has."""


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """The engine hangs: its kernel takes connections, and nobody answers."""
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_hung_engine_is_left_out_and_its_waiting_requests_go_elsewhere(
    client: aiohttp.ClientSession, engines: dict[str, Engine], name: str
) -> None:
    async with routed(engines, **BY_DEFAULT) as (router, url):

        async def ask(number: int) -> tuple[int, str]:
            prompt = f"request {number} of {name}, once upon a time"
            body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS}
            async with client.post(url, json=body) as answer:
                text = (await answer.json())["choices"][0]["text"]
                return answer.status, "right" if text == answer_to(prompt, TOKENS) else text

        assert await ask(0) == (200, "right")
        with stopped(engines[name]):
            began_s = time.monotonic()
            answers = await asyncio.gather(*(ask(n) for n in range(1, 41)))
            assert answers == [(200, "right")] * 40
            await until(lambda: router.fleet[name].health.ejected, "the engine that hangs is left out")
            assert time.monotonic() - began_s < HUNG_S
        await until(lambda: router.fleet[name].serving, "it is back")


async def test_a_stream_of_a_hung_engine_ends_in_a_typed_error_long_before_its_idle_time_out(
    client: aiohttp.ClientSession, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_instances, "HANGING_STREAM_S", 0.5)
    two = {name: engines[name] for name in ("p1", "d1")}
    async with routed(two, **BY_DEFAULT) as (router, url):
        body = {"model": MODEL, "prompt": "a long one", "max_tokens": 400, "stream": True}
        async with client.post(url, json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            with stopped(engines["d1"]):
                last = await last_event(answer)
                assert router.fleet["d1"].health.ejected
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "upstream_error"


async def last_event(answer: aiohttp.ClientResponse) -> bytes:
    """The last event of a stream that has no clean end."""
    event = b""
    with suppress(aiohttp.ClientPayloadError):
        while True:
            event = await answer.content.readuntil(b"\n\n")
    return event
