"""Which requests are traced, and which spans a trace has."""

import random
from collections.abc import Sequence

import pytest

from fulcrum_core.spans import Span, SpanKind
from fulcrum_router.policy.predictions.latency_parts import PARTS
from fulcrum_router.tracing.request_trace import MAX_CLIENT_TRACES_RPS, RequestTracer

PARENT = b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-%b\r\n"
SAMPLED, NOT_SAMPLED = PARENT % b"01", PARENT % b"00"


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def send(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)


@pytest.mark.parametrize(
    ("headers", "ratio", "traced"),
    [
        pytest.param(b"", 0.0, False, id="ratio 0"),
        pytest.param(b"", 1.0, True, id="ratio 1"),
        pytest.param(SAMPLED, 0.0, True, id="the client's trace is sampled"),
        pytest.param(NOT_SAMPLED, 1.0, False, id="the client's trace is not"),
        pytest.param(b"traceparent: nonsense\r\n", 0.0, False, id="an invalid context is none"),
    ],
)
def test_the_sender_decides_else_the_ratio(headers: bytes, ratio: float, traced: bool) -> None:
    tracer = RequestTracer(Sink(), ratio=ratio, rng=random.Random(1))
    assert (tracer.begin(headers, 0.0) is not None) is traced


def test_a_ratio_traces_its_share() -> None:
    tracer = RequestTracer(Sink(), ratio=0.1, rng=random.Random(1))
    assert 150 < sum(tracer.begin(b"", 0.0) is not None for _ in range(2_000)) < 250


def test_clients_cannot_have_all_their_requests_traced() -> None:
    tracer = RequestTracer(Sink(), ratio=0.0, rng=random.Random(1))
    for first_s in (100.0, 200.0):
        traced = [tracer.begin(SAMPLED, first_s + n / 1_000) is not None for n in range(3_000)]
        assert sum(traced) == MAX_CLIENT_TRACES_RPS * 4 - 1, "a second's worth at once, then the rate"
    tracer = RequestTracer(Sink(), ratio=0.1, rng=random.Random(1))
    assert 150 < sum(tracer.begin(SAMPLED, 0.0) is not None for _ in range(2_000)) < 260, "then by the ratio"


def test_a_request_has_a_span_with_a_child_for_each_phase() -> None:
    sink = Sink()
    trace = RequestTracer(sink, ratio=1.0, rng=random.Random(1)).begin(SAMPLED + b"tracestate: a=b\r\n", 0.0)
    assert trace is not None
    prefill = trace.begin_leg("fulcrum.prefill", "p1", 10.5)
    trace.end_leg(11.0)
    decode = trace.begin_leg("fulcrum.decode", "d1", 11.0)
    parts = [0.25 if part == "transfer" else 0.0 for part in PARTS]
    trace.end_leg(14.0, first_byte_s=12.0)
    trace.end(14.0, arrival_s=10.0, first_leg_s=10.5, parts=parts, attributes={"fulcrum.tier": "t"})
    spans = {span.name: span for span in sink.spans}
    root = spans["fulcrum.request"]
    assert (root.kind, root.parent_id, root.parent_is_remote) == (SpanKind.SERVER, 0xF067AA0BA902B7, True)
    shown = {
        span.name: (round(span.start_s - root.start_s, 3), round(span.end_s - root.start_s, 3))
        for span in sink.spans
    }
    assert shown == {
        "fulcrum.waiting": (0.0, 0.5),
        "fulcrum.prefill": (0.5, 1.0),
        "fulcrum.decode": (1.0, 4.0),
        "fulcrum.kv_transfer": (1.0, 1.25),
        "fulcrum.request": (0.0, 4.0),
    }
    parents = {name: span.parent_id for name, span in spans.items()}
    assert parents["fulcrum.prefill"] == parents["fulcrum.decode"] == root.span_id
    assert parents["fulcrum.kv_transfer"] == spans["fulcrum.decode"].span_id
    trace_id = b"4bf92f3577b34da6a3ce929d0e0e4736"
    for lines, name in ((prefill, "fulcrum.prefill"), (decode, "fulcrum.decode")):
        expected = b"traceparent: 00-%b-%016x-01\r\ntracestate: a=b\r\n" % (trace_id, spans[name].span_id)
        assert lines == expected


def test_a_leg_in_flight_ends_with_its_request() -> None:
    sink = Sink()
    trace = RequestTracer(sink, ratio=1.0, rng=random.Random(1)).begin(b"", 0.0)
    assert trace is not None
    trace.begin_leg("fulcrum.prefill", "p1", 10.5)
    trace.end(
        12.0, arrival_s=10.0, first_leg_s=10.5, parts=[0.0] * len(PARTS), attributes={}, error="cancelled"
    )
    assert [(span.name, span.error) for span in sink.spans] == [
        ("fulcrum.prefill", "cancelled"),
        ("fulcrum.waiting", ""),
        ("fulcrum.request", "cancelled"),
    ]
