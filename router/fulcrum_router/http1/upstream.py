"""Connections to engines: one request at a time on each, kept alive in a pool per endpoint.

A connection frames the answer and hands what it reads to the leg that holds it. Waiting is guarded
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
    AnswerHead,
    ChunkWalk,
    FramingError,
    dechunk,
    parse_head,
)
from fulcrum_router.http1.inline_task import Completion, in_task

KEEP_IDLE_S = 4.0
"""An idle connection older than this is not used again: engines close theirs after 5 s."""
REUSE_RACE_S = 0.05
"""A kept connection that dies this soon after a request was closed before the engine read it."""
SMALL_BODY_BYTES = 16_384
MAX_WHOLE_BYTES = 8 * 1024 * 1024


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
    HANDOFF = "handoff"
    LEASE = "lease"
    """Its answer came so late that the hand-off may have been fetched after its lease."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class LegFailed(Exception):
    """A leg that gave no answer. `status` is the engine's own where it sent one."""

    def __init__(self, failure: Failure, detail: str, *, status: int = 0, consumed: bool = True) -> None:
        super().__init__(detail)
        self.failure, self.detail, self.status = failure, detail, status
        self.consumed = consumed
        """Whether the engine may have begun with the request, and so fetched a hand-off."""


class Leg(Protocol):
    """Who holds a connection."""

    @property
    def replaceable(self) -> bool:
        """Whether another instance could still do it instead, unseen by the client."""

    def on_head(self, head: AnswerHead) -> None:
        """The head of the answer."""

    def on_body(self, data: bytes, boundary: int) -> None:
        """Bytes of the body as framed; up to `boundary` they end with a whole chunk (unchunked: all)."""

    def on_end(self) -> None:
        """The answer is whole; the connection is given back already."""

    def on_whole(self, head: AnswerHead, content: bytes) -> None:
        """All of the three at once: an unchunked answer that came in one read."""

    def on_failure(self, failure: Failure, detail: str) -> None:
        """There will be no more; the connection is gone already."""


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "_buffer",
        "_head",
        "_heard",
        "_left",
        "_patience_s",
        "_pool",
        "_walk",
        "deadline_s",
        "idle_since_s",
        "leg",
        "reused",
        "sent_s",
        "transport",
    )

    def __init__(self, pool: "EnginePool") -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self.leg: Leg | None = None
        self.reused = False
        self.idle_since_s = self.sent_s = self.deadline_s = self._patience_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._buffer = b""
        self._head: AnswerHead | None = None
        self._left = 0
        self._walk: ChunkWalk | None = None
        self._heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, leg: Leg, head: bytes, body: bytes, *, first_byte_s: float, idle_s: float) -> None:
        """Send a request; `leg` hears of the answer. Waits are bounded by `first_byte_s`, then `idle_s`."""
        assert self.transport is not None
        self.leg = leg
        self._heard = False
        self._patience_s = idle_s
        self.sent_s = now = time.monotonic()
        self.deadline_s = now + first_byte_s
        self._pool.busy.add(self)
        if len(body) < SMALL_BODY_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
        leg = self.leg
        if leg is None:
            self._discard()  # an engine that speaks unasked is not in step with us
            return
        self._heard = True
        try:
            if self._head is None and not self._buffer and self._read_whole(leg, data):
                return
            if self._head is None:
                data = self._read_head(leg, data)
                if self._head is None or (not data and self._left):
                    return
            self._read_body(leg, data)
        except FramingError as error:
            self._fail(Failure.MALFORMED, str(error))

    def _read_whole(self, leg: Leg, data: bytes) -> bool:
        """Done with it if `data` is a whole answer, as short ones are; otherwise nothing has happened."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return False
        head = parse_head(data[:end])
        if head.length != len(data) - end or not head.keep_alive or head.status < 200:
            return False
        self.leg = None
        self._pool.busy.discard(self)
        self._pool.give_back(self)
        leg.on_whole(head, data[end:])
        return True

    def _read_head(self, leg: Leg, data: bytes) -> bytes:
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
            return self._read_head(leg, data[end:])  # 100 Continue and its like
        self._head = head
        self._left = head.length
        if head.length == CHUNKED:
            self._walk = ChunkWalk()
        leg.on_head(head)
        return data[end:]

    def _read_body(self, leg: Leg, data: bytes) -> None:
        walk = self._walk
        if walk is not None:
            boundary = walk.feed(data)
            if not walk.done:
                leg.on_body(data, boundary)
                return
            surplus = boundary < len(data)
            leg.on_body(data[:boundary] if surplus else data, boundary)
        elif self._left >= 0:
            surplus = len(data) > self._left
            if surplus:
                data = data[: self._left]
            self._left -= len(data)
            if data:
                leg.on_body(data, len(data))
            if self._left:
                return
        else:
            leg.on_body(data, len(data))
            return
        if self.leg is leg:  # a leg may have let go of us while it read
            self._finish(leg, surplus=surplus)

    def _finish(self, leg: Leg, *, surplus: bool) -> None:
        head = self._head
        self.leg = None
        self._pool.busy.discard(self)
        if head is not None and head.keep_alive and not surplus:
            self._clear()
            self._pool.give_back(self)
        else:
            self._discard()
        leg.on_end()

    def abort(self) -> None:
        """Let go of the leg and close at once: the engine stops working on the request."""
        self.leg = None
        self._discard()

    def _discard(self) -> None:
        self._pool.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, failure: Failure, detail: str) -> None:
        leg, self.leg = self.leg, None
        self._discard()
        if leg is not None:
            leg.on_failure(failure, detail)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        leg, self.leg = self.leg, None
        if leg is None:
            return
        if self._head is not None and self._head.length == UNTIL_CLOSE and exc is None:
            leg.on_end()
        else:
            leg.on_failure(Failure.CLOSED, f"the engine closed the connection ({exc or 'end of stream'})")

    @property
    def silent(self) -> bool:
        """Whether nothing was read since the request was sent."""
        return not self._heard and self._head is None

    @property
    def lost_reuse_race(self) -> bool:
        """Whether a kept connection died before the engine can have read the request."""
        return self.reused and self.silent and time.monotonic() - self.sent_s < REUSE_RACE_S

    def check(self, now_s: float) -> None:
        """Fail the leg if it waited too long; what was read since the last check puts the deadline off."""
        if self._heard:
            self._heard = False
            self.deadline_s = now_s + self._patience_s
            self._pool.heard_s = now_s
        elif now_s >= self.deadline_s:
            phase = "the first byte" if self._head is None else "the next bytes"
            self._fail(Failure.TIMEOUT, f"the engine took too long for {phase}")

    def hurry(self, deadline_s: float) -> None:
        """Fail a leg that another instance can take; any other has to hear of its engine by the deadline."""
        if self.leg is not None and self.leg.replaceable:
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


class EnginePool:
    """The connections to one endpoint, last used first."""

    __slots__ = ("_closed", "_idle", "address", "busy", "heard_s", "host", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.address = f"{host}:{port}".encode()
        self._closed = False
        self._idle: list[EngineConnection] = []
        self.busy: set[EngineConnection] = set()
        self.heard_s = 0.0
        """When this endpoint last said something."""

    def kept(self) -> EngineConnection | None:
        """An idle connection that is fresh enough, if there is one."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if time.monotonic() - connection.idle_since_s < KEEP_IDLE_S:
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
            failure = Failure.TIMEOUT if self.heard_s > began_s else Failure.UNREACHABLE
            raise LegFailed(failure, "no connection in time", consumed=False) from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            failure = Failure.REFUSED if refused else Failure.UNREACHABLE
            raise LegFailed(failure, f"no connection: {error.strerror or error}", consumed=False) from error
        if self._closed:
            connection.abort()
            raise LegFailed(Failure.EJECTED, "the instance has left", consumed=False)
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        """Keep it for the next request."""
        if self._closed:
            connection.abort()
            return
        self.heard_s = connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """It is closed, or will be."""
        self.busy.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle; what is busy ends its answer first."""
        self._closed = True
        for connection in list(self._idle):
            connection.abort()

    def hurry(self, deadline_s: float) -> None:
        """Nobody shall wait for this endpoint longer than that, and who can go elsewhere not at all."""
        for connection in list(self.busy):
            connection.hurry(deadline_s)

    def check(self, now_s: float) -> None:
        """Fail the legs that waited too long."""
        for connection in list(self.busy):
            connection.check(now_s)


class WholeAnswer(Completion[bytes]):
    """A leg that collects its answer, and completes with its content: prefill legs and probes."""

    __slots__ = ("_parts", "_size", "head", "replaceable")

    def __init__(self, *, replaceable: bool) -> None:
        Completion.__init__(self)  # super() costs a lookup
        self.replaceable = replaceable
        self.head: AnswerHead | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, head: AnswerHead) -> None:
        self.head = head

    def on_body(self, data: bytes, boundary: int) -> None:  # noqa: ARG002  # Leg's signature
        self._size += len(data)
        if self._size > MAX_WHOLE_BYTES:
            raise FramingError("answer too long")
        self._parts.append(data)

    def on_end(self) -> None:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        assert self.head is not None
        self.set_result(dechunk(body) if self.head.length == CHUNKED else body)

    def on_whole(self, head: AnswerHead, content: bytes) -> None:
        self.head = head
        self.set_result(content)

    def on_failure(self, failure: Failure, detail: str) -> None:
        self.set_exception(LegFailed(failure, detail))


async def ask(
    pool: EnginePool,
    head: bytes,
    body: bytes,
    *,
    connect_s: float,
    answer_s: float,
    replaceable: bool = True,
) -> tuple[int, bytes, AnswerHead]:
    """For a flow: one request with a whole answer: its status, content and head. Cancelled, it aborts it.

    A kept connection that dies before the engine read the request is replaced by a fresh one, once.

    Raises:
        LegFailed: if there is no answer. One with status 5xx is an answer.
    """
    connection = pool.kept()
    if connection is None:
        connection = await in_task(pool.connect(connect_s))
    while True:
        leg = WholeAnswer(replaceable=replaceable)
        connection.send(leg, head, body, first_byte_s=answer_s, idle_s=answer_s)
        try:
            content = await leg
        except LegFailed:
            if not connection.lost_reuse_race:
                raise
            connection = await in_task(pool.connect(connect_s))
            continue
        except asyncio.CancelledError:
            connection.abort()
            raise
        assert leg.head is not None
        return leg.head.status, content, leg.head
