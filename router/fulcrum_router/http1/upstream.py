"""Connections to engines: one request at a time on each, kept alive in a connection pool per endpoint.

A connection finds the end of the response and passes what it reads to its `ResponseHandler`. `sending` sends
requests on them; its callers retry on other instances. Time-outs are enforced by a periodic sweep, which
checks a portion of the busy connections each time, instead of by one timer per request.
"""

import asyncio
import contextlib
import errno
import math
import time
from typing import Protocol, cast

from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import (
    CHUNKED,
    MAX_HEAD_BYTES,
    UNTIL_CLOSE,
    ChunkScanner,
    FramingError,
    ResponseHead,
    parse_head,
)
from fulcrum_router.http1.inline_task import run_in_asyncio_task
from fulcrum_router.http1.portions import Portions

_NO_SOCKET_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a connection attempt that are the router's own, and say nothing about the engine."""
LATE_FACTOR = 1.5
"""Multiple of a time-out after which the router's event loop was late, and not the engine."""
MAX_IDLE_S = 4.0
"""Longest idle time of a connection that is used again: engines close theirs after 5 s."""
REUSE_RACE_S = 0.05
"""If a reused connection closes this soon after a request was sent, the engine has not read the request."""
SMALL_BODY_BYTES = 16_384
"""Below this size, copying head and body into one write is cheaper than `writelines`."""
_TOO_SLOW = "the engine sends, but the response exceeds the time limit for its tokens"
MAX_INTERIM_RESPONSES = 8
"""Responses such as `100 Continue` before the response itself."""


class ResponseHandler(Protocol):
    """Receives the response that is read on a connection."""

    @property
    def retryable(self) -> bool:
        """Whether another instance can still take the request without the client noticing."""

    def on_head(self, head: ResponseHead) -> None:
        """Receive the head of the response."""

    def on_body(self, data: bytes, boundary: int) -> None:
        """Receive bytes of the body, with chunk sizes if the response is chunked.

        `data[:boundary]` ends with a whole chunk; without chunks, `boundary` is the length of `data`.
        """

    def on_end(self) -> None:
        """Handle the end of the response; the connection was already returned to its pool or closed."""

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        """Receive a whole unchunked response that came in one read, instead of the three calls above."""

    def on_failure(self, failure: Failure, detail: str) -> None:
        """Handle the failure of the response; the connection was already closed."""

    def extend_deadline(self, now_s: float) -> float:
        """Return until when to wait for an engine that was silent up to its deadline (monotonic seconds).

        `now_s` or earlier: the response has failed.
        """


class EngineConnection:
    """One connection to an engine: an `asyncio.Protocol` by its methods, since a base would slow it down."""

    __slots__ = (
        "_buffer",
        "_head",
        "_idle_timeout_s",
        "_interim_responses",
        "_paused_at_s",
        "_pool",
        "_received_data",
        "_remaining_bytes",
        "_scanner",
        "_was_paused",
        "deadline_s",
        "end_s",
        "handler",
        "idle_since_s",
        "reused",
        "sent_s",
        "transport",
    )

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self.handler: ResponseHandler | None = None
        self.reused = False
        """Whether an earlier request was sent on this connection."""
        self.idle_since_s = self.sent_s = self.deadline_s = self._idle_timeout_s = 0.0
        self.end_s = math.inf
        """When the response must have ended, however steadily its bytes come; its handler sets this."""
        self._clear()

    def _clear(self) -> None:
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._remaining_bytes = self._interim_responses = 0
        self._scanner: ChunkScanner | None = None
        self._received_data = False
        self._paused_at_s: float | None = None
        """Time since which nothing is read, as the client is slower than the engine; None: it is read."""
        self._was_paused = False
        """Whether reading has stopped since data was last checked for: what comes next may be old."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def eof_received(self) -> None:
        """The engine has closed its side: asyncio closes the connection."""

    def pause_writing(self) -> None:
        """Requests are limited in size: what the engine does not read yet is kept."""

    def resume_writing(self) -> None:
        """See `pause_writing`."""

    def send(
        self,
        handler: ResponseHandler,
        head: bytes,
        body: bytes,
        *,
        head_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        """Send a request; `handler` receives the response.

        The engine has `head_timeout_s` for the head of the response, then `idle_timeout_s` between two
        reads; 0: the first time is for the whole response.
        """
        assert self.transport is not None
        self.handler = handler
        self._received_data = False
        self._idle_timeout_s, self.end_s = idle_timeout_s, math.inf
        self.sent_s = now = time.monotonic()
        self.deadline_s = now + head_timeout_s
        if self.transport.is_closing():  # closed while the caller waited for the connection
            self._fail(Failure.CLOSED, "the engine closed the connection")
            return
        self._pool.busy.add(self)
        if len(body) < SMALL_BODY_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:
            self._discard()  # data without a request: the response to an earlier one may be incomplete
            return
        self._received_data = True
        try:
            if self._head is not None:
                self._read_body(handler, data)
                return
            # Short path: prefill responses, probes and short completions come in one read.
            if not self._buffer and self._read_complete_response(handler, data):
                return
            body = self._read_head(handler, data)
            if body is not None:
                self._read_body(handler, body)
        except ResponseTooLarge as too_large:
            self._fail(Failure.TOO_LARGE, str(too_large))
        except FramingError as error:
            self._fail(Failure.MALFORMED, str(error))

    def _read_complete_response(self, handler: ResponseHandler, data: bytes) -> bool:
        """Handle `data` and return True if it is a whole response, as short ones are; else change nothing."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return False
        head = parse_head(data[:end])
        if head.length != len(data) - end or not head.keep_alive or head.status < 200:
            return False
        self.handler = None
        self._pool.busy.discard(self)
        self._pool.put_idle(self)
        handler.on_complete_response(head, data[end:])
        return True

    def _read_head(self, handler: ResponseHandler, data: bytes) -> bytes | None:
        """Read the head; return the bytes of the body that follow it, None if there are none to read yet."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if max(end, len(data) if end < 4 else 0) > MAX_HEAD_BYTES:
                raise FramingError(f"response head longer than {MAX_HEAD_BYTES} bytes")
            if end < 4:
                self._buffer = data
                return None
            head = parse_head(data[:end])
            if head.status >= 200:
                break
            self._skip_interim_response(head)
            data = data[end:]
        self._head = head
        self._remaining_bytes = head.length
        if head.length == CHUNKED:
            self._scanner = ChunkScanner()
        handler.on_head(head)
        return data[end:] if end < len(data) or not head.length else None

    def _skip_interim_response(self, head: ResponseHead) -> None:
        self._interim_responses += 1
        if head.status == 101 or self._interim_responses > MAX_INTERIM_RESPONSES:
            raise FramingError(f"unexpected response with status {head.status}")

    def _read_body(self, handler: ResponseHandler, data: bytes) -> None:
        scanner = self._scanner
        if scanner is not None:
            boundary = scanner.feed(data)
            if not scanner.done:
                handler.on_body(data, boundary)
                return
            surplus = boundary < len(data)
            handler.on_body(data[:boundary] if surplus else data, boundary)
        elif self._remaining_bytes >= 0:
            surplus = len(data) > self._remaining_bytes
            if surplus:
                if handler.retryable:
                    raise FramingError("more bytes than the length of the response")
                data = data[: self._remaining_bytes]
            self._remaining_bytes -= len(data)
            if data:
                handler.on_body(data, len(data))
            if self._remaining_bytes:
                return
        else:
            handler.on_body(data, len(data))
            return
        if self.handler is handler:  # the handler may have aborted the connection in on_body
            self._finish(handler, surplus=surplus)

    def _finish(self, handler: ResponseHandler, *, surplus: bool) -> None:
        head = self._head
        self.handler = None
        self._pool.busy.discard(self)
        if head is not None and head.keep_alive and not surplus:
            if self._paused_at_s is not None:
                self.resume()
            is_fresh = not self._was_paused
            self._clear()
            self._pool.put_idle(self, is_fresh=is_fresh)
        else:
            self._discard()
        handler.on_end()

    def abort(self) -> None:
        """Close the connection without a callback; the engine then aborts the request."""
        self.handler = None
        self._discard()

    def _discard(self) -> None:
        self._pool.remove(self)
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, failure: Failure, detail: str) -> None:
        handler, self.handler = self.handler, None
        self._discard()
        if handler is not None:
            handler.on_failure(failure, detail)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        handler, self.handler = self.handler, None
        if handler is None:
            return
        # Without a length the engine ends the response by closing the connection.
        if self._head is not None and self._head.length == UNTIL_CLOSE and exc is None:
            handler.on_end()
        else:
            handler.on_failure(Failure.CLOSED, f"the engine closed the connection ({exc or 'end of stream'})")

    @property
    def lost_reuse_race(self) -> bool:
        """Whether a reused connection was closed before the engine can have read the request."""
        received_nothing = not self._received_data and self._head is None
        return self.reused and received_nothing and time.monotonic() - self.sent_s < REUSE_RACE_S

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail the leg if its deadline has passed; bytes of the body since the last check extend it.

        A head that comes in small pieces extends nothing. Time in which nothing is read does not count: the
        client is slow then, not the engine.
        """
        received, self._received_data = self._received_data, False
        if received:
            if self._idle_timeout_s and not self._was_paused:
                self._pool.last_streamed_s = now_s
            self._was_paused = self._paused_at_s is not None
        if now_s >= self.end_s and self._paused_at_s is None:
            self._fail(Failure.TOO_LONG, _TOO_SLOW)
        elif received and self._idle_timeout_s and self._head is not None:
            self.deadline_s = now_s + self._idle_timeout_s
        elif now_s >= self.deadline_s and self._paused_at_s is None:
            handler = self.handler
            if handler is not None:
                self.deadline_s = handler.extend_deadline(now_s)
            if now_s >= self.deadline_s and handler is self.handler:  # the handler may have aborted
                phase = "the first byte" if self._head is None else "the next bytes"
                self._fail(Failure.TIMEOUT, f"the engine took too long for {phase}")

    def fail_if_retryable(self, failure: Failure, *, else_deadline_s: float) -> None:
        """Fail a retryable leg now; any other leg fails at `else_deadline_s` unless data arrives."""
        if self.handler is not None and self.handler.retryable:
            self._fail(failure, f"the instance was {failure}")
        else:
            self.deadline_s = min(self.deadline_s, else_deadline_s)

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine. No effect after the end of the response."""
        if self.handler is None or self._paused_at_s is not None:
            return
        self._paused_at_s, self._was_paused = time.monotonic(), True
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()

    def resume(self) -> None:
        """Resume reading; the deadline moves by the time in which nothing was read."""
        if self._paused_at_s is None:
            return
        paused_s = time.monotonic() - self._paused_at_s
        self.deadline_s += paused_s
        self.end_s += paused_s
        self._paused_at_s = None
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()


class ConnectionPool:
    """The connections to one endpoint; the last used is reused first."""

    __slots__ = ("_closed", "_idle", "_portions", "address", "busy", "host", "last_streamed_s", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.address = f"{host}:{port}".encode()
        self._closed = False
        self._idle: dict[EngineConnection, None] = {}
        """Unused connections, the last used at the end. A dictionary: thousands may be lost at once."""
        self.busy: set[EngineConnection] = set()
        self.last_streamed_s = 0.0
        """When the endpoint last sent a part of a stream, or ended a response, in monotonic seconds. The head
        of a probe is none, nor is what lay in a buffer while a client was slow: an engine that hangs has
        both."""
        self._portions: Portions[EngineConnection] = Portions()

    @property
    def idle_count(self) -> int:
        """Connections that are open and unused."""
        return len(self._idle)

    def take_idle(self) -> EngineConnection | None:
        """Take a connection that has been idle for less than `MAX_IDLE_S`; None if there is none."""
        idle = self._idle
        while idle:
            connection, _ = idle.popitem()
            if time.monotonic() - connection.idle_since_s < MAX_IDLE_S:
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def open(self, timeout_s: float) -> EngineConnection:
        """Called in an inline task: open a new connection. A caller that is cancelled leaves none behind.

        Raises:
            LegFailed: if that fails or takes longer than `timeout_s`.
        """
        return await run_in_asyncio_task(self.connect(timeout_s), discard=EngineConnection.abort)

    async def connect(self, timeout_s: float) -> EngineConnection:
        """Open a connection as `open` does, for callers in an asyncio task.

        If the task is cancelled just after connecting, the connection stays open.
        """
        loop, began_s = asyncio.get_running_loop(), time.monotonic()
        connection = EngineConnection(self)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: cast(asyncio.Protocol, connection), self.host, self.port)
        except asyncio.CancelledError:
            connection.abort()
            raise
        except TimeoutError:
            failure = classify_connect_timeout(
                took_s=time.monotonic() - began_s,
                timeout_s=timeout_s,
                has_data=self.last_streamed_s > began_s,
            )
            raise LegFailed(failure, "no connection in time", may_have_started=False) from None
        except OSError as error:
            if error.errno in _NO_SOCKET_ERRORS:
                failure = Failure.NO_SOCKET
            else:
                # Reset: accepted for an engine that died before the router saw that.
                refused = isinstance(error, ConnectionRefusedError | ConnectionResetError)
                failure = Failure.REFUSED if refused else Failure.UNREACHABLE
            raise LegFailed(
                failure, f"no connection: {error.strerror or error}", may_have_started=False
            ) from error
        if self._closed:
            connection.abort()
            raise LegFailed(Failure.REMOVED, "the instance was removed", may_have_started=False)
        return connection

    def put_idle(self, connection: EngineConnection, *, is_fresh: bool = True) -> None:
        """Keep an idle connection for the next request, or close it if the pool is closed.

        `is_fresh`: whether the engine has sent the end of the response just now.
        """
        if self._closed:
            connection.abort()
            return
        connection.idle_since_s = now_s = time.monotonic()
        if is_fresh:
            self.last_streamed_s = now_s
        self._idle[connection] = None

    def remove(self, connection: EngineConnection) -> None:
        """Forget a connection that is closed or about to be."""
        self.busy.discard(connection)
        self._idle.pop(connection, None)

    def close(self) -> None:
        """Close idle connections now, and busy ones after their response."""
        self._closed = True
        for connection in list(self._idle):
            connection.abort()

    def fail_retryable_legs(self, failure: Failure, *, others_deadline_s: float) -> None:
        """Fail the retryable legs now; the others fail at `others_deadline_s` unless data arrives."""
        for connection in list(self.busy):
            connection.fail_if_retryable(failure, else_deadline_s=others_deadline_s)

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail the legs whose deadline has passed, close connections that were idle for too long.

        Called by the periodic sweep. Of many legs, each call checks a portion.
        """
        for connection in list(self._idle):
            if now_s - connection.idle_since_s <= MAX_IDLE_S:
                break
            connection.abort()
        for connection in self._portions.take(self.busy):
            if connection in self.busy:  # its response may have ended since its portion was made
                connection.enforce_timeouts(now_s)


def classify_connect_timeout(*, took_s: float, timeout_s: float, has_data: bool) -> Failure:
    """Classify a connection attempt without a response.

    A burst of connections overflows the listen backlog of a healthy engine, too; it still sends data on other
    connections. A time-out that comes much too late shows that the router itself stood still.
    TIMEOUT: the engine lives, or the router was late. UNREACHABLE: neither.
    """
    is_late = took_s > LATE_FACTOR * timeout_s
    return Failure.TIMEOUT if has_data or is_late else Failure.UNREACHABLE


class ResponseTooLarge(Exception):
    """A response has more bytes than are buffered."""
