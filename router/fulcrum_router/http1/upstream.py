"""Connections to engines: one request at a time on each, kept alive in a pool per endpoint.

A connection frames the response and hands what it reads to the leg that holds it. Waiting is guarded
by one sweep over all busy connections instead of a timer for each.
"""

import asyncio
import contextlib
import time
from enum import StrEnum
from typing import Protocol, cast

from fulcrum_router.http1.framing import (
    CHUNKED,
    MAX_HEAD_BYTES,
    UNTIL_CLOSE,
    ChunkScanner,
    FramingError,
    ResponseHead,
    dechunk,
    parse_head,
)
from fulcrum_router.http1.inline_task import Completion, run_in_asyncio_task

MAX_IDLE_S = 4.0
"""An idle connection older than this is not used again: engines close theirs after 5 s."""
REUSE_RACE_S = 0.05
"""A kept connection that dies this soon after a request was closed before the engine read it."""
SMALL_BODY_BYTES = 16_384
MAX_RESPONSE_BYTES = 8 * 1024 * 1024


class Failure(StrEnum):
    """What went wrong with a leg."""

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    """No connection in time, or no way there: a node that is gone refuses nothing."""
    EJECTED = "ejected"
    """Others found the instance hanging while this leg waited for it."""
    CLOSED = "closed"
    TIMEOUT = "timeout"
    STATUS = "status"
    ABORTED = "aborted"
    MALFORMED = "malformed"
    NO_KV_TRANSFER_PARAMS = "no_kv_transfer_params"
    LEASE_EXPIRED = "lease_expired"
    """Its response came so late that the hand-off may have been fetched after its lease."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class LegFailed(Exception):
    """A leg that gave no response. `status` is the engine's own where it sent one."""

    def __init__(
        self, failure: Failure, detail: str, *, status: int = 0, may_have_started: bool = True
    ) -> None:
        super().__init__(detail)
        self.failure, self.detail, self.status = failure, detail, status
        self.may_have_started = may_have_started
        """Whether the engine may have begun with the request, and so fetched a hand-off."""


class ResponseHandler(Protocol):
    """Who holds a connection."""

    @property
    def retryable(self) -> bool:
        """Whether another instance could still do it instead, unseen by the client."""

    def on_head(self, head: ResponseHead) -> None:
        """The head of the response."""

    def on_body(self, data: bytes, boundary: int) -> None:
        """Bytes of the body as framed; up to `boundary` they end with a whole chunk (unchunked: all)."""

    def on_end(self) -> None:
        """The response is whole; the connection is given back already."""

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        """All of the three at once: an unchunked response that came in one read."""

    def on_failure(self, failure: Failure, detail: str) -> None:
        """There will be no more; the connection is gone already."""


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "_buffer",
        "_head",
        "_idle_timeout_s",
        "_pool",
        "_received_data",
        "_remaining_bytes",
        "_scanner",
        "deadline_s",
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
        self.idle_since_s = self.sent_s = self.deadline_s = self._idle_timeout_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._remaining_bytes = 0
        self._scanner: ChunkScanner | None = None
        self._received_data = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(
        self,
        handler: ResponseHandler,
        head: bytes,
        body: bytes,
        *,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        """Send a request; `handler` hears of the response. Waits are bounded by `first_byte_timeout_s`,
        then `idle_timeout_s`."""
        assert self.transport is not None
        self.handler = handler
        self._received_data = False
        self._idle_timeout_s = idle_timeout_s
        self.sent_s = now = time.monotonic()
        self.deadline_s = now + first_byte_timeout_s
        self._pool.busy.add(self)
        if len(body) < SMALL_BODY_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:
            self._discard()  # an engine that speaks unasked is not in step with us
            return
        self._received_data = True
        try:
            if self._head is None and not self._buffer and self._read_complete_response(handler, data):
                return
            if self._head is None:
                data = self._read_head(handler, data)
                if self._head is None or (not data and self._remaining_bytes):
                    return
            self._read_body(handler, data)
        except FramingError as error:
            self._fail(Failure.MALFORMED, str(error))

    def _read_complete_response(self, handler: ResponseHandler, data: bytes) -> bool:
        """Done with it if `data` is a whole response, as short ones are; otherwise nothing has happened."""
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

    def _read_head(self, handler: ResponseHandler, data: bytes) -> bytes:
        """What follows the head, once it is whole."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(data) > MAX_HEAD_BYTES:
                raise FramingError("head too long")
            self._buffer = data
            return b""
        head = parse_head(data[:end])
        if head.status < 200:
            return self._read_head(handler, data[end:])  # 100 Continue and its like
        self._head = head
        self._remaining_bytes = head.length
        if head.length == CHUNKED:
            self._scanner = ChunkScanner()
        handler.on_head(head)
        return data[end:]

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
                data = data[: self._remaining_bytes]
            self._remaining_bytes -= len(data)
            if data:
                handler.on_body(data, len(data))
            if self._remaining_bytes:
                return
        else:
            handler.on_body(data, len(data))
            return
        if self.handler is handler:  # a leg may have let go of us while it read
            self._finish(handler, surplus=surplus)

    def _finish(self, handler: ResponseHandler, *, surplus: bool) -> None:
        head = self._head
        self.handler = None
        self._pool.busy.discard(self)
        if head is not None and head.keep_alive and not surplus:
            self._clear()
            self._pool.put_idle(self)
        else:
            self._discard()
        handler.on_end()

    def abort(self) -> None:
        """Let go of the leg and close at once: the engine stops working on the request."""
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
        if self._head is not None and self._head.length == UNTIL_CLOSE and exc is None:
            handler.on_end()
        else:
            handler.on_failure(Failure.CLOSED, f"the engine closed the connection ({exc or 'end of stream'})")

    @property
    def received_nothing(self) -> bool:
        """Whether nothing was read since the request was sent."""
        return not self._received_data and self._head is None

    @property
    def lost_reuse_race(self) -> bool:
        """Whether a kept connection died before the engine can have read the request."""
        return self.reused and self.received_nothing and time.monotonic() - self.sent_s < REUSE_RACE_S

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail the leg if it waited too long; what was read since the last check puts the deadline off."""
        if self._received_data:
            self._received_data = False
            self.deadline_s = now_s + self._idle_timeout_s
            self._pool.last_data_s = now_s
        elif now_s >= self.deadline_s:
            phase = "the first byte" if self._head is None else "the next bytes"
            self._fail(Failure.TIMEOUT, f"the engine took too long for {phase}")

    def shorten_deadlines(self, deadline_s: float) -> None:
        """Fail a leg that another instance can take; any other has to hear of its engine by the deadline."""
        if self.handler is not None and self.handler.retryable:
            self._fail(Failure.EJECTED, "the engine hangs")
        else:
            self.deadline_s = min(self.deadline_s, deadline_s)

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine."""
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):
                self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()


class ConnectionPool:
    """The connections to one endpoint, last used first."""

    __slots__ = ("_closed", "_idle", "address", "busy", "host", "last_data_s", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.address = f"{host}:{port}".encode()
        self._closed = False
        self._idle: list[EngineConnection] = []
        self.busy: set[EngineConnection] = set()
        self.last_data_s = 0.0
        """When this endpoint last said something."""

    def take_idle(self) -> EngineConnection | None:
        """An idle connection that is fresh enough, if there is one."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if time.monotonic() - connection.idle_since_s < MAX_IDLE_S:
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def connect(self, timeout_s: float) -> EngineConnection:
        """A new connection.

        Raises:
            LegFailed: if there is none within the time.
        """
        loop, began_s = asyncio.get_running_loop(), time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self), self.host, self.port
                )
        except TimeoutError:
            # A burst of connections overflows the backlog of an engine that is well: it is heard elsewhere.
            failure = Failure.TIMEOUT if self.last_data_s > began_s else Failure.UNREACHABLE
            raise LegFailed(failure, "no connection in time", may_have_started=False) from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            failure = Failure.REFUSED if refused else Failure.UNREACHABLE
            raise LegFailed(
                failure, f"no connection: {error.strerror or error}", may_have_started=False
            ) from error
        if self._closed:
            connection.abort()
            raise LegFailed(Failure.EJECTED, "the instance has left", may_have_started=False)
        return connection

    def put_idle(self, connection: EngineConnection) -> None:
        """Keep it for the next request."""
        if self._closed:
            connection.abort()
            return
        self.last_data_s = connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def remove(self, connection: EngineConnection) -> None:
        """It is closed, or will be."""
        self.busy.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle; what is busy ends its response first."""
        self._closed = True
        for connection in list(self._idle):
            connection.abort()

    def shorten_deadlines(self, deadline_s: float) -> None:
        """Nobody shall wait for this endpoint longer than that, and who can go elsewhere not at all."""
        for connection in list(self.busy):
            connection.shorten_deadlines(deadline_s)

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail the legs that waited too long."""
        for connection in list(self.busy):
            connection.enforce_timeouts(now_s)


class BufferedResponse(Completion[bytes]):
    """A leg that collects its response, and completes with its content: prefill legs and probes."""

    __slots__ = ("_body_bytes", "_body_parts", "head", "retryable")

    def __init__(self, *, retryable: bool) -> None:
        Completion.__init__(self)  # super() costs a lookup
        self.retryable = retryable
        self.head: ResponseHead | None = None
        self._body_parts: list[bytes] = []
        self._body_bytes = 0

    def on_head(self, head: ResponseHead) -> None:
        self.head = head

    def on_body(self, data: bytes, boundary: int) -> None:  # noqa: ARG002  # ResponseHandler's signature
        self._body_bytes += len(data)
        if self._body_bytes > MAX_RESPONSE_BYTES:
            raise FramingError("response too long")
        self._body_parts.append(data)

    def on_end(self) -> None:
        body = self._body_parts[0] if len(self._body_parts) == 1 else b"".join(self._body_parts)
        assert self.head is not None
        self.set_result(dechunk(body) if self.head.length == CHUNKED else body)

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        self.head = head
        self.set_result(content)

    def on_failure(self, failure: Failure, detail: str) -> None:
        self.set_exception(LegFailed(failure, detail))


async def send_request(
    pool: ConnectionPool,
    head: bytes,
    body: bytes,
    *,
    connect_timeout_s: float,
    response_timeout_s: float,
    retryable: bool = True,
) -> tuple[int, bytes, ResponseHead]:
    """For a flow: one request with a whole response: its status, content and head. Cancelled, it aborts it.

    A kept connection that dies before the engine read the request is replaced by a fresh one, once.

    Raises:
        LegFailed: if there is no response. One with status 5xx is a response.
    """
    connection = pool.take_idle()
    if connection is None:
        connection = await run_in_asyncio_task(pool.connect(connect_timeout_s))
    while True:
        response = BufferedResponse(retryable=retryable)
        connection.send(
            response, head, body, first_byte_timeout_s=response_timeout_s, idle_timeout_s=response_timeout_s
        )
        try:
            content = await response
        except LegFailed:
            if not connection.lost_reuse_race:
                raise
            connection = await run_in_asyncio_task(pool.connect(connect_timeout_s))
            continue
        except asyncio.CancelledError:
            connection.abort()
            raise
        assert response.head is not None
        return response.head.status, content, response.head
