"""A router as a process, with its memory and the stalls of its event loop measured, for `bench/`."""

import asyncio
import contextlib
import heapq
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from fulcrum_cluster.process import die_with_parent
from fulcrum_router.data_path.downstream import ClientConnection, ClientServer
from fulcrum_router.fleet.instances import Fleet
from fulcrum_router.http1.inline_task import Turns
from fulcrum_router.http1.upstream import EngineConnection
from fulcrum_router.options import parse_options
from fulcrum_router.router import Router
from fulcrum_router.server import is_compiled, serve

TICK_S = 0.001
"""Pause between two measurements of the event loop."""
_LONGEST_KEPT = 1_000
"""Durations kept: enough for p99.99 of ten million ticks, which are about three hours."""


def read_cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds; exact, unlike /proc/PID/stat."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@dataclass
class Stalls:
    """How late the timers of the event loop ran, in seconds."""

    ticks: int
    """Measurements, `TICK_S` after one another."""
    cpu_p9999_s: float
    """Processor time of the loop's thread between two ticks: what other processes take is not in it."""
    cpu_max_s: float
    wall_p9999_s: float
    wall_max_s: float
    callbacks: dict[str, tuple[float, float]]
    """Processor time of single callbacks by kind: p99.99 and longest. A turn of the event loop has many: all
    that arrived while the process waited for a processor."""

    def describe_callbacks(self) -> str:
        """One line for a report."""
        kinds = (f"{kind} {p * 1e3:.1f} and {most * 1e3:.1f}" for kind, (p, most) in self.callbacks.items())
        shown = ", ".join(kinds) or "not measured, since they are compiled"
        return f"single callbacks, p99.99 and longest, ms: {shown}"


@dataclass
class MeasuredRouter:
    """A running router."""

    process: subprocess.Popen[str]
    port: int
    metrics_port: int
    folder: Path

    def read_rss_bytes(self) -> int:
        """Read the resident memory of the process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def keep_stalls(self) -> None:
        """Save the stalls so far: `read_stalls` then returns these."""
        self.process.send_signal(signal.SIGUSR1)

    def read_stalls(self) -> Stalls:
        """Read the stalls until `keep_stalls` or the end, once the router has ended."""
        kept, all_stalls = self.folder / "kept.json", self.folder / "stalls.json"
        return Stalls(**json.loads((kept if kept.exists() else all_stalls).read_text(encoding="utf-8")))

    def read_longest_stall_s(self) -> float:
        """Read the longest stall of all, in seconds of processor time, once the router has ended."""
        longest_s: float = json.loads((self.folder / "stalls.json").read_text(encoding="utf-8"))["cpu_max_s"]
        return longest_s

    def end(self) -> None:
        """End the router and wait for it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


@contextlib.asynccontextmanager
async def run_measured_router(
    prefill: Sequence[int], decode: Sequence[int], *, compiled: Path | None = None
) -> AsyncIterator[MeasuredRouter]:
    """Run a router over engines at these ports of this machine.

    `compiled` is a folder with both packages compiled, which then run instead: without times of callbacks.
    """
    with tempfile.TemporaryDirectory() as folder:
        static = [f"{role}=" + ",".join(f"127.0.0.1:{port}" for port in ports)
                  for role, ports in (("prefill", prefill), ("decode", decode)) if ports]  # fmt: skip
        command = [sys.executable, "-m", __name__, folder, "--service", "tiny", "--static", *static]
        environment = {**os.environ, "PYTHONPATH": str(compiled)} if compiled else None
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise RuntimeError((Path(folder) / "log").read_text(encoding="utf-8")[-2_000:])
        ports = json.loads(line)
        router = MeasuredRouter(process, ports["port"], ports["metrics_port"], Path(folder))
        try:
            yield router
        finally:
            if process.poll() is None:
                router.end()
            process.stdout.close()


class _Longest:
    """The longest of many durations: as many as p99.99 needs, so that their memory does not grow."""

    def __init__(self) -> None:
        self.count, self._heap = 0, list[float]()

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self.count += 1
        if len(self._heap) < _LONGEST_KEPT:
            heapq.heappush(self._heap, duration_s)
        elif duration_s > self._heap[0]:
            heapq.heapreplace(self._heap, duration_s)

    def p9999_s(self) -> float:
        """Duration that one in ten thousand exceeds."""
        longest = sorted(self._heap, reverse=True)
        return longest[min(len(longest) - 1, int(0.0001 * self.count))]

    def max_s(self) -> float:
        """The longest duration."""
        return max(self._heap)


def _measure(cpu: _Longest, wall: _Longest) -> None:
    """Add processor time and lateness of each tick of the event loop from now on."""
    loop = asyncio.get_running_loop()

    def tick(wall_s: float, cpu_s: float) -> None:
        cpu.add(time.thread_time() - cpu_s)
        wall.add(time.monotonic() - wall_s - TICK_S)
        loop.call_later(TICK_S, tick, time.monotonic(), time.thread_time())

    loop.call_later(TICK_S, tick, time.monotonic(), time.thread_time())


_CALLBACKS: dict[str, tuple[type, str]] = {
    "client's data": (ClientConnection, "data_received"),
    "client's next turn": (ClientConnection, "_serve_again"),
    "client leaves": (ClientConnection, "connection_lost"),
    "engine's data": (EngineConnection, "data_received"),
    "engine leaves": (EngineConnection, "connection_lost"),
    "turn of a long body": (Turns, "_give"),
    "time-outs of legs": (Fleet, "enforce_timeouts"),
    "time-outs of clients": (ClientServer, "enforce_timeouts"),
    "tick": (Router, "tick"),
}


def _measure_callbacks() -> dict[str, _Longest]:
    """Measure each callback of these kinds from now on; none if they are compiled, and cannot be replaced."""
    if is_compiled():
        return {}
    longest = {kind: _Longest() for kind in _CALLBACKS}
    for kind, (owner, name) in _CALLBACKS.items():
        setattr(owner, name, _measured(getattr(owner, name), longest[kind]))
    return longest


def _measured(function: Callable[..., object], longest: _Longest) -> Callable[..., object]:
    def measured(*arguments: object) -> object:
        began_s = time.thread_time()
        try:
            return function(*arguments)
        finally:
            longest.add(time.thread_time() - began_s)

    return measured


async def _run(folder: Path, arguments: Sequence[str]) -> None:
    stopped, cpu, wall, callbacks = asyncio.Event(), _Longest(), _Longest(), _measure_callbacks()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)

    def announce(**ports: int) -> None:
        print(json.dumps(ports), flush=True)
        _measure(cpu, wall)

    def save(name: str) -> None:
        stalls = {"ticks": cpu.count, "cpu_p9999_s": cpu.p9999_s(), "cpu_max_s": cpu.max_s(),
                  "wall_p9999_s": wall.p9999_s(), "wall_max_s": wall.max_s(),
                  "callbacks": {kind: (each.p9999_s(), each.max_s()) for kind, each in callbacks.items()
                                if each.count}}  # fmt: skip
        (folder / name).write_text(json.dumps(stalls), encoding="utf-8")

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, save, "kept.json")
    await serve(parse_options(arguments), stopped, announce=announce)
    save("stalls.json")


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(_run(Path(sys.argv[1]), sys.argv[2:]))
