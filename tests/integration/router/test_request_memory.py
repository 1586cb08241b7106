"""Memory of requests: what is released must be free, and what is held must be counted."""

import asyncio
import gc
import json
import tracemalloc

import pytest

from tests.integration.router.fake_engines import (
    DEADLINE_S,
    FakeEngine,
    ResponseWriter,
    build_post,
    run_router,
    stream_tokens_then,
)

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
