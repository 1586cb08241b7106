"""Connections to engines: none is left open or left paused, whatever client and engine do."""

import asyncio
import json
import socket
import time

import pytest

from fulcrum_router.http1 import upstream
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.inline_task import run_inline
from fulcrum_router.http1.sending import BufferedResponse
from fulcrum_router.http1.upstream import ConnectionPool
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    FakeEngine,
    ResponseWriter,
    build_post,
    run_router,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until, wait_until_time

BODY = b'{"prompt":"hello"}'


async def test_an_idle_connection_is_closed_also_if_the_engine_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "MAX_IDLE_S", 0.05)
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(build_post(BODY))
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b"\r\n\r\n")
        pools = [instance.require_connection_pool() for instance in world.router.fleet.instances]
        await wait_until(lambda: not any(pool.idle_count for pool in pools), "no connection is idle")
        writer.close()


async def test_a_connection_whose_client_was_slow_to_the_end_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A response that fills the client's buffer pauses the engine's connection after its last byte."""
    monkeypatch.setattr(upstream, "MAX_IDLE_S", DEADLINE_S)
    large = {"choices": [{"text": "x" * 200_000}]}

    async def respond(response: ResponseWriter) -> None:
        await response.json(200, large if response.request.body["prompt"] == "large" else {"choices": []})

    settings = settings_with_short_timeouts(first_byte=DEADLINE_S, idle=DEADLINE_S)
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=respond), settings=settings) as world:
        for _ in range(3):
            _, slow = await asyncio.open_connection("127.0.0.1", world.port, limit=1_024)
            slow.write(build_post(b'{"prompt":"large"}'))
            pool = world.router.fleet["d1"].require_connection_pool()
            await wait_until(lambda pool=pool: pool.idle_count and not pool.busy, "the response was read")  # type: ignore[misc]
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(build_post(BODY))
            async with asyncio.timeout(DEADLINE_S / 2):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            for open_writer in (slow, writer):
                open_writer.transport.abort()


async def test_a_slow_reader_does_not_time_the_engine_out() -> None:
    """A paused stream is read on when the client reads again, however long that took."""
    events = 400  # more bytes than the kernel buffers

    async def stream(response: ResponseWriter) -> None:
        await response.start_stream()
        for _ in range(events):
            await response.event(json.dumps({"choices": [{"text": "x" * 50_000}]}))
        await response.event("[DONE]")
        await response.raw(b"0\r\n\r\n")

    settings = settings_with_short_timeouts(idle=0.1)
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=stream), settings=settings) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=50_000_000)
        transport = writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()
        writer.write(build_post(b'{"prompt":"hello","stream":true}'))
        await wait_until(
            lambda: any(connection.paused for connection in world.server.clients.connections), "it is paused"
        )
        await wait_until_time(time.monotonic() + 0.5, "five times the time-out passes")
        transport.resume_reading()
        async with asyncio.timeout(DEADLINE_S):
            received = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert received.count(b"data: ") == events + 1
        assert world.router.counters.legs["decode", "ok"] == 1
        writer.close()


async def test_a_connection_that_closed_before_it_was_used_fails_at_once() -> None:
    async def accept_and_close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(accept_and_close, "127.0.0.1", 0)
    pool = ConnectionPool("127.0.0.1", server.sockets[0].getsockname()[1])
    connection = await pool.connect(DEADLINE_S)
    await wait_until(
        lambda: connection.transport is not None and connection.transport.is_closing(), "it is closed"
    )

    async def send() -> bytes:
        response = BufferedResponse(retryable=True)
        connection.send(response, b"", b"", head_timeout_s=DEADLINE_S, idle_timeout_s=DEADLINE_S)
        return await response

    with pytest.raises(LegFailed) as failed:
        await run_inline(send())
    assert (failed.value.failure, len(pool.busy)) == (Failure.CLOSED, 0)
    server.close()


async def test_a_connection_that_is_reset_while_it_opens_is_refused() -> None:
    """The engine's kernel accepted it, and the engine died: its node is not out of reach."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        opening = asyncio.ensure_future(ConnectionPool(*listening.getsockname()).connect(DEADLINE_S))
        asyncio.get_running_loop().call_soon(listening.close)  # in the same turn, before the router reads
        with pytest.raises(LegFailed) as raised:
            await opening
    assert (raised.value.failure, raised.value.may_have_started) == (Failure.REFUSED, False)
