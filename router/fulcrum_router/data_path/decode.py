"""The decode leg: an engine's answer on its way to the client, bytes as they came.

Nothing reaches the client before the first content byte, so that until then another instance can take
the request unseen: a stream is held to its first whole chunk, a small JSON answer to its end. From
there on only whole chunks are passed, so that a stream that breaks can end in an error event. An answer to
a hand-off that comes too late for its lease is held until somebody has settled whether it is sound.
"""

import re
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import read_usage
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, AnswerHead, chunk
from fulcrum_router.http1.inline_task import Completion
from fulcrum_router.http1.responses import error_event
from fulcrum_router.http1.upstream import EngineConnection, Failure, LegFailed
from fulcrum_router.kv_transfer.verification import NO_CHOICES, Handed
from fulcrum_router.observe.engines import expired_handoffs
from fulcrum_router.policy.ledger import DecodeEntry

log = structlog.get_logger()

HELD_WHOLE_BYTES = 1024 * 1024
"""A JSON answer up to this size reaches the client only once it is whole."""
HELD_CHUNK_BYTES = 65_536
"""A chunk begun is held up to this size."""

DONE = b"data: [DONE]"
_ABORT = re.compile(rb'"finish_reason"\s*:\s*"abort"')


class Broken(Exception):
    """The engine failed after the first byte went to the client."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure, self.detail = failure, detail


class Sink(Protocol):
    """The client's side."""

    @property
    def paused(self) -> bool:
        """Whether it takes no more for now."""

    def write(self, data: bytes) -> None:
        """Send."""


class DecodeLeg(Completion[None]):
    """One attempt at the decode leg; completes with the end of its answer."""

    __slots__ = (
        "_cleared",
        "_committed",
        "_doubted",
        "_held",
        "_last",
        "_parts",
        "_size",
        "_torn",
        "connection",
        "entry",
        "events",
        "extra",
        "first_s",
        "handed",
        "head",
        "instance",
        "on_doubt",
        "on_first",
        "released",
        "salt",
        "sent_s",
        "sink",
        "streaming",
    )

    def __init__(
        self,
        connection: EngineConnection,
        sink: Sink,
        entry: DecodeEntry,
        extra: bytes,
        instance: Instance,
        salt: str | None,
        on_first: Callable[[float], None],
        on_doubt: Callable[[], None],
        handed: Handed | None = None,
    ) -> None:
        Completion.__init__(self)  # super() costs a lookup
        self.connection, self.sink, self.entry = connection, sink, entry
        self.extra = extra
        """Header lines put in front of the engine's own."""
        self.instance, self.salt = instance, salt
        """Who was asked, and what its prompts' salt was then; None: one that finds no KV there."""
        self.on_first = on_first
        self.on_doubt = on_doubt
        """Called when it has to be settled whether the answer is sound."""
        self.handed = handed
        """The hand-off that it was given."""
        self.released = False
        """Whether the connection is somebody else's by now."""
        self.head: AnswerHead | None = None
        self.streaming = False
        self.sent_s = time.monotonic()
        self.first_s = 0.0
        self.events = 0
        self._committed = False
        self._cleared = False
        self._doubted: list[bytes] | None = None
        """What came while it was in doubt whether the lease was kept."""
        self._torn = False
        self._held = self._last = b""
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def replaceable(self) -> bool:
        """See `Leg`."""
        return not self._committed

    def on_head(self, head: AnswerHead) -> None:
        self.head = head
        self.streaming = head.event_stream and head.status == 200

    def on_body(self, data: bytes, boundary: int) -> None:
        if self.streaming:
            self._stream(data, boundary)
        elif self._committed:
            self.sink.write(data)
        else:
            self._collect(data)

    def _stream(self, data: bytes, boundary: int) -> None:
        if boundary < len(data):
            data = self._hold(data, boundary)
            if not data:
                return
        elif self._held or self._torn:
            data, self._held, self._torn = self._held + data, b"", False
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        """Whole chunks go to the client."""
        if b'"abort"' in data and _ABORT.search(data):
            self._give_up(Failure.ABORTED, "the engine aborted the request")
            return
        if self._doubted is not None:
            self._doubted.append(data)
            return
        if not self._committed and not self._torn and says_nothing(data):
            if DONE in data:
                self._give_up(Failure.ABORTED, "the engine ended the stream before its first token")
            else:
                self._held = data + self._held
            return
        handed = self.handed
        if handed is not None and NO_CHOICES in data and not self._torn:
            data = handed.read_events(data, chunked=self.head is not None and self.head.length == CHUNKED)
        events = data.count(b"\ndata:")
        if not self._committed:
            assert self.head is not None
            if not self._cleared and self._is_late():
                self._doubted = [data]
                self._ask(pausing=True)
                return
            self._commit()
            data = self.head.with_fields(self.extra) + data
        self.events += events
        self.entry.grow(events)
        self._last = data
        self.sink.write(data)

    @property
    def told_all(self) -> bool:
        """Whether the client has the last event of its stream, and may leave before the body's end."""
        return self._last.rstrip().endswith(DONE)

    def _hold(self, data: bytes, boundary: int) -> bytes:
        """Keep what follows the last whole chunk; the rest may go."""
        if boundary:
            ready, self._held = self._held + data[:boundary], data[boundary:]
            self._torn = False
            return ready
        self._held += data
        if len(self._held) <= HELD_CHUNK_BYTES:
            return b""
        ready, self._held, self._torn = self._held, b"", True
        return ready

    def _collect(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        assert self.head is not None
        if self._size > HELD_WHOLE_BYTES and self.head.status < 500 and self._doubted is None:
            if self._is_late():
                self._doubted = []
                self._ask(pausing=True)
            else:
                self._send_collected()

    def _send_collected(self) -> None:
        assert self.head is not None
        self._commit()
        content, self._parts = b"".join(self._parts), []
        if self.handed is not None:
            self.handed.usage = read_usage(content)
        self.sink.write(self.head.with_fields(self.extra) + content)

    def _commit(self) -> None:
        self._committed = True
        self.first_s = time.monotonic()
        awaited, head = self.instance.awaited, self.head
        if self.handed is not None:
            awaited.discard(self.handed)
        if head is not None and head.status == 200:
            awaited.answered(sent_s=self.sent_s, now_s=self.first_s)
        self.on_first(self.first_s)
        if self.sink.paused:
            self.connection.pause()

    # --- doubt ---------------------------------------------------------------------------------

    def _is_late(self) -> bool:
        """Whether it is in doubt, for the first time, that all KV it comes of was fetched in time."""
        if self._cleared or self.salt is None or self.head is None or self.head.status >= 400:
            return False
        return bool(self.salt != self.instance.salt or self.doubts())

    def doubts(self) -> list[Handed]:
        """Hand-offs that may have been fetched too late, of what it may come of: its own, and others'."""
        found, handed = self.instance.awaited.overdue(time.monotonic()), self.handed
        if handed is not None and handed.late and handed not in found:
            found.append(handed)
        return found

    def _ask(self, *, pausing: bool) -> None:
        """Hold everything until `settle` is called."""
        if pausing:
            self.connection.pause()
        self.on_doubt()

    def settle(self, *, sound: bool) -> None:
        """It is known now whether what was held may be passed on."""
        doubted = self._doubted
        if self.done or doubted is None:
            return
        if not sound:
            self._give_up(Failure.LEASE, "the hand-off may have been fetched too late")
            return
        self._doubted, self._cleared = None, True
        if not self.released:
            self.connection.resume()
        for data in doubted:
            self._pass(data)
        if self.released:
            self.on_end()

    def on_end(self) -> None:
        if self.done:
            return
        if self._doubted is not None:
            self.connection.resume()  # nobody else has it yet
            self.released = True
            return
        if not self._committed:
            failed = self._judge()
            if failed is not None:
                self.set_exception(failed)
                return
            if self._is_late():
                self._doubted, self.released = [], True
                self._ask(pausing=False)
                return
            self._send_collected()
        self.set_result(None)

    def on_whole(self, head: AnswerHead, content: bytes) -> None:
        handed, self.head = self.handed, head
        if head.event_stream or head.status >= 500 or b'"abort"' in content or self._is_late():
            self.on_head(head)
            self.on_body(content, len(content))
            self.on_end()
            return
        if handed is not None:
            handed.usage = read_usage(content)
        self._commit()
        self.sink.write(head.with_fields(self.extra) + content)
        self.set_result(None)

    def _judge(self) -> LegFailed | None:
        """Whether a whole answer is one that another instance should be asked for instead."""
        head = self.head
        assert head is not None
        if head.status >= 500:
            return LegFailed(Failure.STATUS, f"the engine answered {head.status}", status=head.status)
        if self.streaming:
            return LegFailed(Failure.CLOSED, "the engine ended the stream before its first event")
        for part in self._parts:
            if b'"abort"' in part and _ABORT.search(b"".join(self._parts)):
                return LegFailed(Failure.ABORTED, "the engine aborted the request")
        return None

    def on_failure(self, failure: Failure, detail: str) -> None:
        if self.done:
            return
        if self._committed:
            self.set_exception(Broken(failure, detail))
        else:
            status = self.head.status if self.head is not None and self.head.status >= 500 else 0
            self.set_exception(LegFailed(failure, detail, status=status))

    def _give_up(self, failure: Failure, detail: str) -> None:
        if not self.released:
            self.connection.abort()
        self.on_failure(failure, detail)

    def last_words(self, message: str) -> bytes:
        """What tells the client that its stream broke; empty where nothing can be put in."""
        head = self.head
        if not self.streaming or self._torn or head is None:
            return b""
        event = error_event(message)
        if head.length == CHUNKED:
            return chunk(event)
        return event if head.length == UNTIL_CLOSE else b""


def says_nothing(framed: bytes) -> bool:
    """Whether what a stream begins with is no answer yet: its end, its usage, a comment.

    vLLM that shuts down sends a new stream's end and nothing else.
    """
    return framed.count(b"data:") == framed.count(DONE) + framed.count(NO_CHOICES)


async def settle(leg: DecodeLeg) -> None:
    """Pass on an answer that is in doubt, if none of the givers let anything expire meanwhile.

    The first one that did, or does not say, is enough: the request waits while they are asked.
    """
    sound, expired = leg.salt == leg.instance.salt, dict[str, float | None]()
    for handed in leg.doubts() if sound else ():
        giver, before = handed.source, handed.expired_before
        if giver.name not in expired:
            expired[giver.name] = await expired_handoffs(giver)
        now = expired[giver.name]
        sound = now is not None and now == before
        names = {"prefill": giver.name, "decode": leg.instance.name}
        log.warning("answer later than the lease", **names, sound=sound, expired=now, expired_before=before)
        if not sound:
            break
    leg.settle(sound=sound)
