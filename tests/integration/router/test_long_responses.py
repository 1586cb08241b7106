"""Responses that take minutes, from engines that compute slowly, queue, or wait for a slow client.

The time-outs are those of a PDService that sets none. The tests move the clock of the checks forward.
"""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from fulcrum_core.api.router import TimeoutsSpec
from fulcrum_router.data_path.downstream import STALLED_CLIENT_TIMEOUT_S
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.upstream import REUSE_RACE_S
from fulcrum_router.observe import engines as engine_probes
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    build_post,
    frame_event,
    run_router,
    send_source_name,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until, wait_until_time

DEFAULT = settings_with_short_timeouts(connect=1.0, prefill=60.0, first_byte=60.0, idle=60.0)


def respond_after(event: asyncio.Event) -> Script:
    """A decode script that responds once the event is set."""

    async def script(response: ResponseWriter) -> None:
        await event.wait()
        await send_source_name()(response)

    return script


def let_time_pass(world: RunningRouter, seconds: int, *, computing: Instance | None = None) -> None:
    """Check the time-outs for each second from now on; `computing` makes progress meanwhile."""
    now_s = time.monotonic()
    for second in range(1, seconds + 1):
        if computing is not None:
            computing.record_progress(float(second), now_s=now_s + second)
        world.router.fleet.enforce_timeouts(now_s + second)


async def wait_for_decode_leg(world: RunningRouter, name: str = "d1") -> Instance:
    await wait_until(lambda: bool(world[name].decodes), "the decode leg waits")
    await wait_until_time(time.monotonic() + REUSE_RACE_S, "the request is no longer sent again")
    return world.router.fleet[name]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"max_tokens": 1000}, id="with a number of tokens"),
        pytest.param({"max_tokens": 500, "n": 2}, id="with several choices"),
        pytest.param({"max_tokens": None, "messages": []}, id="up to the end of the context"),
    ],
)
async def test_a_whole_response_of_five_minutes_arrives_after_one_decode_leg(
    client: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    done = asyncio.Event()
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=respond_after(done)), FakeEngine("d2")]
    async with run_router(*engines, settings=DEFAULT) as world:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        request = asyncio.ensure_future(client.post(world.url(path), json={**PROMPT, **fields}))
        instance = await wait_for_decode_leg(world)
        let_time_pass(world, 300, computing=instance)
        done.set()
        async with await request as response:
            assert (response.status, response.headers["x-fulcrum-decode"]) == (200, "d1")
        counters = world.router.counters
        assert (counters.retries, instance.health.failures, world["d2"].decodes) == ({}, 0, [])


async def test_an_engine_ejected_by_judgement_may_finish_its_whole_responses(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ejected for minutes, and its probes go on: they show whether it computes, or is gone."""
    monkeypatch.setattr(engine_probes, "PROBE_INTERVAL_S", 0.05)
    done = asyncio.Event()
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=respond_after(done))) as world:
        request = asyncio.ensure_future(client.post(world.url(), json={**PROMPT, "max_tokens": 1000}))
        instance = await wait_for_decode_leg(world)
        instance.health.eject(now_s=time.monotonic(), judged=True)
        ejected_at_s = time.monotonic()
        await wait_until(lambda: instance.progress_at_s > ejected_at_s, "a probe has shown progress")
        done.set()
        async with await request as response:
            assert response.status == 200
        assert (instance.health.ejected, instance.health.judged) == (True, True)
        world.servers["d1"].close()
        await wait_until(lambda: not close_idle_connections(instance).health.judged, "the engine is gone")


def close_idle_connections(instance: Instance) -> Instance:
    """Close the idle connections, as if the engine had."""
    assert instance.connection_pool is not None
    while (idle := instance.connection_pool.take_idle()) is not None:
        idle.abort()
    return instance


async def test_a_whole_response_of_an_engine_that_computes_nothing_moves_to_another(
    client: aiohttp.ClientSession,
) -> None:
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=respond_after(asyncio.Event())), FakeEngine("d2")]
    async with run_router(*engines, settings=DEFAULT) as world:
        request = asyncio.ensure_future(client.post(world.url(), json={**PROMPT, "max_tokens": 1000}))
        instance = await wait_for_decode_leg(world)
        instance.record_progress(5.0, now_s=time.monotonic())
        let_time_pass(world, 61)
        async with await request as response:
            assert (response.status, response.headers["x-fulcrum-decode"]) == (200, "d2")
        assert dict(world.router.counters.retries) == {("decode", "timeout"): 1}


async def test_a_whole_response_over_its_limit_is_not_the_failure_of_an_engine_that_computes(
    client: aiohttp.ClientSession,
) -> None:
    """100 tokens have 60 s + 100 · 0.5 s."""
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=respond_after(asyncio.Event())), FakeEngine("d2")]
    async with run_router(*engines, settings=DEFAULT) as world:
        request = asyncio.ensure_future(client.post(world.url(), json={**PROMPT, "max_tokens": 100}))
        instance = await wait_for_decode_leg(world)
        let_time_pass(world, 109, computing=instance)
        assert not request.done()
        assert instance.ledger.decode_legs == 1
        let_time_pass(world, 111, computing=instance)
        async with await request as response:
            assert response.status == 504
        legs = dict(world.router.counters.legs)
        assert (legs["decode", "too_long"], instance.health.failures, world["d2"].decodes) == (1, 0, [])
        assert world.ledgers_are_empty()


async def test_a_prefill_is_waited_for_while_its_engine_computes(client: aiohttp.ClientSession) -> None:
    """60 s without progress fail it, and ten times that in all."""
    started = asyncio.Event()

    async def never_end(response: ResponseWriter) -> None:
        started.set()
        await response.hang()

    engines = [FakeEngine("p1", prefill=never_end), FakeEngine("d1")]
    async with run_router(*engines, settings=DEFAULT) as world:
        request = asyncio.ensure_future(client.post(world.url(), json=PROMPT))
        await started.wait()
        await wait_until_time(time.monotonic() + REUSE_RACE_S, "the request is no longer sent again")
        instance = world.router.fleet["p1"]
        let_time_pass(world, 595, computing=instance)
        assert instance.ledger.prefill_legs == 1
        let_time_pass(world, 601, computing=instance)
        async with await request as response:
            assert response.status == 200
        assert dict(world.router.counters.retries) == {("prefill", "timeout"): 1}


async def test_a_stream_that_drips_ends_when_its_tokens_have_had_their_time(
    client: aiohttp.ClientSession,
) -> None:
    """3 tokens have 60 s + 3 · 0.5 s, however steadily bytes come."""
    received = asyncio.Event()

    async def drip(response: ResponseWriter) -> None:
        await response.start_stream()
        await response.event(json.dumps({"choices": [{"text": "a ", "finish_reason": None}]}))
        await received.wait()
        await response.raw(b"ff")
        await response.hang()

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=drip)) as world:
        world.router.configure(DEFAULT, last_prefill_to_decode_s=None)
        async with client.post(world.url(), json={**PROMPT, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            (connection,) = world.router.fleet["d1"].require_connection_pool().busy
            for second in range(1, 63):
                connection._received_data = True
                world.router.fleet.enforce_timeouts(time.monotonic() + second)
            rest = await response.content.readuntil(b"\n\n")
        assert b"the engine sends, but the response exceeds the time limit for its tokens" in rest
        assert world.ledgers_are_empty()


async def test_the_first_byte_of_a_stream_has_its_time_out_whatever_else_the_engine_computes(
    client: aiohttp.ClientSession,
) -> None:
    engines = [FakeEngine("p1"), FakeEngine("d1", decode=respond_after(asyncio.Event())), FakeEngine("d2")]
    async with run_router(*engines, settings=DEFAULT) as world:
        body = {**PROMPT, "max_tokens": 1000, "stream": True}
        request = asyncio.ensure_future(client.post(world.url(), json=body))
        let_time_pass(world, 61, computing=await wait_for_decode_leg(world))
        async with await request as response:
            assert (response.status, response.headers["x-fulcrum-decode"]) == (200, "d2")


# --- slow clients ------------------------------------------------------------------------------------------

LARGE_EVENT = frame_event(json.dumps({"choices": [{"text": "x" * 60_000}]}))


async def test_the_engine_of_a_slow_client_does_not_time_out() -> None:
    finish = asyncio.Event()

    async def send_more_than_buffers_hold(response: ResponseWriter) -> None:
        await response.start_stream()
        for _ in range(256):
            await response.raw(LARGE_EVENT)
        await finish.wait()
        await response.event("[DONE]")
        await response.raw(b"0\r\n\r\n")

    engine = FakeEngine("d1", decode=send_more_than_buffers_hold)
    async with run_router(FakeEngine("p1"), engine, settings=DEFAULT) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        began_s = time.monotonic()
        writer.write(build_post(json.dumps({**PROMPT, "stream": True}).encode()))
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = world.server.clients.connections
        await wait_until(lambda: connection.paused, "the client's buffers are full")
        let_time_pass(world, 300)
        await wait_until_time(time.monotonic() + 0.3, "a duration in which the client does not read")
        finish.set()
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data = await reader.read(1 << 20)
            assert data, "the connection was closed before the end of the stream"
            received = received[-64:] + data
        writer.transport.abort()
        instance = world.router.fleet["d1"]
        await wait_until(world.ledgers_are_empty, "the ledgers are empty")
        assert (dict(world.router.counters.retries), instance.health.failures) == ({}, 0)
        took_s = world.router.counters.get_tier("default").tpot.sum * (256 - 1)
        assert took_s + 0.3 < time.monotonic() - began_s, "TPOT is without the time of the client"


async def test_a_slow_client_leaves_no_paused_connection_in_the_pool(client: aiohttp.ClientSession) -> None:
    """The end of a large response pauses the client in the read that returns the connection to the pool."""
    text = "x" * 1_000_000

    async def send_large_response(response: ResponseWriter) -> None:
        await response.json(200, {"choices": [{"text": text}]})

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=send_large_response)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        for _ in range(30):
            writer.write(build_post(json.dumps(PROMPT).encode()))
        await wait_until(lambda: bool(world.server.clients.connections), "the client is connected")
        (connection,) = world.server.clients.connections
        await wait_until(lambda: connection.paused, "the client's buffers are full")
        async with client.post(world.url(), json=PROMPT) as response:
            assert (response.status, (await response.json())["choices"][0]["text"] == text) == (200, True)
        writer.transport.abort()
        await wait_until(world.ledgers_are_empty, "the ledgers are empty")
        assert (dict(world.router.counters.retries), reader.at_eof()) == ({}, False)


def test_a_stalled_client_is_closed_before_an_engine_would_time_out() -> None:
    assert TimeoutsSpec().idle > STALLED_CLIENT_TIMEOUT_S
