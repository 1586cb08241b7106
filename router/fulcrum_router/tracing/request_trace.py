"""The trace of one request: a span `fulcrum.request` with a child for each phase.

    fulcrum.request ─┬─ fulcrum.waiting   until the first leg is sent
                     ├─ fulcrum.prefill   a leg; the engine's own spans are its children
                     └─ fulcrum.decode    a leg ─── fulcrum.kv_transfer (as `latency_parts` estimates it)

The leg of a request that is passed through is `fulcrum.pass_through`.

Spans hold names, counts and times, and nothing that a client wrote.

The data path begins and ends the spans; `fulcrum_cluster.tracing` sends them.
"""

import random
import time
from collections.abc import Mapping, Sequence

from fulcrum_core.spans import (
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    SpanSink,
    TraceParent,
    format_traceparent,
    parse_traceparent,
)
from fulcrum_router.policy.predictions.latency_parts import PARTS, LatencyPart

_TRACEPARENT, _LINE_END = b"traceparent: ", b"\r\n"
_TRANSFER = PARTS.index(LatencyPart.TRANSFER)

MAX_CLIENT_TRACES_RPS = 10.0
"""Requests per second that are traced because their sender is; a trace costs more than a small request."""


class RequestTracer:
    """Decides which requests are traced: those of traced senders, up to a rate, and a share of the others.

    Args:
        sink: Takes the spans of a request when it ends.
        ratio: Share of the other requests that is traced.
        rng: Draws that share, and the ids.
    """

    __slots__ = ("_allowance", "_counted_at_s", "_ratio", "_rng", "_sink")

    def __init__(self, sink: SpanSink, *, ratio: float, rng: random.Random) -> None:
        self._sink, self._ratio, self._rng = sink, ratio, rng
        self._allowance, self._counted_at_s = MAX_CLIENT_TRACES_RPS, 0.0
        """Requests whose sender may still decide, and when that was counted."""

    def begin(self, trace_headers: bytes, now_s: float) -> "RequestTrace | None":
        """Begin the trace of a request with these header lines of a trace context; None: it is not traced."""
        parent, state = None, b""
        if trace_headers:
            line, _, state = trace_headers.partition(_LINE_END)
            parent = parse_traceparent(line.removeprefix(_TRACEPARENT))
        if parent is None:
            sampled = self._rng.random() < self._ratio
        else:
            sampled = parent.sampled and (self._obeys_sender(now_s) or self._rng.random() < self._ratio)
        return RequestTrace(self._sink, self._rng, parent, state) if sampled else None

    def _obeys_sender(self, now_s: float) -> bool:
        added = (now_s - self._counted_at_s) * MAX_CLIENT_TRACES_RPS
        self._allowance = min(self._allowance + added, MAX_CLIENT_TRACES_RPS)
        self._counted_at_s = now_s
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


class _OpenLeg:
    __slots__ = ("instance", "name", "sent_s", "span_id")

    def __init__(self, name: str, instance: str, span_id: int, sent_s: float) -> None:
        self.name, self.instance, self.span_id, self.sent_s = name, instance, span_id, sent_s


class RequestTrace:
    """The trace of one request, while it is served. Times are monotonic seconds."""

    __slots__ = ("_leg", "_offset_s", "_parent", "_rng", "_sink", "_span_id", "_spans", "_state", "trace_id")

    def __init__(self, sink: SpanSink, rng: random.Random, parent: TraceParent | None, state: bytes) -> None:
        self._sink, self._rng, self._parent, self._state = sink, rng, parent, state
        self.trace_id = rng.getrandbits(128) or 1 if parent is None else parent.trace_id
        self._span_id = self._make_id()
        self._leg: _OpenLeg | None = None
        self._spans: list[Span] = []
        self._offset_s = time.time() - time.monotonic()

    def _make_id(self) -> int:
        return self._rng.getrandbits(64) or 1

    def begin_leg(self, name: str, instance: str, now_s: float) -> bytes:
        """Begin the span of a leg; return the header lines of its trace context for the engine."""
        self._leg = _OpenLeg(name, instance, self._make_id(), now_s)
        return b"%b%b\r\n%b" % (
            _TRACEPARENT,
            format_traceparent(self.trace_id, self._leg.span_id),
            self._state,
        )

    def end_leg(self, now_s: float, *, error: str = "", first_byte_s: float | None = None) -> None:
        """End the span of the leg that was begun last, if it has not ended yet."""
        leg, self._leg = self._leg, None
        if leg is None:
            return
        events = () if first_byte_s is None else (SpanEvent("first byte", self._offset_s + first_byte_s),)
        self._spans.append(
            self._make_span(
                leg.name,
                leg.span_id,
                leg.sent_s,
                now_s,
                SpanKind.CLIENT,
                {"fulcrum.instance": leg.instance},
                error=error,
                events=events,
            )
        )

    def end(
        self,
        now_s: float,
        *,
        arrival_s: float,
        first_leg_s: float,
        parts: Sequence[float] | None,
        attributes: Mapping[str, AttributeValue],
        error: str = "",
    ) -> None:
        """End the trace and send its spans.

        Args:
            now_s: When the request ended.
            arrival_s: When it arrived.
            first_leg_s: When its first leg was sent; 0: none was.
            parts: Its seconds in the order of `PARTS`; None: they are not known.
            attributes: Attributes of the request's span.
            error: How it failed; empty: it did not.
        """
        self.end_leg(now_s, error=error)
        waited_until_s = first_leg_s or now_s
        self._spans.append(
            self._make_span(
                "fulcrum.waiting", self._make_id(), arrival_s, waited_until_s, SpanKind.INTERNAL, {}
            )
        )
        in_parts: dict[str, AttributeValue] = {}
        if parts is not None:
            self._add_transfer(parts[_TRANSFER])
            in_parts = {f"fulcrum.part.{part}_s": value for part, value in zip(PARTS, parts, strict=True)}
        parent = self._parent
        self._spans.append(
            Span(
                "fulcrum.request",
                self.trace_id,
                self._span_id,
                0 if parent is None else parent.span_id,
                self._offset_s + arrival_s,
                self._offset_s + now_s,
                SpanKind.SERVER,
                {**attributes, **in_parts},
                error,
                parent_is_remote=parent is not None,
            )
        )
        self._sink.send(self._spans)

    def _add_transfer(self, transfer_s: float) -> None:
        """Add the KV transfer to the last decode leg."""
        leg = next((span for span in reversed(self._spans) if span.name == "fulcrum.decode"), None)
        if leg is None or transfer_s <= 0:
            return
        self._spans.append(
            Span(
                "fulcrum.kv_transfer",
                self.trace_id,
                self._make_id(),
                leg.span_id,
                leg.start_s,
                min(leg.end_s, leg.start_s + transfer_s),
                attributes={"fulcrum.estimated": True},
            )
        )

    def _make_span(
        self,
        name: str,
        span_id: int,
        start_s: float,
        end_s: float,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        *,
        error: str = "",
        events: tuple[SpanEvent, ...] = (),
    ) -> Span:
        start_s, end_s = self._offset_s + start_s, self._offset_s + end_s
        return Span(
            name, self.trace_id, span_id, self._span_id, start_s, end_s, kind, attributes, error, events
        )
