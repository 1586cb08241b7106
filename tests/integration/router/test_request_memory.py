"""Memory of requests: what is released must be free, and what is held must be counted."""

import asyncio
import gc
import json
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.integration.router.fake_engines import (
    DEADLINE_S,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    build_post,
    close_connection,
    respond_with_status,
    run_router,
    send_source_name,
    stream_tokens_then,
)
from tests.waiting import wait_until

MIB = 1024 * 1024


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_stream_keeps_nothing_of_its_body_after_the_first_byte(path: str) -> None:
    async def forget_and_hang(response: ResponseWriter) -> None:
        response.request.body.clear()
        await stream_tokens_then(1, ResponseWriter.hang)(response)

    body = {"prompt": "x" * 4 * MIB, "stream": True, "stream_options": {"a": "x" * MIB}}
    async with run_router(FakeEngine("d1", decode=forget_and_hang)) as world, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        post = build_post(json.dumps(body).encode(), path=path)
        tracemalloc.start()
        try:
            writer.write(post)
            assert await reader.readuntil(b"word ")
            gc.collect()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        writer.close()
        assert held_bytes < MIB


@pytest.mark.parametrize(
    ("decode", "stream", "read_until"),
    [
        pytest.param(send_source_name(), False, b"}]}", id="a short request"),
        pytest.param(send_source_name(), True, b"0\r\n\r\n", id="a stream"),
        pytest.param(stream_tokens_then(1, ResponseWriter.hang), True, b"word ", id="a cancelled stream"),
        pytest.param(respond_with_status(503), False, b"\r\n\r\n", id="a failed request"),
        pytest.param(stream_tokens_then(1, close_connection), True, b"error", id="a broken stream"),
    ],
)
async def test_a_request_leaves_nothing_for_the_garbage_collector(
    decode: Script, stream: bool, read_until: bytes
) -> None:
    body = json.dumps({"prompt": "hello", "stream": stream}).encode()

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=decode)) as world:

        async def send() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(build_post(body))
            assert read_until in await reader.readuntil(read_until)
            writer.close()
            await settle(world)

        await send()
        found = await collect_garbage_of(send)
        assert found == Counter()


async def settle(world: RunningRouter) -> None:
    """Wait until no request and no client is left."""
    await wait_until(
        lambda: world.ledgers_are_empty() and not world.server.clients.connections, "the request has ended"
    )


async def collect_garbage_of(run: Callable[[], Awaitable[None]]) -> Counter[str]:
    """The objects of the router that only a collection frees after `run`, by type."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await run()
        gc.collect()
        kinds = (type(found) for found in gc.garbage)
        return Counter(kind.__name__ for kind in kinds if kind.__module__.startswith("fulcrum_router"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
