"""Where spans go is read from OpenTelemetry's own environment variables."""

import random
import socket
import time
from collections.abc import Sequence
from contextlib import closing

import pytest

from fulcrum_cluster.tracing import OtlpSender, RootSpans, TraceSettings, read_trace_settings
from fulcrum_core.errors import InvalidInput
from fulcrum_core.spans import Span

ENDPOINT, RATIO = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG"


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        pytest.param({}, None, id="off"),
        pytest.param({RATIO: "0.5"}, None, id="no receiver"),
        pytest.param({ENDPOINT: "http://a:4318/"}, TraceSettings("http://a:4318", 0.01), id="default ratio"),
        pytest.param({ENDPOINT: "http://a", RATIO: "0"}, TraceSettings("http://a", 0.0), id="ratio 0"),
    ],
)
def test_settings_are_read(environment: dict[str, str], settings: TraceSettings | None) -> None:
    assert read_trace_settings(environment) == settings


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({ENDPOINT: "a:4317"}, id="no URL"),
        pytest.param({ENDPOINT: "http://a", RATIO: "much"}, id="no number"),
        pytest.param({ENDPOINT: "http://a", RATIO: "1.5"}, id="more than all"),
        pytest.param({ENDPOINT: "http://a", RATIO: "nan"}, id="NaN"),
    ],
)
def test_invalid_settings_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="OTEL_"):
        read_trace_settings(environment)


def test_routine_spans_are_sent_by_the_ratio_and_others_always() -> None:
    sent: list[Span] = []

    class Sink:
        def send(self, spans: Sequence[Span]) -> None:
            sent.extend(spans)

    spans = RootSpans(Sink(), ratio=0.0, rng=random.Random(1))
    for name, error, routine in (("a", "", True), ("b", "error", True), ("c", "", False)):
        spans.send(name, start_s=1.0, end_s=2.0, attributes={}, error=error, routine=routine)
    assert [span.name for span in sent] == ["b", "c"]


def test_a_receiver_that_is_away_does_not_delay_the_end() -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        sender = OtlpSender("fulcrum-router", TraceSettings(endpoint, 1.0), instance="r")
        sender.send([Span("a", 1, n, 0, 1.0, 2.0) for n in range(1, 1_025)])
        began_s = time.monotonic()
        sender.close(within_s=0.1)
        assert time.monotonic() - began_s < 1.0
