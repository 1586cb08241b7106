"""Send the spans of one program to an OTLP receiver, over HTTP and in the background.

Off unless the environment names a receiver, by OpenTelemetry's own variables. Its SDK is the extra `tracing`,
and is imported only then. Router, operator and autoscaler send by it; what a span says is decided there.
"""

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fulcrum_core.errors import InvalidInput
from fulcrum_core.spans import AttributeValue, Span, SpanKind, SpanSink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ENDPOINT_VARIABLE, RATIO_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG"
DEFAULT_RATIO = 0.01
"""Share of the requests, and of the reconciles, that are traced."""
TIMEOUT_S = 5.0
"""Longest wait for the receiver. Meanwhile spans wait, up to 2,048; then they are dropped."""
CLOSE_S = 2.0
"""Longest wait for the receiver at the end of the program."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go, and how many."""

    endpoint: str
    """URL of the receiver, without `/v1/traces`."""
    ratio: float
    """Share of what begins here that is traced, 0 to 1."""


def read_trace_settings(environment: Mapping[str, str]) -> TraceSettings | None:
    """Read the settings from environment variables; None: no spans are sent.

    Raises:
        InvalidInput: for a receiver that is no URL, or a ratio that is not one.
    """
    endpoint, text = environment.get(ENDPOINT_VARIABLE, "").rstrip("/"), environment.get(RATIO_VARIABLE, "")
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidInput(ENDPOINT_VARIABLE, endpoint, "is not an http:// or https:// URL")
    try:
        ratio = float(text) if text else DEFAULT_RATIO
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InvalidInput(RATIO_VARIABLE, text, "is not a number from 0 to 1")
    return TraceSettings(endpoint, ratio)


class OtlpSender:
    """Sends spans; a `SpanSink`."""

    def __init__(self, program: str, settings: TraceSettings, *, instance: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._resource = Resource.create({"service.name": program, "service.instance.id": instance})
        self._exporter = OTLPSpanExporter(endpoint=f"{settings.endpoint}/v1/traces", timeout=TIMEOUT_S)
        self._processor = BatchSpanProcessor(self._exporter)

    def send(self, spans: Sequence[Span]) -> None:
        """See `SpanSink`."""
        for span in spans:
            self._processor.on_end(self._convert(span))

    def _convert(self, span: Span) -> "ReadableSpan":
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags
        from opentelemetry.trace import SpanKind as Kind
        from opentelemetry.trace.status import Status, StatusCode

        sampled = TraceFlags(TraceFlags.SAMPLED)
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, span.parent_is_remote, sampled)
        return ReadableSpan(
            span.name,
            context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=sampled),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(event.name, timestamp=int(event.at_s * _NS)) for event in span.events],
            kind={SpanKind.SERVER: Kind.SERVER, SpanKind.CLIENT: Kind.CLIENT}.get(span.kind, Kind.INTERNAL),
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int(span.start_s * _NS),
            end_time=int(span.end_s * _NS),
        )

    def close(self, *, within_s: float = CLOSE_S) -> None:
        """Send what waits, and stop; what the receiver does not take within this time is dropped."""
        # The SDK's own limit is 30 s, and cannot be set.
        sending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(within_s)
        if sending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves its result out


class RootSpans:
    """Sends spans that begin a trace: what a program does of itself.

    Args:
        sink: Takes the spans.
        ratio: Share of the routine spans that is sent.
        rng: Draws that share, and the ids.
    """

    def __init__(self, sink: SpanSink, *, ratio: float, rng: random.Random) -> None:
        self._sink, self._ratio, self._rng = sink, ratio, rng

    def send(
        self,
        name: str,
        *,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, AttributeValue],
        error: str = "",
        routine: bool = False,
    ) -> None:
        """Send a span; times are unix seconds. A `routine` one, that did not fail, is sent by the ratio."""
        if routine and not error and self._rng.random() >= self._ratio:
            return
        ids = self._rng.getrandbits(128) or 1, self._rng.getrandbits(64) or 1
        self._sink.send([Span(name, *ids, 0, start_s, end_s, attributes=attributes, error=error)])


@contextlib.asynccontextmanager
async def open_root_spans(program: str) -> AsyncIterator[RootSpans | None]:
    """Send spans by the settings in the environment; yields None if it has none."""
    settings = read_trace_settings(os.environ)
    async with open_otlp_sender(program, settings, instance=socket.gethostname()) as sender:
        if sender is None or settings is None:
            yield None
        else:
            yield RootSpans(sender, ratio=settings.ratio, rng=random.Random())


@contextlib.asynccontextmanager
async def open_otlp_sender(
    program: str, settings: TraceSettings | None, *, instance: str
) -> AsyncIterator[OtlpSender | None]:
    """Send spans inside the block; yields None without settings.

    Raises:
        InvalidInput: if the extra `tracing` is not installed.
    """
    if settings is None:
        yield None
        return
    try:
        sender = OtlpSender(program, settings, instance=instance)
    except ImportError:
        raise InvalidInput(ENDPOINT_VARIABLE, settings.endpoint, "needs the extra fulcrum[tracing]") from None
    try:
        yield sender
    finally:
        await asyncio.to_thread(sender.close)
