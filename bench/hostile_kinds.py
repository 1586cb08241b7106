"""37 kinds of hostile clients and 11 of hostile engines, each side as a process, for `bench/hostile.py`."""

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import orjson

from fulcrum_cluster.process import bind_socket

MODEL = "tiny"
HOST = "127.0.0.1"


def post(body: bytes, *header_lines: bytes, path: bytes = b"/v1/completions") -> bytes:
    """Build a request."""
    lines = b"".join(line + b"\r\n" for line in header_lines)
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path, lines, len(body), body)


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes and read until the router closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    try:
        writer.write(data)
        return await reader.read(-1)
    finally:
        writer.transport.abort()


CLOSED = (OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
"""What a closed connection raises; uvloop raises a RuntimeError in a write."""

# --- hostile clients -----------------------------------------------------------------------------------

Kind = Callable[[int, random.Random], Awaitable[object]]
PROMPT = b'"model":"tiny","prompt":"a b c","max_tokens":4'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def send_once(build: Callable[[random.Random], bytes], *, read_s: float = 3.0) -> Kind:
    """A client that sends bytes, and reads for some time."""

    async def attack(port: int, rng: random.Random) -> None:
        async with asyncio.timeout(read_s):
            await exchange(port, build(rng))

    return attack


def send_body(body: bytes, *header_lines: bytes, path: bytes = b"/v1/completions") -> Kind:
    """A client that sends one body."""
    return send_once(lambda _: post(body, b"connection: close", *header_lines, path=path))


def send_slowly(first: bytes, piece: bytes, *, pause_s: float = 0.5, seconds: float = 20.0) -> Kind:
    """A client that begins a request and goes on in small pieces."""

    async def attack(port: int, rng: random.Random) -> None:
        del rng
        _, writer = await asyncio.open_connection(HOST, port)
        with contextlib.closing(writer):
            writer.write(first)
            for _ in range(int(seconds / pause_s)):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)

    return attack


async def read_nothing(port: int, rng: random.Random) -> None:
    """Request a stream and do not read it."""
    del rng
    reader, writer = await asyncio.open_connection(HOST, port, limit=1)
    body = b'{"model":"tiny","prompt":"a","max_tokens":2000,"stream":true}'
    writer.write(post(body))
    await asyncio.sleep(15)
    writer.transport.abort()
    del reader


async def half_close(port: int, rng: random.Random) -> None:
    """End the sending side at once."""
    del rng
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(post(b"{%b}" % PROMPT))
    writer.write_eof()
    async with asyncio.timeout(3):
        await reader.read(-1)
    writer.transport.abort()


async def leave(port: int, rng: random.Random) -> None:
    """Send a request and leave at some instant."""
    _, writer = await asyncio.open_connection(HOST, port)
    writer.write(post(b'{%b,"stream":true}' % PROMPT.replace(b":4", b":200")))
    await asyncio.sleep(rng.random() ** 3)
    writer.transport.abort()


async def be_silent(port: int, rng: random.Random) -> None:
    """Hold 20 connections without a byte."""
    del rng
    opened = [await asyncio.open_connection(HOST, port) for _ in range(20)]
    await asyncio.sleep(10)
    for _, writer in opened:
        writer.transport.abort()


async def connect_and_reset(port: int, rng: random.Random) -> None:
    """Connect and leave, 50 times."""
    del rng
    for _ in range(50):
        _, writer = await asyncio.open_connection(HOST, port)
        writer.transport.abort()


IDS = b'{"model":"tiny","prompt":[%b1]}' % (b"123456," * 1_000_000)
VALUES = b'{"model":"tiny","prompt":[%b1]}' % (b"12345," * 250_000)
LONG_TEXT = b'{"model":"tiny","prompt":"%b"}' % (b"word " * 1_500_000)
UPGRADE = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"

CLIENTS: dict[str, tuple[Kind, float]] = {
    "1,000 levels": (send_body(b'{"prompt":' + b"[" * 1_000 + b"]" * 1_000 + b"}"), 0.2),
    "100,000 levels": (send_body(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 0.5),
    "7 MB of token ids": (send_body(IDS), 3.0),
    "250,000 token ids": (send_body(VALUES), 3.0),
    "7 MB of text": (send_body(LONG_TEXT), 3.0),
    "100,000 names": (
        send_body(orjson.dumps({"prompt": "x", "a": {str(n): n for n in range(100_000)}})),
        2.0,
    ),
    "empty arrays": (send_body(b'{"prompt":"x","a":[' + b"[]," * 60_000 + b"1]}"), 1.0),
    "huge number": (send_body(b'{%b,"n":%b}' % (PROMPT, b"9" * 5_000)), 0.3),
    "repeated transfer fields": (
        send_body(
            b'{%b,"kv_transfer_params":{"a":1},"kv_transfer_params":{"do_remote_prefill":true}}' % PROMPT
        ),
        0.3,
    ),
    "nested transfer fields": (
        send_body(b'{%b,"vllm_xargs":{"kv_transfer_params":"x"},"n":2}' % PROMPT),
        0.3,
    ),
    "many prompts": (send_body(orjson.dumps({"model": MODEL, "prompt": ["x"] * 3_000})), 0.5),
    "stream of no boolean": (send_body(b'{%b,"stream":"perhaps"}' % PROMPT), 0.3),
    "no JSON": (send_body(b"\xff\xfe{"), 0.2),
    "poisoned estimate": (
        send_body(
            orjson.dumps(
                {"model": MODEL, "prompt": "x" * 90_000, "truncate_prompt_tokens": 1, "max_tokens": 1}
            )
        ),
        1.0,
    ),
    "echo of log-probabilities": (
        send_body(b'{%b,"echo":true,"logprobs":5,"prompt_logprobs":5}' % PROMPT),
        0.5,
    ),
    "length and chunks": (
        send_once(lambda _: HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET"),
        0.3,
    ),
    "two lengths": (send_once(lambda _: HEAD + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde"), 0.3),
    "line ends without return": (send_once(lambda _: HEAD.replace(b"\r\n", b"\n") + b"\n"), 0.3),
    "folded header": (send_once(lambda _: HEAD + b"x: a\r\n b\r\n\r\n"), 0.3),
    "no Host": (send_once(lambda _: b"GET /health HTTP/1.1\r\n\r\n"), 0.3),
    "bad expectation": (send_once(lambda _: HEAD + b"expect: magic\r\ncontent-length: 1\r\n\r\n"), 0.3),
    "huge header": (send_once(lambda _: HEAD + b"x: " + b"y" * 100_000 + b"\r\n\r\n"), 0.3),
    "unknown tier, odd bytes": (send_body(b"{%b}" % PROMPT, b"x-customer-tier: \xff" + b"z" * 900), 0.3),
    "pages in a row": (
        send_once(lambda _: b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 400, read_s=1.0),
        0.5,
    ),
    "upgrades in a row": (send_once(lambda _: UPGRADE * 1_000, read_s=1.0), 0.5),
    "unknown paths": (send_once(lambda _: b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"a" * 9_000)), 0.3),
    "random bytes": (send_once(lambda rng: rng.randbytes(2_000)), 0.2),
    "TLS to a plain port": (
        send_once(lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500),
        0.3,
    ),
    "tiny chunks": (send_once(lambda _: CHUNKED + b"1\r\na\r\n" * 40_000 + b"0\r\n\r\n"), 1.0),
    "long chunk extension": (send_once(lambda _: CHUNKED + b"1;" + b"e" * 60_000 + b"\r\na\r\n"), 0.5),
    "slow head": (send_slowly(HEAD, b"x-a: b\r\n"), 0.5),
    "slow body": (send_slowly(HEAD + b"content-length: 100000\r\n\r\n" + b"x" * 60_000, b"x"), 0.5),
    "no reading": (read_nothing, 0.5),
    "half-closed": (half_close, 0.5),
    "leaves at any instant": (leave, 0.05),
    "silent connections": (be_silent, 1.0),
    "connect and reset": (connect_and_reset, 0.5),
}
"""Hostile clients by kind, each with the mean pause in seconds between two of them."""


async def attack(
    port: int, kind: Kind, pause_s: float, rng: random.Random, counts: Counter[str], name: str
) -> None:
    """Send clients of one kind, at most 30 at the same time, until cancelled."""
    at_once = asyncio.Semaphore(30)

    async def one() -> None:
        async with at_once:
            with contextlib.suppress(*CLOSED):
                await kind(port, rng)
            counts[name] += 1

    async with asyncio.TaskGroup() as group:
        while True:
            await at_once.acquire()
            at_once.release()
            group.create_task(one())
            await asyncio.sleep(rng.expovariate(1 / pause_s))


# --- hostile engines -----------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ENGINE_RESPONSES: dict[str, tuple[bytes, bytes, float]] = {
    "garbage": (b"\x00\xff" * 500, b"", 0.0),
    "endless head": (OK, b"x-a: b\r\n" * 500, 1.0),
    "length too long": (JSON + b"content-length: 100\r\n\r\n{}", b"", 0.0),
    "length too short": (JSON + b"content-length: 1\r\n\r\n{}{}{}", b"", 0.0),
    "broken JSON": (JSON + b"content-length: 3\r\n\r\n{{{", b"", 0.0),
    "slow head": (b"HTTP/1.1 ", b"2", 1.0),
    "500": (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", b"", 0.0),
    "503": (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", b"", 0.0),
    "close": (b"", b"", 0.0),
    "tiny chunks": (JSON + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 60_000, b"", 0.0),
    "no token in a stream": (EVENTS + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", b"", 0.0),
}
"""Responses by kind: first bytes, bytes that are repeated, for how many seconds. Then they close."""


@contextlib.asynccontextmanager
async def run_hostile_engine(
    bound: socket.socket, rng: random.Random, counts: Counter[str]
) -> AsyncIterator[None]:
    """Run an engine each of whose responses is of another kind; its pages are healthy."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*CLOSED, asyncio.CancelledError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(OK + b"content-length: 0\r\n\r\n")
            name = rng.choice(sorted(ENGINE_RESPONSES))
            counts[f"engine: {name}"] += 1
            first, again, seconds = ENGINE_RESPONSES[name]
            writer.write(first)
            end_s = time.monotonic() + seconds
            while again and time.monotonic() < end_s:
                writer.write(again)
                await writer.drain()
                await asyncio.sleep(0.1)
            await writer.drain()
        writer.transport.abort()

    async with await asyncio.start_server(serve, sock=bound):
        yield


async def run_hostile_engines(seed: int) -> None:
    """The process of the hostile engines: print their ports; listen between two lines on standard input."""
    rng, counts = random.Random(seed), Counter[str]()
    bound = [bind_socket(HOST, 0, option="--port") for _ in range(2)]  # they refuse until they listen
    print(json.dumps([engine.getsockname()[1] for engine in bound]), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    async with run_hostile_engine(bound[0], rng, counts), run_hostile_engine(bound[1], rng, counts):
        await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(counts), flush=True)


async def run_hostile_clients(seed: int) -> None:
    """The process of the hostile clients: attack the port that comes on standard input, until its end."""
    os.nice(19)
    rng, counts = random.Random(seed), Counter[str]()
    port = int(await asyncio.to_thread(sys.stdin.readline))
    attacks = [
        asyncio.create_task(attack(port, kind, pause_s, rng, counts, name))
        for name, (kind, pause_s) in CLIENTS.items()
    ]
    await asyncio.to_thread(sys.stdin.readline)
    for task in attacks:
        task.cancel()
    await asyncio.wait(attacks)
    print(json.dumps(counts), flush=True)
