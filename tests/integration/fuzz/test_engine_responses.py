"""Whatever an engine sends, the router forwards a response that h11 reads as the engine meant it, or none."""

import asyncio
import math
import random
from typing import cast

import h11

from fulcrum_router.data_path.decode_response import MAX_BUFFERED_BODY_BYTES, DecodeResponse
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.http1.framing import frame_chunk
from fulcrum_router.http1.sending import BufferedResponse
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.ledger import Ledger
from tests.integration.fuzz.conftest import RunFuzzer
from tests.integration.fuzz.fuzzing import limit_turn, split_randomly
from tests.unit.router.builders import FakeDownstream, FakeLeg

OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
STREAM = SSE + frame_chunk(TOKEN) + frame_chunk(TOKEN) + frame_chunk(USAGE) + frame_chunk(DONE) + END
WHOLE = OK + b"content-type: application/json\r\ncontent-length: 14\r\n\r\n" + b'{"choices":[]}'
CORPUS = [
    STREAM,
    WHOLE,
    SSE + frame_chunk(TOKEN + TOKEN + DONE) + END,
    SSE + frame_chunk(b": ping\n\n") + frame_chunk(TOKEN) + END,
    SSE + frame_chunk(TOKEN) + b"0\r\nx: y\r\n\r\n",
    SSE + frame_chunk(TOKEN) + b"0\r\ntransfer-encoding: x\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
    OK + b"transfer-encoding: chunked\r\n\r\n" + frame_chunk(b'{"choices":[]}') + END,
    OK + b"connection: close\r\n\r\n" + b'{"choices":[]}',
    b"HTTP/1.0 200 OK\r\n\r\n" + b'{"choices":[]}',
    b"HTTP/1.1 400 Bad\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 204 None\r\n\r\n",
    OK + b"content-length: 41\r\n\r\n" + b'{"choices":[{"finish_reason": "abort"}]} ',
]
TOKENS = [
    TOKEN, USAGE, DONE, END, frame_chunk(TOKEN), frame_chunk(USAGE), frame_chunk(DONE), b"\r\n", b"\n", b"\r",
    b"0x", b"-", b"+", b"_", b";a=b", b" ", b"content-length: 2\r\n", b"transfer-encoding: chunked\r\n",
    b"connection: close\r\n", b"content-type: text/event-stream\r\n", b"HTTP/1.1 100 Continue\r\n\r\n",
    b" 204 ", b" 304 ", b" 503 ", b" 101 ", b'"finish_reason":"abort"', b'"choices":[]', b"data: ",
    b"HTTP/1.0", b"ffffffff", b"x" * 70_000, b"\0",
]  # fmt: skip


class FakeEngineTransport:
    """An engine's socket."""

    def __init__(self) -> None:
        self.closed = False

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        pass

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def read_with_h11(data: bytes, *, closed: bool) -> tuple[int, bytes] | None:
    """Status and body of one whole response; None if h11 refuses it or reads no end."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=200_000)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        connection.receive_data(data)
        if closed and not connection.trailing_data[1]:
            connection.receive_data(b"")
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.ProtocolError:
        return None


def open_connection() -> EngineConnection:
    connection = EngineConnection(ConnectionPool("127.0.0.1", 1))
    connection.connection_made(cast(asyncio.Transport, FakeEngineTransport()))
    return connection


def feed(connection: EngineConnection, pieces: list[bytes]) -> None:
    """Receive the pieces, and then the end of the connection, as from a socket."""
    for piece in pieces:
        if connection.transport is None or connection.transport.is_closing():
            return
        with limit_turn():
            connection.data_received(piece)
    connection.connection_lost(None)


def decode(pieces: list[bytes]) -> tuple[DecodeResponse, bytes]:
    """Receive a response as that of a decode leg."""
    connection, downstream = open_connection(), FakeDownstream()
    prefill, instance = Instance("p-0"), Instance("d-0")
    transfer = KvTransfer(
        TransferPairs(), prefill, instance, tokens=9, received_after_s=math.inf, decode_was_idle=True
    )
    response = DecodeResponse(
        connection,
        downstream,
        FakeLeg(),
        entry=Ledger().add_decode(tokens=9),
        fulcrum_headers=b"x-fulcrum-decode: d-0\r\n",
        instance=instance,
        cache_salt=instance.cache_salt,
        transfer=transfer,
        strips_usage=False,
    )
    connection.send(response, b"", b"", head_timeout_s=9.0, idle_timeout_s=9.0)
    feed(connection, pieces)
    assert downstream.finished_keep_alive is None, "the exchange ends the response"
    return response, b"".join(downstream.writes)


def test_what_is_forwarded_is_what_the_engine_sent(run_fuzzer: RunFuzzer, seed: int) -> None:
    rng = random.Random(seed)

    def run(data: bytes) -> tuple[object, ...]:
        pieces = split_randomly(data, rng)
        response, written = decode(pieces)
        assert response.done, "the end of the connection ends the leg"
        error = getattr(response, "_error", None)
        if error is None:
            sent = read_with_h11(data, closed=True)
            assert read_with_h11(written, closed=True) == sent
            assert sent is not None
        else:
            assert isinstance(error, LegFailed)
            assert not response.retryable or written == b"", "another instance can take over"
        assert len(written) <= len(data) + MAX_BUFFERED_BODY_BYTES
        return (
            type(error).__name__,
            getattr(error, "failure", None),
            response.head and response.head.status,
            len(pieces) > 1,
        )

    run_fuzzer(run, CORPUS, TOKENS)


def test_a_buffered_response_is_what_the_engine_sent(run_fuzzer: RunFuzzer, seed: int) -> None:
    rng = random.Random(seed)

    def run(data: bytes) -> tuple[object, ...]:
        pieces, connection = split_randomly(data, rng), open_connection()
        response = BufferedResponse(retryable=True)
        connection.send(response, b"", b"", head_timeout_s=9.0, idle_timeout_s=0.0)
        feed(connection, pieces)
        assert response.done
        error = getattr(response, "_error", None)
        if error is None:
            assert response.head is not None
            assert read_with_h11(data, closed=True) == (response.head.status, response._value)
        else:
            assert isinstance(error, LegFailed)
        return type(error).__name__, getattr(error, "failure", None), str(error)[:20]

    run_fuzzer(run, CORPUS, TOKENS)
