"""A busy engine responds to the kubelet's probes: load is no reason for a restart."""

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from fulcrum_core.api import PDInstance
from fulcrum_core.profiles import load_profile
from fulcrum_operator.manifests.engine_pod import engine_pod
from tests.conftest import RecordMeasurement
from tests.integration.simulator.servers import Client, Server, launch, ready
from tests.unit.operator.builders import SETTINGS, service

STREAMS, TOKENS = 96, 150
PROBES_PER_S = 20.0


def read_probe_timeout_s() -> float:
    """Time until a liveness probe of the quickest engine fails: the shortest of all."""
    meta = {"name": "chat-0", "namespace": "default", "uid": "u"}
    spec = {"service": "chat", "pool": "chat-flex", "model": "m", "engine": {"type": "Simulated"}}
    made = engine_pod(
        PDInstance.model_validate({"metadata": meta, "spec": spec}), service(), SETTINGS, startup_s=0.0
    )
    return float(made["spec"]["containers"][0]["livenessProbe"]["timeoutSeconds"])


@dataclass
class Prober:
    """Probes a server as the kubelet does, with a new connection each, in a thread of its own."""

    port: int
    timeout_s: float
    durations_s: list[float] = field(default_factory=list)
    failed: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        stopped = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopped,))
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(1 / PROBES_PER_S):
            began_s = time.monotonic()
            self.failed += self._probe() != 200
            self.durations_s.append(time.monotonic() - began_s)

    def _probe(self) -> int:
        with (
            suppress(OSError),
            closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)) as connection,
        ):
            connection.request("GET", "/health")
            return connection.getresponse().status
        return 0


@pytest.fixture
def busy_server(tmp_path: Path) -> Iterator[Server]:
    """A server with room for all streams at once, and with steps so short that it never waits."""
    profile = load_profile("laptop").model_dump() | {
        "name": "busy",
        "t0": 0.001,
        "d1": 1e-5,
        "weight_bytes": 100_000_000,
        "max_seqs": STREAMS,
        "kv_capacity_tokens": 2 * STREAMS * TOKENS,
        "startup_s": 0.0,
    }
    path = tmp_path / "busy.yaml"
    path.write_text(yaml.safe_dump(profile))
    server = ready(launch(path))
    yield server
    server.kill()


async def test_no_liveness_probe_fails_while_the_engine_is_under_full_load(
    client: Client, busy_server: Server, record_measurement: RecordMeasurement
) -> None:
    server = busy_server
    prober = Prober(server.port, read_probe_timeout_s())

    async def stream(server: Server, number: int) -> int:
        body = {"prompt": f"prompt {number}", "max_tokens": TOKENS}
        return len(await client.stream(server, "/v1/completions", body))

    with prober.running():
        events = await asyncio.gather(*(stream(server, number) for number in range(STREAMS)))
    record_measurement(
        f"probes of an engine with {STREAMS} streams: the slowest of {len(prober.durations_s)} took "
        f"{max(prober.durations_s):.2f} s (limit {prober.timeout_s:g} s)"
    )
    assert set(events) == {TOKENS + 1}
    assert (prober.failed, len(prober.durations_s) >= PROBES_PER_S) == (0, True)
