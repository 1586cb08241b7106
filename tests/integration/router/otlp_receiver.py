"""An OTLP receiver that is not ours: rotel, which forwards what it accepts to a sink in the test's process.

The tests are left out where rotel has no program.
"""

import gzip
import http.server
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fulcrum_cli.local.engines import find_free_ports

rotel = pytest.importorskip("rotel")
_AGENT = Path(rotel.__file__).parent / "rotel-agent"


@dataclass
class Received:
    """A span as it was received."""

    program: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]
    failed: bool


@dataclass
class OtlpReceiver:
    """The receiver's URL, and the spans that it has accepted."""

    url: str
    spans: list[Received] = field(default_factory=list)

    def find(self, name: str) -> list[Received]:
        """The spans of that name."""
        return [span for span in self.spans if span.name == name]


def _make_handler(receiver: OtlpReceiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.spans.extend(_read_spans(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _read_spans(body: bytes) -> Iterator[Received]:
    for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
        named = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
        for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
            yield Received(
                named["service.name"],
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                {
                    a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value")
                    for a in span.attributes
                },
                span.status.code == 2,
            )


@contextmanager
def run_otlp_receiver() -> Iterator[OtlpReceiver]:
    """Run a receiver; the test is left out where rotel's program does not run."""
    (port,) = find_free_ports("127.0.0.1", 1)
    receiver = OtlpReceiver(f"http://127.0.0.1:{port}")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(receiver)) as sink:
        thread = threading.Thread(target=sink.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        command = [str(_AGENT), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}", "--disable-batching"]
        command += ["--otlp-grpc-endpoint", "127.0.0.1:0", "--exporter", "otlp"]
        command += ["--otlp-exporter-protocol", "http"]
        command += ["--otlp-exporter-endpoint", f"http://127.0.0.1:{sink.server_port}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as agent:
            try:
                yield receiver
            finally:
                agent.terminate()
                _, errors = agent.communicate()
                sink.shutdown()
                thread.join()
        if agent.returncode == 127:
            pytest.skip(f"rotel does not run here: {errors.decode()}")
