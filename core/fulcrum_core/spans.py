"""Spans of traces, as plain values, and the W3C trace context in which they are passed on.

The programs make spans of what has happened; `fulcrum_cluster.tracing` sends them to an OTLP receiver.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

AttributeValue = str | int | float | bool


class SpanKind(StrEnum):
    """Whose work a span is, as OpenTelemetry names it."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class SpanEvent(NamedTuple):
    """Something that happened at one time within a span."""

    name: str
    at_s: float


class Span(NamedTuple):
    """A span that ended. Times are unix seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    """0: it has no parent."""
    start_s: float
    end_s: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, AttributeValue] = {}
    error: str = ""
    """Why it failed; empty: it did not."""
    events: tuple[SpanEvent, ...] = ()
    parent_is_remote: bool = False


class SpanSink(Protocol):
    """Takes spans that ended."""

    def send(self, spans: Sequence[Span]) -> None:
        """Send the spans later, in the background; drop them if too many wait."""


class TraceParent(NamedTuple):
    """The sender's position in a trace, as the header `traceparent` says it."""

    trace_id: int
    span_id: int
    sampled: bool


_TRACEPARENT = re.compile(
    rb"(?!ff)(?!00-.{52}.)"  # no version ff; only later versions than 00 may have more fields
    rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)


def parse_traceparent(value: bytes) -> TraceParent | None:
    """Parse the value of a header `traceparent`; None: it is not valid, and the trace begins here."""
    found = _TRACEPARENT.fullmatch(value.strip())
    if found is None:
        return None
    trace_id, span_id, flags = (int(text, 16) for text in found.groups())
    return TraceParent(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def format_traceparent(trace_id: int, span_id: int) -> bytes:
    """The value of the header `traceparent` for a sampled span."""
    return b"00-%032x-%016x-01" % (trace_id, span_id)
