"""The decode leg: one attempt to send a request to a decode instance and to forward its response.

`exchange` starts a leg and retries with another instance. The bytes of the body are forwarded unchanged; only
a usage event that the router added is removed.

The first byte is the first one sent to the client. Until then another instance can take over unnoticed, so a
stream is buffered up to the first chunk with a token: every event but `[DONE]` and the usage counts as one.
A JSON response is buffered up to its end or 1 MiB. After the first byte whole chunks are forwarded, so that
an error event can follow when the stream breaks. A chunk larger than 64 KiB is forwarded in pieces, also when
it is the first one, and is not searched for a token.

A response that may use KV fetched after its lease expired is withheld until its lease check ends.
"""

import time
from collections.abc import Callable

import structlog

from fulcrum_router.data_path.request import Downstream
from fulcrum_router.fleet.engine_metrics import fetch_expired_transfers
from fulcrum_router.fleet.instances import IncomingTransfer, Instance
from fulcrum_router.http1.engine_events import (
    ABORT,
    ABORT_PATTERN,
    DONE_EVENT,
    EMPTY_CHOICES,
    Usage,
    has_no_token,
    parse_usage,
    strip_usage_events,
)
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, ResponseHead, frame_chunk
from fulcrum_router.http1.inline_task import Completion
from fulcrum_router.http1.responses import build_broken_stream_event
from fulcrum_router.http1.upstream import EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer
from fulcrum_router.policy.ledger import DecodeEntry

log = structlog.get_logger()

MAX_BUFFERED_BODY_BYTES = 1024 * 1024
"""A JSON response up to this size is sent to the client only when it is complete."""
MAX_BUFFERED_CHUNK_BYTES = 65_536
"""A chunk up to this size is forwarded only when it is complete."""


class StreamBroken(Exception):
    """The engine failed after the first byte was sent to the client."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure, self.detail = failure, detail


class DecodeLeg(Completion[None]):
    """One attempt at the decode leg; completes with the end of its response."""

    __slots__ = (
        "_body_bytes",
        "_body_parts",
        "_buffered",
        "_committed",
        "_last_sent",
        "_lease_checked",
        "_mid_chunk",
        "_strips_usage",
        "_withheld",
        "cache_salt",
        "connection",
        "connection_returned",
        "downstream",
        "entry",
        "events",
        "first_byte_at_s",
        "fulcrum_headers",
        "head",
        "instance",
        "on_first_byte",
        "on_late_response",
        "on_silence",
        "sent_s",
        "streaming",
        "transfer",
        "usage",
    )

    def __init__(
        self,
        connection: EngineConnection,
        downstream: Downstream,
        *,
        entry: DecodeEntry,
        fulcrum_headers: bytes,
        instance: Instance,
        cache_salt: str | None,
        on_first_byte: Callable[[float], None],
        on_late_response: Callable[[], None],
        on_silence: Callable[["DecodeLeg", float], float],
        transfer: KvTransfer | None,
        strips_usage: bool = False,
    ) -> None:
        Completion.__init__(self)  # super() costs a lookup
        self.connection, self.downstream, self.entry = connection, downstream, entry
        self.fulcrum_headers = fulcrum_headers
        """The router's header lines, sent in front of the engine's."""
        self.instance = instance
        self.cache_salt = cache_salt
        """Cache salt of the instance when the leg was sent; None if this request was given a salt of its own,
        because the engine must compute the prompt again.
        """
        self.on_first_byte = on_first_byte
        self.on_late_response = on_late_response
        """Called when the response is withheld and needs a lease check."""
        self.on_silence = on_silence
        """Called when no byte came up to the deadline; returns the new one, see `extend_deadline`."""
        self.transfer = transfer
        """The KV transfer of this leg; None if the instance computes the prompt."""
        self.usage: Usage | None = None
        """The engine's count of tokens; None until it was read, or if the engine reports none."""
        self._strips_usage = strips_usage
        """Whether the router requested the usage and removes it from the stream."""
        self.connection_returned = False
        """Whether the connection was returned to its pool, where another leg may use it."""
        self.head: ResponseHead | None = None
        self.streaming = False
        self.sent_s = time.monotonic()
        self.first_byte_at_s = 0.0
        """When the first byte was sent to the client."""
        self.events = 0
        """Events of the stream that were sent to the client."""
        self._committed = False
        """Whether the first byte was sent to the client: no other instance can take over."""
        self._lease_checked = False
        self._withheld: list[bytes] | None = None
        """Chunks withheld during the lease check; None outside one."""
        self._mid_chunk = False
        """Whether part of a chunk too large to buffer was forwarded: no event can be inserted."""
        self._buffered = b""
        """Received bytes that are not sent yet: chunks before the first token, the beginning of a chunk."""
        self._last_sent = b""
        """Bytes that were sent to the client last."""
        self._body_parts: list[bytes] = []
        """Body of a JSON response until it is complete or too large."""
        self._body_bytes = 0

    @property
    def retryable(self) -> bool:
        """See `ResponseHandler`."""
        return not self._committed

    def on_head(self, head: ResponseHead) -> None:
        self.head = head
        self.streaming = head.is_event_stream and head.status == 200

    def on_body(self, data: bytes, boundary: int) -> None:
        if self.streaming:
            self._take_stream_data(data, boundary)
        elif self._committed:
            self.downstream.write(data)
        else:
            self._collect(data)

    def _take_stream_data(self, data: bytes, boundary: int) -> None:
        if boundary < len(data):
            data = self._buffer_partial_chunk(data, boundary)
            if not data:
                return
        elif self._buffered or self._mid_chunk:
            data, self._buffered, self._mid_chunk = self._buffered + data, b"", False
        self._forward(data)

    def _forward(self, data: bytes) -> None:
        """Send whole chunks to the client, the first ones only when there is a token in them."""
        if ABORT in data and ABORT_PATTERN.search(data):
            self._abort(Failure.ABORTED, "the engine aborted the request")
            return
        if self._withheld is not None:
            self._withheld.append(data)
            return
        # Without a token nothing is sent yet: another instance can still take the request.
        if not self._committed and not self._mid_chunk and has_no_token(data):
            if DONE_EVENT in data:
                self._abort(Failure.ABORTED, "the engine ended the stream before its first token")
            else:
                self._buffered = data + self._buffered
                if len(self._buffered) > MAX_BUFFERED_CHUNK_BYTES:
                    self._abort(Failure.MALFORMED, "the stream began with too much that is no token")
            return
        if EMPTY_CHOICES in data and not self._mid_chunk:
            data = self._take_usage(data)
        events = data.count(b"\ndata:")
        if not self._committed:
            assert self.head is not None
            if not self._lease_checked and self._needs_lease_check():
                self._withheld = [data]
                self._request_lease_check(pause_reading=True)
                return
            self._commit()
            data = self.head.prepend_headers(self.fulcrum_headers) + data
        self.events += events
        self.entry.add_tokens(events)
        self._last_sent = data
        self.downstream.write(data)

    def _take_usage(self, data: bytes) -> bytes:
        """Read the usage in whole events; return them, without the usage if only the router requested it."""
        usage = parse_usage(data[data.rfind(EMPTY_CHOICES) :])
        if usage is None:
            return data
        self.usage = usage
        chunked = self.head is not None and self.head.length == CHUNKED
        return strip_usage_events(data) if self._strips_usage and chunked else data

    @property
    def sent_last_event(self) -> bool:
        """Whether `[DONE]` was sent: many clients disconnect then, before the end of the body."""
        return self._last_sent.rstrip().endswith(DONE_EVENT)

    def _buffer_partial_chunk(self, data: bytes, boundary: int) -> bytes:
        """Return the whole chunks and buffer what follows them; a chunk that is too large is not buffered."""
        if boundary:
            ready, self._buffered = self._buffered + data[:boundary], data[boundary:]
            self._mid_chunk = False
            return ready
        self._buffered += data
        if len(self._buffered) <= MAX_BUFFERED_CHUNK_BYTES:
            return b""
        ready, self._buffered, self._mid_chunk = self._buffered, b"", True
        return ready

    def _collect(self, data: bytes) -> None:
        """Buffer a JSON response up to its end; above the limit send it on (a 5xx is never sent)."""
        self._body_bytes += len(data)
        assert self.head is not None
        if self.head.status >= 500:
            if self._body_bytes > MAX_BUFFERED_BODY_BYTES:
                self._abort(Failure.STATUS, f"the engine returned status {self.head.status}")
            return
        self._body_parts.append(data)
        if self._body_bytes > MAX_BUFFERED_BODY_BYTES and self._withheld is None:
            if self._needs_lease_check():
                self._withheld = []
                self._request_lease_check(pause_reading=True)
            else:
                self._send_collected()

    def _send_collected(self) -> None:
        assert self.head is not None
        self._commit()
        content, self._body_parts = b"".join(self._body_parts), []
        self.usage = parse_usage(content)
        self.downstream.write(self.head.prepend_headers(self.fulcrum_headers) + content)

    def _commit(self) -> None:
        """Record the first byte: from here on the leg cannot be retried, and its KV was fetched."""
        self._committed = True
        self.first_byte_at_s = time.monotonic()
        pending, head = self.instance.incoming_transfers, self.head
        if self.transfer is not None:
            pending.discard(self.transfer)
        if head is not None and head.status == 200:
            # Only a 200 shows that the engine has processed what it was sent earlier.
            pending.record_response(sent_s=self.sent_s, now_s=self.first_byte_at_s)
        self.on_first_byte(self.first_byte_at_s)
        if self.downstream.paused:
            self.connection.pause()

    # --- lease check ---------------------------------------------------------------------------

    def _needs_lease_check(self) -> bool:
        """Whether the response may use KV that was fetched too late, and this was not checked yet."""
        if self._lease_checked or self.cache_salt is None or self.head is None or self.head.status >= 400:
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

    def _request_lease_check(self, *, pause_reading: bool) -> None:
        """Have the exchange start `check_kv_leases`, for a response that the caller withholds."""
        if pause_reading:
            self.connection.pause()
        self.on_late_response()

    def finish_lease_check(self, *, kv_valid: bool) -> None:
        """End the lease check: forward what was withheld, or fail the leg."""
        withheld = self._withheld
        if self.done or withheld is None:
            return
        if not kv_valid:
            self._abort(Failure.LEASE_EXPIRED, "the KV may have been fetched after its lease had expired")
            return
        self._withheld, self._lease_checked = None, True
        if not self.connection_returned:
            self.connection.resume()
        for data in withheld:
            self._forward(data)
        if self.connection_returned:
            self.on_end()

    def on_end(self) -> None:
        if self.done:
            return
        if self._withheld is not None:
            self.connection.resume()  # before another leg takes the connection from the pool
            self.connection_returned = True
            return
        if not self._committed:
            failed = self._find_failure()
            if failed is not None:
                self.set_exception(failed)
                return
            if self._needs_lease_check():
                # The body is in `_body_parts`; `finish_lease_check` calls this method again.
                self._withheld, self.connection_returned = [], True
                self._request_lease_check(pause_reading=False)
                return
            self._send_collected()
        self.set_result(None)

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        self.head = head
        if head.is_event_stream or head.status >= 500 or ABORT in content or self._needs_lease_check():
            self.on_head(head)
            self.on_body(content, len(content))
            self.on_end()
            return
        self.usage = parse_usage(content)
        self._commit()
        self.downstream.write(head.prepend_headers(self.fulcrum_headers) + content)
        self.set_result(None)

    def _find_failure(self) -> LegFailed | None:
        """The failure that a complete response amounts to; None if it can be sent to the client."""
        head = self.head
        assert head is not None
        if head.status >= 500:
            return LegFailed(Failure.STATUS, f"the engine returned status {head.status}", status=head.status)
        if self.streaming:
            return LegFailed(Failure.CLOSED, "the engine ended the stream before its first token")
        for part in self._body_parts:
            if ABORT in part and ABORT_PATTERN.search(b"".join(self._body_parts)):
                return LegFailed(Failure.ABORTED, "the engine aborted the request")
        return None

    def on_failure(self, failure: Failure, detail: str) -> None:
        if self.done:
            return
        if self._committed:
            self.set_exception(StreamBroken(failure, detail))
        else:
            status = self.head.status if self.head is not None and self.head.status >= 500 else 0
            self.set_exception(LegFailed(failure, detail, status=status))

    def extend_deadline(self, now_s: float) -> float:
        """See `ResponseHandler`."""
        return self.on_silence(self, now_s) if self.head is None else now_s

    def fail_too_long(self) -> None:
        """End the leg: the engine works, but the response has taken longer than its tokens allow."""
        self._abort(Failure.TOO_LONG, "the response took longer than its number of tokens allows")

    def _abort(self, failure: Failure, detail: str) -> None:
        if not self.connection_returned:
            self.connection.abort()
        self.on_failure(failure, detail)

    def build_stream_error(self, message: str) -> bytes:
        """The error event for a broken stream; empty where no event can be inserted, as inside a chunk."""
        head = self.head
        if not self.streaming or self._mid_chunk or head is None:
            return b""
        event = build_broken_stream_event(message)
        if head.length == CHUNKED:
            return frame_chunk(event)
        return event if head.length == UNTIL_CLOSE else b""


async def check_kv_leases(leg: DecodeLeg) -> None:
    """Query the sources of the late transfers; forward the withheld response if no transfer has expired.

    If a source counts more expired transfers than before its prefill leg, or does not respond, the leg fails.
    No further source is queried then, since the client waits.
    """
    kv_valid, expired_by_source = leg.cache_salt == leg.instance.cache_salt, dict[str, float | None]()
    for transfer in leg.find_late_transfers() if kv_valid else ():
        source, before = transfer.source, transfer.expired_before
        if source.name not in expired_by_source:
            expired_by_source[source.name] = await fetch_expired_transfers(source)
        expired = expired_by_source[source.name]
        kv_valid = expired is not None and expired == before
        names = {"prefill": source.name, "decode": leg.instance.name}
        log.warning(
            "response later than the KV lease",
            **names,
            kv_valid=kv_valid,
            expired=expired,
            expired_before=before,
        )
        if not kv_valid:
            break
    leg.finish_lease_check(kv_valid=kv_valid)
