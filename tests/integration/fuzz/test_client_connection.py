"""Whatever a client sends, each request gets one response, in order, and nothing stays held afterwards."""

import asyncio
import random
from typing import cast

import h11

from fulcrum_router.data_path.downstream import ClientConnection, ClientServer
from fulcrum_router.router import Router
from tests.integration.fuzz.conftest import RunFuzzer
from tests.integration.fuzz.fuzzing import limit_turn, split_randomly
from tests.integration.fuzz.smuggling import CASES
from tests.integration.fuzz.test_request_reader import read_with_router
from tests.integration.router.fake_engines import settings_with_short_timeouts
from tests.waiting import run_pending_tasks

MAX_BUFFERED_BYTES = 400_000


class FakeClientTransport:
    """A client's socket that reads everything at once."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 40_000) if name == "peername" else None

    def write(self, data: bytes) -> None:
        assert not self.closed, "written after the end"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def count_responses(written: bytes, methods: list[bytes]) -> int:
    """The whole responses that a client reads, given the methods of its requests."""
    count = 0
    while written:
        connection = h11.Connection(h11.CLIENT)
        method = methods[count] if count < len(methods) else b"GET"
        if method == b"CONNECT":
            method = b"GET"
        connection.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        connection.send(h11.EndOfMessage())
        connection.receive_data(written)
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            assert event is not h11.NEED_DATA, f"half a response: {written[-300:]!r}"
        written = connection.trailing_data[0]
        count += 1
    return count


def test_each_request_gets_one_response(run_fuzzer: RunFuzzer, seed: int) -> None:
    rng = random.Random(seed)
    router = Router()
    router.configure(settings_with_short_timeouts(), last_prefill_to_decode_s=None)
    server = ClientServer(router)
    loop = asyncio.new_event_loop()

    async def feed(pieces: list[bytes]) -> bytes:
        transport = FakeClientTransport()
        connection = ClientConnection(server)
        connection.connection_made(cast(asyncio.Transport, transport))
        for piece in pieces:
            with limit_turn():
                connection.data_received(piece)
            await run_pending_tasks()
            assert connection.count_buffered_bytes() < MAX_BUFFERED_BYTES
        connection.connection_lost(None)
        assert server.memory.held_bytes == 0
        assert not server.connections
        return transport.written

    def run(data: bytes) -> tuple[object, ...]:
        pieces = split_randomly(data, rng)
        written = loop.run_until_complete(feed(pieces))
        reading = read_with_router(pieces)
        methods = [request.method for request in reading.requests]
        count = count_responses(written, methods)
        assert count == len(methods) + (reading.rejection is not None)
        return count, reading.rejection, tuple(methods[:4]), b"connection: close" in written

    tokens = [
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"DELETE /metrics HTTP/1.1\r\nhost: x\r\n\r\n", b"/metrics", b"/ready", b"HEAD ", b"{}", b"\r\n",
        b"expect: 100-continue\r\n", b"x-customer-tier: gold\r\n", b"traceparent: a\r\n", b'{"prompt":"a"}',
        b"content-length: 14\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 300, b"connection: close\r\n",
        b"x-request-id: \xff\r\n",
    ]  # fmt: skip
    corpus = [case.data.replace(b"expect: 100-continue\r\n", b"") for case in CASES.values()]
    try:
        run_fuzzer(run, corpus, tokens)
    finally:
        loop.close()
