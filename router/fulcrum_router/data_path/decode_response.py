"""The response of a decode leg: which bytes of an engine go to the client, and when.

The body is forwarded unchanged, but for three things: a usage event that the router requested is removed, a
failure of the engine is never sent, and a stream that another engine began is continued in the format of that
engine's chunks.

The first byte is the first one sent to the client. Until then another instance can take over unnoticed, so a
stream is buffered up to the first chunk with a token: every event but `[DONE]` and the usage counts as one.
A JSON response is buffered up to its end or 1 MiB. After the first byte whole chunks are forwarded, so that
an error event can follow when the stream breaks.

A response that may use KV fetched after its lease expired is withheld until its lease check ends:

    BUFFERING ──► SENDING                 nothing late: the usual case
    BUFFERING ──► CHECKING ──► CHECKED ──► SENDING
"""

import time
from enum import Enum

from fulcrum_router.data_path.chunk_buffer import NO_CHUNKS, ChunkBuffer, find_chunk_start
from fulcrum_router.data_path.request import Downstream
from fulcrum_router.data_path.response_observer import ResponseObserver
from fulcrum_router.fleet.instances import IncomingTransfer, Instance
from fulcrum_router.http1.engine_events import (
    ABORT,
    ABORT_PATTERN,
    DONE_EVENT,
    EMPTY_CHOICES,
    ERROR_BODY,
    ERROR_EVENT,
    EVENT_AND_CHUNK_END,
    Usage,
    has_no_token,
    parse_usage,
    read_error_status,
    strip_usage_events,
)
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, ResponseHead, frame_chunk
from fulcrum_router.http1.inline_task import Completion
from fulcrum_router.http1.responses import build_broken_stream_event
from fulcrum_router.http1.upstream import EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer
from fulcrum_router.policy.faults.blame import needs_another_engine
from fulcrum_router.policy.ledger import DecodeEntry

MAX_BUFFERED_BODY_BYTES = 1024 * 1024
"""A JSON response up to this size is sent to the client only when it is complete."""

_TAIL_BYTES = 4_096
_CUT_SHORT = "the engine closed the connection during the response"
_TOO_LONG = "the engine computes, but the response exceeds the time limit for its tokens"


class ResponseState(Enum):
    """What happens to the bytes that the engine sends."""

    BUFFERING = "buffering"
    """Nothing was sent to the client: another instance can take over."""
    CHECKING = "checking"
    """The response is withheld until the lease check ends."""
    CHECKED = "checked"
    """The lease check found the KV to be valid; nothing of the response was forwarded yet."""
    SENDING = "sending"
    """The client has the first byte."""


# An attribute of an enum is slow to read.
_BUFFERING, _CHECKING, _SENDING = ResponseState.BUFFERING, ResponseState.CHECKING, ResponseState.SENDING


class DecodeResponse(Completion[None]):
    """The response on one connection; completes with its end."""

    __deletable__ = ("_observer",)  # read by mypyc
    __slots__ = (
        "_body_bytes",
        "_body_parts",
        "_chunks",
        "_continuation",
        "_continued",
        "_counts_events",
        "_last_sent",
        "_observer",
        "_strips_usage",
        "_tail",
        "_withheld",
        "broke_off",
        "cache_salt",
        "connection",
        "downstream",
        "entry",
        "error_status",
        "events",
        "first_byte_at_s",
        "fulcrum_headers",
        "head",
        "instance",
        "sent_s",
        "state",
        "streaming",
        "transfer",
        "usage",
    )

    def __init__(
        self,
        connection: EngineConnection,
        downstream: Downstream,
        observer: ResponseObserver,
        entry: DecodeEntry | None,
        fulcrum_headers: bytes,
        instance: Instance,
        cache_salt: str | None,
        transfer: KvTransfer | None,
        strips_usage: bool = False,
        counts_events: bool = True,
    ) -> None:
        Completion.__init__(self)  # super() costs a lookup
        self.connection, self.downstream, self._observer = connection, downstream, observer
        self.entry = entry
        """Ledger entry that counts the output tokens."""
        self.fulcrum_headers = fulcrum_headers
        """The router's header lines, sent in front of the engine's."""
        self.instance = instance
        self.cache_salt = cache_salt
        """Cache salt of the instance when the leg was sent; None if this request was given a salt of its own,
        because the engine must compute the prompt again.
        """
        self.transfer = transfer
        """The KV transfer of this leg; None if the instance computes the prompt."""
        self.usage: Usage | None = None
        """The engine's count of tokens; None until it was read, or if the engine reports none."""
        self._strips_usage = strips_usage
        """Whether the router requested the usage and removes it from the stream."""
        self._counts_events = counts_events
        """Whether each event counts as one token; else the observer is asked."""
        self.state = _BUFFERING
        self.head: ResponseHead | None = None
        self.streaming = False
        self.sent_s = time.monotonic()
        self.first_byte_at_s = 0.0
        """When the first byte was sent to the client."""
        self.error_status = 0
        """4xx of an error that the engine sent in a response with status 200; 0: none."""
        self.broke_off = False
        """Whether that error came after a token."""
        self.events = 0
        """Events of the stream that were sent to the client."""
        self._chunks = NO_CHUNKS
        self._continuation = continuation = observer.continuation
        self._continued = None if continuation is None else continuation.stream
        """Set if the client has the beginning of the stream from another engine."""
        self._withheld: list[bytes] = []
        """Chunks that came during the lease check."""
        self._last_sent = b""
        """Bytes that were sent to the client last."""
        self._body_parts: list[bytes] = []
        """Body of a JSON response until it is complete or too large."""
        self._body_bytes = 0
        self._tail = b""
        """Last bytes of a JSON response that was sent before its end: the usage is in them."""

    @property
    def retryable(self) -> bool:
        """See `ResponseHandler`."""
        return self.state is not _SENDING

    def pause(self) -> None:
        """Stop reading from the engine: the client reads too slowly."""
        if self.connection.handler is self:  # else another leg may use the connection
            self.connection.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self.connection.handler is self:
            self.connection.resume()

    def forget_observer(self) -> None:
        """Called after the end. The leg refers to its response: only a garbage collection would free both."""
        del self._observer

    # --- bytes of the engine -----------------------------------------------------------------------

    def on_head(self, head: ResponseHead) -> None:
        self.head = head
        self.streaming = head.is_event_stream and head.status == 200
        if self._continued is not None and head.length != CHUNKED:
            self.streaming = False  # it cannot be made a part of the stream: see `_find_failure`
        if self.streaming:
            self._chunks = ChunkBuffer(rewritten=self._continued is not None)
        self.connection.end_s = self.sent_s + self._observer.max_response_s

    def on_body(self, data: bytes, boundary: int) -> None:
        if self.streaming:
            chunks = self._chunks
            if boundary != len(data) or chunks.held or chunks.mid_chunk or chunks.starts_mid_chunk:
                data = chunks.take(data, boundary)  # else it returns the same
            if data:
                self._forward(data)
        elif self.state is _SENDING:
            self._tail = self._tail[-_TAIL_BYTES:] + data[-_TAIL_BYTES:]
            self.downstream.write(data)
        else:
            self._collect(data)

    def _forward(self, data: bytes) -> None:
        """Send chunks to the client, the first ones only when there is a token in them."""
        if ABORT in data and ABORT_PATTERN.search(data):
            self._abort(Failure.ABORTED, "the engine aborted the request")
            return
        if ERROR_EVENT in data and not self._take_error(data):
            return
        state, mid_chunk = self.state, self._chunks.mid_chunk
        if state is _CHECKING:
            self._withheld.append(data)
            return
        # Without a token nothing is sent yet: another instance can still take the request.
        if state is not _SENDING and not mid_chunk and has_no_token(data):
            self._hold_back(data)
            return
        if EMPTY_CHOICES in data and not mid_chunk:
            data = self._take_usage(data)
        head = b""
        if state is not _SENDING and self._needs_lease_check():
            self._withheld.append(data)
            self._start_lease_check()
            return
        if self._continued is not None:
            data = self._rewrite(data)
            if not data:
                return
        if state is not _SENDING:
            head = self._commit()
        events = data.count(b"\ndata:")
        self.events += events
        if self.entry is not None:
            self.entry.add_tokens(events if self._counts_events else self._observer.count_tokens(events))
        self._last_sent = sent = head + data if head else data
        self.downstream.write(sent)
        if self._continuation is not None:
            self._continuation.add(data)

    def _rewrite(self, data: bytes) -> bytes:
        """Make chunks of this engine those of the stream that another one began; empty: none is left."""
        assert self._continued is not None
        if self._chunks.mid_chunk:
            self._abort(Failure.TOO_LARGE, "a chunk of the continued stream is too large")
            return b""
        return self._continued.rewrite(data)

    def _take_error(self, data: bytes) -> bool:
        """Read an error event; return whether the client caused it (4xx): then it is forwarded.

        Another error fails the leg: what came before it is sent to a client that has a part already.
        """
        position = data.find(ERROR_EVENT)
        status = read_error_status(data[position:])
        if status < 500:
            self.error_status = status
            self.broke_off = self.state is _SENDING or not has_no_token(data[:position])
            return True
        if self.state is _SENDING:
            start = data.rfind(EVENT_AND_CHUNK_END, 0, position)
            if start >= 0:
                self._forward(data[: start + len(EVENT_AND_CHUNK_END)])
        self._abort(Failure.STATUS, f"the engine sent an error event with status {status}", status)
        return False

    def _hold_back(self, data: bytes) -> None:
        if DONE_EVENT in data:
            self._abort(Failure.ABORTED, "the engine ended the stream before its first token")
        elif not self._chunks.put_back(data):
            self._abort(Failure.MALFORMED, "the stream sent too many bytes before its first token")

    def _take_usage(self, data: bytes) -> bytes:
        """Read the usage in whole events; return them, without the usage if only the router requested it."""
        position = data.rfind(EMPTY_CHOICES)
        usage = parse_usage(data[position:])
        if usage is None:
            return data
        self.usage = usage
        if not self._strips_usage or self.head is None or self.head.length != CHUNKED:
            return data
        start = find_chunk_start(data, position) if self._chunks.starts_mid_chunk else 0
        return data[:start] + strip_usage_events(data[start:])

    @property
    def sent_last_event(self) -> bool:
        """Whether `[DONE]` was sent: many clients disconnect then, before the end of the body."""
        return self._last_sent.rstrip().endswith(DONE_EVENT)

    def _collect(self, data: bytes) -> None:
        """Buffer a JSON response up to its end; send it on above the limit, except an error status."""
        self._body_bytes += len(data)
        assert self.head is not None
        if needs_another_engine(self.head.status):
            if self._body_bytes > MAX_BUFFERED_BODY_BYTES:
                self._abort(Failure.STATUS, f"the engine returned status {self.head.status}")
            return
        if self._continued is not None:  # not a stream: see `_find_failure`
            return
        self._body_parts.append(data)
        if self._body_bytes > MAX_BUFFERED_BODY_BYTES and self.state is not _CHECKING:
            if self._needs_lease_check():
                self._start_lease_check()
            else:
                self._send_collected()

    def _send_collected(self) -> None:
        content, self._body_parts = b"".join(self._body_parts), []
        self.usage, self._tail = parse_usage(content), content[-_TAIL_BYTES:]
        if self.head is not None and _is_error(self.head, content):
            self.error_status = read_error_status(content)
        self.downstream.write(self._commit() + content)

    def _commit(self) -> bytes:
        """Record the first byte, and return the head of the response to the client.

        From here on the leg cannot be retried, and its KV was fetched.
        """
        head = self.head
        assert head is not None
        self.state = _SENDING
        self.first_byte_at_s = now_s = time.monotonic()
        pending = self.instance.incoming_transfers
        if self.transfer is not None:
            pending.discard(self.transfer)
        if head.status == 200:
            # Only a 200 shows that the engine has processed what it was sent earlier.
            pending.record_response(sent_s=self.sent_s, now_s=now_s)
        self._observer.record_first_byte(now_s)
        self._continuation = self._observer.continuation
        if self.downstream.paused:
            self.pause()
        if self._continued is not None:
            return b""
        return head.prepend_headers(self.fulcrum_headers)

    # --- the lease check ---------------------------------------------------------------------------

    def _needs_lease_check(self) -> bool:
        """Whether the response may use KV that was fetched too late, and this was not checked yet."""
        if self.state is not _BUFFERING or self.cache_salt is None:
            return False
        if self.head is None or self.head.status >= 400:
            return False
        # A salt rotated since this leg was sent: another leg found that the prefix cache may hold wrong KV.
        return bool(self.cache_salt != self.instance.cache_salt or self.find_late_transfers())

    def find_late_transfers(self) -> list[IncomingTransfer]:
        """Transfers that may be late and whose KV the response may use.

        Those are the transfer of this leg, and all that are pending on the instance: the response may use
        their KV from the prefix cache.
        """
        found, transfer = self.instance.incoming_transfers.find_late(time.monotonic()), self.transfer
        if transfer is not None and transfer.is_late and transfer not in found:
            found.append(transfer)
        return found

    def _start_lease_check(self) -> None:
        self.state = _CHECKING
        self.pause()
        self._observer.start_lease_check()

    def finish_lease_check(self, *, kv_valid: bool) -> None:
        """End the lease check: forward what was withheld, or fail the leg."""
        if self.done or self.state is not _CHECKING:
            return
        if not kv_valid:
            self._abort(Failure.LEASE_EXPIRED, "the KV may have been fetched after its lease had expired")
            return
        withheld, self._withheld, self.state = self._withheld, [], ResponseState.CHECKED
        has_ended = self.connection.handler is not self
        self.resume()
        for data in withheld:
            self._forward(data)
        if has_ended:
            self.on_end()

    # --- the end -------------------------------------------------------------------------------------

    def on_end(self) -> None:
        if self.done:
            return
        state = self.state
        if state is _CHECKING:
            return  # `finish_lease_check` calls this method again
        if state is not _SENDING:
            failed = self._find_failure()
            if failed is not None:
                self.set_exception(failed)
                return
            if self._needs_lease_check():
                self._start_lease_check()
                return
            self._send_collected()
        elif not self._is_complete():
            self.set_exception(LegFailed(Failure.CLOSED, _CUT_SHORT))
            return
        elif not self.streaming:
            self.usage = parse_usage(self._tail)
        self.set_result(None)

    def _is_complete(self) -> bool:
        """Whether a response without a length is whole: an engine that crashes closes the connection, too."""
        head = self.head
        if head is None or head.length != UNTIL_CLOSE:
            return True
        return self.sent_last_event if self.streaming else self._tail.rstrip().endswith(b"}")

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        self.head = head
        if (
            head.is_event_stream
            or head.status != 200
            or ABORT in content
            or content.startswith(ERROR_BODY)
            or self._continued is not None
            or self._needs_lease_check()
        ):
            self.on_head(head)
            self.on_body(content, len(content))
            self.on_end()
            return
        self.usage = parse_usage(content)
        self.downstream.write(self._commit() + content)
        self.set_result(None)

    def _find_failure(self) -> LegFailed | None:
        """The failure that a complete response amounts to; None if it can be sent to the client."""
        head = self.head
        assert head is not None
        if needs_another_engine(head.status) or (head.status >= 400 and self._observer.doubts_rejection()):
            return LegFailed(Failure.STATUS, f"the engine returned status {head.status}", status=head.status)
        if self.streaming:
            return LegFailed(Failure.CLOSED, "the engine ended the stream before its first token")
        if self._continued is not None:
            detail = f"the engine did not continue the stream: status {head.status}"
            if head.status >= 400:
                return LegFailed(Failure.STATUS, detail, status=head.status)
            return LegFailed(Failure.MALFORMED, detail)
        content = b"".join(self._body_parts)
        self._body_parts = [content]
        if head.status == 200 and (failed := self._find_hidden_failure(head, content)) is not None:
            return failed
        if ABORT in content and ABORT_PATTERN.search(content):
            return LegFailed(Failure.ABORTED, "the engine aborted the request")
        return None

    def _find_hidden_failure(self, head: ResponseHead, content: bytes) -> LegFailed | None:
        """The failure in a whole response with status 200; None: there is none."""
        if _is_error(head, content):
            status = read_error_status(content)
            if status >= 500:
                return LegFailed(Failure.STATUS, f"the engine returned an error {status}", status=status)
        if head.length == UNTIL_CLOSE and not content.rstrip().endswith(b"}"):
            return LegFailed(Failure.CLOSED, _CUT_SHORT)
        return None

    def on_failure(self, failure: Failure, detail: str, status: int = 0) -> None:
        if self.head is not None and self.head.status >= 500:
            status = self.head.status
        self.set_exception(LegFailed(failure, detail, status=status))

    def extend_deadline(self, now_s: float) -> float:
        """See `ResponseHandler`."""
        return self._observer.extend_deadline(now_s) if self.head is None else now_s

    def fail_too_long(self) -> None:
        """End the leg: the engine works, but the response has taken longer than its tokens allow."""
        self._abort(Failure.TOO_LONG, _TOO_LONG)

    def _abort(self, failure: Failure, detail: str, status: int = 0) -> None:
        if self.connection.handler is self:
            self.connection.abort()
        self.on_failure(failure, detail, status)

    @property
    def is_mid_chunk(self) -> bool:
        """Whether the client has a part of a chunk: nothing but its rest may follow."""
        return self._chunks.mid_chunk and self._continued is None

    def build_stream_error(self, message: str) -> bytes:
        """The error event for a broken stream; empty where no event can be inserted, as inside a chunk."""
        head = self.head
        if not self.streaming or self.is_mid_chunk or head is None:
            return b""
        event = build_broken_stream_event(message)
        if head.length == CHUNKED:
            return frame_chunk(event)
        return event if head.length == UNTIL_CLOSE else b""


def _is_error(head: ResponseHead, body: bytes) -> bool:
    """Whether a whole response has an error instead of an answer; in chunks, behind the size of the first."""
    return body.startswith(ERROR_BODY, body.find(b"\n") + 1 if head.length == CHUNKED else 0)
