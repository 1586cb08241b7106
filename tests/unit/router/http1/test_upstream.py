"""What a connection attempt without a response shows, and pools of thousands of connections."""

import asyncio
import time

import pytest

from fulcrum_router.http1.framing import ResponseHead
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection, classify_connect_timeout
from fulcrum_router.policy.faults.failures import Failure


@pytest.mark.parametrize(
    ("took_s", "has_data", "failure"),
    [
        pytest.param(1.01, False, Failure.UNREACHABLE, id="silence: nobody is there"),
        pytest.param(1.01, True, Failure.TIMEOUT, id="data on other connections: the backlog is full"),
        pytest.param(1.60, False, Failure.TIMEOUT, id="a late time-out: the router stood still"),
    ],
)
def test_a_connect_timeout_is_classified(took_s: float, has_data: bool, failure: Failure) -> None:
    assert classify_connect_timeout(took_s=took_s, timeout_s=1.0, has_data=has_data) is failure


STREAM, PAGE = 60.0, 0.0
"""Time-outs between two reads: a page has none of its own."""


class NoTransport(asyncio.Transport):
    """Sends nothing, and has data only when the test says so."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.WriteTransport`."""

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""


class IgnoredResponse:
    """A `ResponseHandler` that does nothing."""

    retryable = False

    def on_head(self, head: ResponseHead) -> None:
        """See `ResponseHandler`."""

    def on_body(self, data: bytes, boundary: int) -> None:
        """See `ResponseHandler`."""

    def on_end(self) -> None:
        """See `ResponseHandler`."""

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        """See `ResponseHandler`."""

    def on_failure(self, failure: Failure, detail: str) -> None:
        """See `ResponseHandler`."""

    def extend_deadline(self, now_s: float) -> float:
        """See `ResponseHandler`."""
        return now_s


def receive(idle_timeout_s: float) -> EngineConnection:
    """Return a connection with the head of a response and a part of its body."""
    connection = EngineConnection(ConnectionPool("127.0.0.1", 1))
    connection.connection_made(NoTransport())
    connection.send(
        IgnoredResponse(), b"GET / HTTP/1.1", b"", head_timeout_s=1e9, idle_timeout_s=idle_timeout_s
    )
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx")
    return connection


@pytest.mark.parametrize(
    ("idle_timeout_s", "counts"),
    [
        pytest.param(STREAM, True, id="a part of a stream"),
        pytest.param(PAGE, False, id="a part of a probe's own response"),
    ],
)
def test_an_engine_works_while_its_streams_go_on(idle_timeout_s: float, counts: bool) -> None:
    connection = receive(idle_timeout_s)
    connection.enforce_timeouts(100.0)
    assert connection._pool.last_streamed_s == (100.0 if counts else 0.0)


@pytest.mark.parametrize("is_checked_before_data", [False, True])
def test_what_lay_in_a_buffer_while_the_client_was_slow_does_not_show_that_the_engine_works(
    *, is_checked_before_data: bool
) -> None:
    connection = receive(STREAM)
    connection.pause()
    connection.enforce_timeouts(100.0)
    connection.enforce_timeouts(100.1)
    connection.resume()
    if is_checked_before_data:
        connection.enforce_timeouts(100.15)
    connection.data_received(b"y")
    connection.enforce_timeouts(100.2)
    assert connection._pool.last_streamed_s == 0.0
    connection.data_received(b"z")
    connection.enforce_timeouts(100.3)
    assert connection._pool.last_streamed_s == 100.3


def test_the_end_of_a_response_shows_that_the_engine_works_unless_it_lay_in_a_buffer() -> None:
    for is_paused in (True, False):
        connection = receive(STREAM)
        if is_paused:
            connection.pause()
            connection.resume()
        connection.data_received(b"12345678")
        assert connection._pool.idle_count == 1
        assert (connection._pool.last_streamed_s == 0.0) is is_paused


def test_thousands_of_connections_are_lost_at_once_without_a_search_for_each() -> None:
    """An engine ends with its idle connections, or clients leave while as many are idle."""
    pool, count = ConnectionPool("127.0.0.1", 1), 8_000
    idle, busy = ([EngineConnection(pool) for _ in range(count)] for _ in range(2))
    for connection in idle:
        pool.put_idle(connection)
    began_s = time.thread_time()
    for connection in (*busy, *reversed(idle[::2]), *reversed(idle[1::2])):
        connection.connection_lost(None)
    assert (pool.idle_count, time.thread_time() - began_s < 0.1) == (0, True)
