"""The proof of a hand-off on real engines: exact at the borders of blocks, unseen by who did not ask."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fulcrum_router.policy import Proof
from tests.conftest import Figure
from tests.engines.asking import alone
from tests.engines.own_router import OwnRouter, ids, members_of, of_ids, own_router
from tests.engines.real import MODEL, RealService

pytestmark = pytest.mark.timeout(600)

BLOCK = 128
BORDERS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 500)
"""Lengths of prompts, each asked for twice. Of one token nothing is to be fetched, so it proves nothing."""


async def test_every_hand_off_is_proven_whatever_the_length_of_its_prompt(
    pair: RealService, figure: Figure, rng: random.Random
) -> None:
    """And the wire of one machine is not found slow."""
    prefill, decode = await members_of(pair)
    async with own_router(prefill, decode) as own:
        known, proven = own.pair(prefill.name, decode.name), 0
        for length in BORDERS:
            for stream in (False, True):
                asked = of_ids(ids(rng, length), stream=stream)
                answer = await own.ask(asked)
                assert (answer.status, answer.local) == (200, None)
                assert answer.tokens == await alone(pair.client, decode.url, asked)
            proven += 2 * (length > 1)
            counts = await own.counts(prefill.name, decode.name, proven)
            assert (length, counts[Proof.PROVEN], sum(counts.values())) == (length, proven, proven)
        assert known.reason == "Proven"
        assert known.seconds_per_1k_tokens is not None
        figure(f"a hand-off of a warm pair: {known.seconds_per_1k_tokens * 1000:.0f} ms for 1,000 tokens")


# --- what the client sees -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Tap:
    """Stands between a router and an engine, and keeps what the engine says."""

    port: int
    said: list[bytearray] = field(default_factory=list)
    """On each connection."""


@asynccontextmanager
async def tapped(port: int) -> AsyncIterator[Tap]:
    """A tap on the engine at `port`."""
    tap = Tap(0)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                kept += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", port)
        tap.said.append(bytearray())
        await asyncio.gather(
            relay(reader, engine_writer, bytearray()), relay(engine_reader, writer, tap.said[-1])
        )

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    tap.port = server.sockets[0].getsockname()[1]
    try:
        yield tap
    finally:
        server.close()


USAGE = re.compile(rb'data: \{[^\n]*"choices":\[\][^\n]*\n\n')
"""The event that has nothing but the usage."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
    ids=["not asked for", "not wanted", "asked for"],
)
async def test_a_stream_is_what_the_engine_said_but_for_a_usage_that_only_the_router_asked_for(
    pair: RealService, rng: random.Random, path: str, options: dict[str, Any], *, shown: bool
) -> None:
    prefill, decode = await members_of(pair)
    prompt: dict[str, Any] = {"prompt": ids(rng, 300)}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": f"{rng.random()} how many clocks?"}]}
    body = {"model": MODEL, **prompt, "max_tokens": 12, "ignore_eos": True, "stream": True, **options}
    async with tapped(decode.port) as tap, own_router(prefill, replace(decode, port=tap.port)) as own:
        got, said = await streamed(own, path, body), engine_stream(tap)
        (usage,) = USAGE.findall(said)
        assert b'"cached_tokens":' in usage
        assert got == (said if shown else said.replace(usage, b""))
        assert (await own.counts(prefill.name, decode.name, 1))[Proof.PROVEN] == 1


async def streamed(own: OwnRouter, path: str, body: dict[str, Any]) -> bytes:
    """The whole stream as the client gets it."""
    answer = await own.client.post(own.url + path, json=body)
    assert answer.status_code == 200
    return answer.content


def engine_stream(tap: Tap) -> bytes:
    """The one stream among what the engine said: chunks put together."""
    (said,) = [bytes(said) for said in tap.said if b"content-type: text/event-stream" in said]
    rest = said[said.index(b"\r\n\r\n", said.index(b"content-type: text/event-stream")) + 4 :]
    content = b""
    while size := int(rest[: rest.index(b"\r\n")], 16):
        begin = rest.index(b"\r\n") + 2
        content += rest[begin : begin + size]
        rest = rest[begin + size + 2 :]
    return content
