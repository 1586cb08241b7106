"""Verification of KV transfers: exact at block boundaries, invisible to clients without usage."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fulcrum_router.policy import TransferOutcome
from tests.conftest import RecordMeasurement
from tests.engines.completions import compute_reference_tokens
from tests.engines.in_process_router import (
    InProcessRouter,
    build_token_request,
    generate_token_ids,
    list_engine_entries,
    run_in_process_router,
)
from tests.engines.services import MODEL, VllmService

pytestmark = pytest.mark.timeout(600)

BLOCK = 128
PROMPT_LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 500)
"""Prompt lengths in tokens, each sent twice. For one token nothing is fetched, so nothing can be verified."""


async def test_every_kv_transfer_is_verified_whatever_the_prompt_length(
    pair: VllmService, record_measurement: RecordMeasurement, rng: random.Random
) -> None:
    """The pair's reason stays Verified: loopback does not count as a slow transport."""
    prefill, decode = await list_engine_entries(pair)
    async with run_in_process_router(prefill, decode) as in_process:
        pair_state, verified = in_process.pair(prefill.name, decode.name), 0
        for length in PROMPT_LENGTHS:
            for stream in (False, True):
                request = build_token_request(generate_token_ids(rng, length), stream=stream)
                response = await in_process.send(request)
                assert (response.status, response.local_prefill_reason) == (200, None)
                assert response.tokens == await compute_reference_tokens(pair.client, decode.url, request)
            verified += 2 * (length > 1)
            counts = await in_process.wait_for_outcome_counts(prefill.name, decode.name, verified)
            assert (length, counts[TransferOutcome.VERIFIED], sum(counts.values())) == (
                length,
                verified,
                verified,
            )
        assert pair_state.reason == "Verified"
        assert pair_state.transfer_s_per_1k_tokens is not None
        record_measurement(
            f"KV transfer, warm pair: {pair_state.transfer_s_per_1k_tokens * 1000:.0f} ms for 1,000 tokens"
        )


# --- what the client sees -----------------------------------------------------------------------------------


@dataclass(slots=True)
class RecordingProxy:
    """Relays between a router and an engine, and records the engine's bytes."""

    port: int
    responses: list[bytearray] = field(default_factory=list)
    """The engine's bytes on each connection."""


@asynccontextmanager
async def run_recording_proxy(port: int) -> AsyncIterator[RecordingProxy]:
    """Run a proxy in front of the engine at `port`."""
    proxy = RecordingProxy(0)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                kept += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", port)
        proxy.responses.append(bytearray())
        await asyncio.gather(
            relay(reader, engine_writer, bytearray()), relay(engine_reader, writer, proxy.responses[-1])
        )

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


USAGE_EVENT_PATTERN = re.compile(rb'data: \{[^\n]*"choices":\[\][^\n]*\n\n')
"""The SSE event that contains only the usage."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
    ids=["not requested", "declined", "requested"],
)
async def test_stream_is_forwarded_byte_for_byte_except_a_usage_event_the_client_did_not_request(
    pair: VllmService, rng: random.Random, path: str, options: dict[str, Any], *, shown: bool
) -> None:
    prefill, decode = await list_engine_entries(pair)
    prompt: dict[str, Any] = {"prompt": generate_token_ids(rng, 300)}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": f"{rng.random()} how many clocks?"}]}
    body = {"model": MODEL, **prompt, "max_tokens": 12, "ignore_eos": True, "stream": True, **options}
    async with (
        run_recording_proxy(decode.port) as proxy,
        run_in_process_router(prefill, replace(decode, port=proxy.port)) as in_process,
    ):
        received, expected = await read_stream(in_process, path, body), join_engine_chunks(proxy)
        (usage,) = USAGE_EVENT_PATTERN.findall(expected)
        assert b'"cached_tokens":' in usage
        assert received == (expected if shown else expected.replace(usage, b""))
        assert (await in_process.wait_for_outcome_counts(prefill.name, decode.name, 1))[
            TransferOutcome.VERIFIED
        ] == 1


async def read_stream(in_process: InProcessRouter, path: str, body: dict[str, Any]) -> bytes:
    """Return the whole stream as the client receives it."""
    response = await in_process.client.post(in_process.url + path, json=body)
    assert response.status_code == 200
    return response.content


def join_engine_chunks(proxy: RecordingProxy) -> bytes:
    """Return the body of the only stream that the engine sent, without chunk framing."""
    (response,) = [
        bytes(response) for response in proxy.responses if b"content-type: text/event-stream" in response
    ]
    rest = response[response.index(b"\r\n\r\n", response.index(b"content-type: text/event-stream")) + 4 :]
    content = b""
    while size := int(rest[: rest.index(b"\r\n")], 16):
        begin = rest.index(b"\r\n") + 2
        content += rest[begin : begin + size]
        rest = rest[begin + size + 2 :]
    return content
