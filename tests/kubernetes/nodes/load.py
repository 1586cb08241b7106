"""Constant load on a service from one node; results are grouped by time window."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.service import MODEL, DeployedService
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.machine import Machine
from tools.kubernetes.waiting import wait_for


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a load."""

    rate_rps: float = 50.0
    input_tokens: int = 48
    output_tokens: int = 6
    tier: str = ""
    tenant: str = ""


STEADY = Traffic()
"""The constant load of most scenarios."""
LOAD_PROGRAM = "tests.kubernetes.nodes.load_program"


@dataclass(slots=True)
class LoadWindow:
    """Results of the requests offered during one step of a scenario; empty until the window has closed."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.figures[name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        counts = " ".join(
            f"{key}={self.figures[key]}" for key in ("offered", "ok", "refused", "failed", "broken", "wrong")
        )
        ttft = self.figures["latencies"]["ttft_p99_s"]
        why = f"; {reasons}" if (reasons := self.figures["reasons"]) else ""
        silent = self.figures["broken_silently"]
        return f"{self.name}: {counts} silent={silent} ttft_p99={ttft or -1:.3f}s{why}"

    def all_succeeded(self) -> bool:
        """Whether each offered request got its whole, right response."""
        return bool(self.figures["ok"] == self.figures["offered"] > 0)

    def outage_s(self) -> float:
        """Seconds between the first and the last request without a right response; 0 if there is none."""
        offered = [float(failure["offered_s"]) for failure in self.figures["failures"]]
        return max(offered) - min(offered) if offered else 0.0


class Load:
    """The load process on a node; `window` collects the results of one step of a scenario."""

    def __init__(
        self, node: Machine, *, host: str, seed: int, report: RecordMeasurement, traffic: Traffic
    ) -> None:
        self._report = report
        command = [
            sys.executable,
            "-m",
            LOAD_PROGRAM,
            f"--host={host}",
            f"--model={MODEL}",
            f"--rate={traffic.rate_rps}",
            f"--input-tokens={traffic.input_tokens}",
            f"--output-tokens={traffic.output_tokens}",
            f"--tier={traffic.tier}",
            f"--tenant={traffic.tenant}",
        ]
        self._process = subprocess.Popen(
            node.build_command("env", "--chdir", ROOT, *command, f"--seed={seed}"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        self._windows: dict[str, dict[str, Any]] = {}
        self._window_count = 0
        self._reader = threading.Thread(target=self._read_windows, daemon=True)
        self._reader.start()
        wait_for(lambda: "ready" in self._windows, "the load to start", timeout_s=60)

    @contextlib.contextmanager
    def window(self, name: str, *, timeout_s: float = 60.0) -> Iterator[LoadWindow]:
        """Collect the requests offered while the block runs; the figures are set after the block."""
        key = self._open_window(name)
        window = LoadWindow(name)
        try:
            yield window
        finally:
            self._open_window("between")
            wait_for(lambda: key in self._windows, f"the responses of {name}", timeout_s=timeout_s)
            window.figures = self._windows[key]
            self._report(str(window))

    def stop(self) -> None:
        """End the load and wait for the requests in flight."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _open_window(self, name: str) -> str:
        self._window_count += 1
        key = f"{self._window_count} {name}"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{key}\n")
        self._process.stdin.flush()
        return key

    def _read_windows(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            window = json.loads(line)
            self._windows[window["window"]] = window


@contextlib.contextmanager
def run_load(
    cluster: Cluster,
    service: DeployedService,
    seed: int,
    *,
    node: str,
    report: RecordMeasurement,
    traffic: Traffic = STEADY,
) -> Iterator[Load]:
    """Run a constant load on the service from this node, once the service responds."""
    address = service.address()
    running = Load(cluster.nodes[node], host=address, seed=seed, report=report, traffic=traffic)
    try:
        with running.window("warming up"):
            wait_for(lambda: service.receives_first_token(node), "a first token", timeout_s=30)
        yield running
    finally:
        running.stop()
