"""Hostile load: 37 kinds of hostile clients and 11 of engines at once, with 50 good requests a second.

    make bench NAME=hostile ARGS="[--minutes N] [--rate R] [--seed N] [--compiled]"

A router, two prefill and two decode instances (simulated engines), one hostile engine of each role. Good
requests are sent for a while without hostile ones, then with them, then without again. Printed: good requests
that failed, their p99 with and without, the processor time of each part, how long the router's own page
`/health` takes (which needs no engine), the router's memory over time and the stalls of its event loop.

Elsewhere hostile clients have machines of their own. Here they share the processors with the router, the
engines and the good clients, and therefore run at the lowest priority: they attack with the processor time
that nobody else uses. How much that was, and how many attacks, is printed. Hostile engines have the usual
priority.

Exit code 1 if a good request failed, if p99 is more than twice that without, if memory grew by more than 5 %
from the middle third of the hostile time to the last, or if a stall (p99.99 of processor time) exceeds 20 ms.
With `--compiled` the router's data path is compiled, as in the image.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import orjson
import uvloop
import yaml

from bench.hostile_kinds import (
    CLIENTS,
    ENGINE_RESPONSES,
    MODEL,
    exchange,
    post,
    run_hostile_clients,
    run_hostile_engines,
)
from fulcrum_cluster.process import die_with_parent
from fulcrum_core.profiles import load_profile
from fulcrum_router.http1.limits import raise_file_limit
from fulcrum_simulator.percentile import percentile
from tests.integration.router.measured_router import (
    MeasuredRouter,
    Stalls,
    read_cpu_s,
    run_measured_router,
)
from tests.integration.simulator.servers import Server, launch, ready
from tools.compiled.build import compile_packages

QUIET_S = 30.0
QUICK = {
    **{"name": "quick", "params": 100_000_000, "weight_bytes": 200_000_000, "handshake_s": 0.01},
    **{"startup_s": 0.0, "t0": 0.003, "b": 2e-5, "c": 5e-10, "d1": 1e-5, "d2": 1e-7},
}
"""Profile of the engines: 50,000 prompt tokens a second, and 3 to 5 ms a token, as on data-centre GPUs also
beside many long answers. Hostile clients have 30 answers of 2,000 tokens generated at any time: to engines
whose steps take 4 µs more for each token in their KV cache (the profile `laptop`) that is an overload, which
slows good requests with an idle router, too.
"""
P99_RATIO_MAX, RSS_GROWTH_MAX, STALL_MAX_S = 2.0, 0.05, 0.020
_DEADLINE_S = 60.0


@dataclass
class Results:
    """Good requests of one phase."""

    latencies_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """One line for the report."""
        p50, p99 = ((percentile(self.latencies_s, share) or 0.0) * 1e3 for share in (50, 99))
        failed = sum(self.failures.values())
        return f"{len(self.latencies_s)} ok, {failed} failed, p50 {p50:.0f} ms, p99 {p99:.0f} ms"


# --- good clients --------------------------------------------------------------------------------------


async def send_good_requests(port: int, rate: float, seconds: float, rng: random.Random) -> Results:
    """Send good requests at their rate, whatever becomes of them; latencies count from the intended time."""
    results, tasks, end_s = Results(), set[asyncio.Task[None]](), time.monotonic() + seconds
    intended_s = time.monotonic()
    while intended_s < end_s:
        await asyncio.sleep(max(0.0, intended_s - time.monotonic()))
        words = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(rng.randint(20, 300)))
        body = {
            "model": MODEL,
            "prompt": words,
            "max_tokens": rng.randint(4, 24),
            "stream": rng.random() < 0.5,
        }
        task = asyncio.create_task(_send_good(port, body, intended_s, results))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        intended_s += rng.expovariate(rate)
    if tasks:
        await asyncio.wait(tasks)
    return results


async def _send_good(port: int, body: dict[str, object], intended_s: float, results: Results) -> None:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            response = await exchange(port, post(orjson.dumps(body), b"connection: close"))
        complete = b"[DONE]" in response if body["stream"] else b'"usage"' in response
        if response.startswith(b"HTTP/1.1 200") and complete:
            results.latencies_s.append(time.monotonic() - intended_s)
        else:
            results.failures[response[9:12].decode() + " " + response[-120:].decode("latin-1")] += 1
    except (OSError, TimeoutError) as error:
        results.failures[type(error).__name__] += 1


# --- the hostile side ----------------------------------------------------------------------------------


class HostileSide:
    """The processes of hostile engines and clients."""

    def __init__(self, seed: int) -> None:
        self.engines, self.clients = (
            subprocess.Popen(
                [sys.executable, __file__, "--hostile", part, "--seed", str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for part in ("engines", "clients")
        )
        assert self.engines.stdout is not None
        self.prefill, self.decode = json.loads(self.engines.stdout.readline())

    def begin(self, port: int) -> None:
        """Let the engines listen, and the clients attack a port."""
        for process in (self.engines, self.clients):
            assert process.stdin is not None
            process.stdin.write(f"{port}\n")
            process.stdin.flush()

    def end(self) -> dict[str, int]:
        """End all; return how many hostile clients and responses there were of each kind."""
        counts: dict[str, int] = {}
        for process in (self.clients, self.engines):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("end\n")
            process.stdin.close()
            counts |= json.loads(process.stdout.readline())
        return counts


# --- the run -------------------------------------------------------------------------------------------


async def measure_memory(router: MeasuredRouter, samples: list[int]) -> None:
    """Sample the router's memory once a second, until cancelled."""
    while True:
        samples.append(router.read_rss_bytes())
        await asyncio.sleep(1.0)


async def ask_for_health(port: int, latencies_s: list[float]) -> None:
    """Ask for the router's health ten times a second, each time on a new connection, until cancelled."""
    while True:
        began_s = time.monotonic()
        await exchange(port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        latencies_s.append(time.monotonic() - began_s)
        await asyncio.sleep(0.1)


@dataclass
class Phase:
    """One phase of the run: its good requests, and what the parts used meanwhile."""

    name: str
    good: Results
    health_s: list[float]
    cores: dict[str, float]
    """Processors used by each part, on average."""

    def describe(self) -> str:
        """Two lines for the report."""
        p50, p99 = ((percentile(self.health_s, share) or 0.0) * 1e3 for share in (50, 99))
        cores = ", ".join(f"{part} {used:.2f}" for part, used in self.cores.items())
        return (
            f"{self.name}: {self.good.describe()}\n"
            f"  /health of the router: p50 {p50:.1f} ms, p99 {p99:.1f} ms; processors used: {cores}"
        )


async def run_phase(
    name: str,
    router: MeasuredRouter,
    parts: Mapping[str, Sequence[int]],
    *,
    rate: float,
    seconds: float,
    rng: random.Random,
) -> Phase:
    """Send good requests for some time; `parts` are the processes whose processor time counts."""
    health_s: list[float] = []
    asking = asyncio.create_task(ask_for_health(router.port, health_s))
    began_s, before = time.monotonic(), {part: sum(map(read_cpu_s, pids)) for part, pids in parts.items()}
    good = await send_good_requests(router.port, rate, seconds, rng)
    took_s = time.monotonic() - began_s
    cores = {part: (sum(map(read_cpu_s, pids)) - before[part]) / took_s for part, pids in parts.items()}
    asking.cancel()
    phase = Phase(name, good, health_s, cores)
    print(phase.describe(), flush=True)
    return phase


@contextlib.contextmanager
def run_engines(count: int) -> Iterator[list[Server]]:
    """Run simulated engines."""
    profile = load_profile("laptop").model_dump() | QUICK
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(yaml.safe_dump(profile))
        file.flush()
        processes = [
            launch(file.name, "--seed", str(number), stderr=subprocess.DEVNULL) for number in range(count)
        ]
        servers = [ready(process) for process in processes]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


async def run(minutes: float, rate: float, seed: int, compiled: Path | None) -> int:
    """Run the three phases and print the report; return the exit code."""
    rng, side = random.Random(seed), HostileSide(seed)
    with run_engines(4) as engines:
        ports = [engine.port for engine in engines]
        prefill, decode = [*ports[:2], side.prefill], [*ports[2:], side.decode]
        async with run_measured_router(prefill, decode, compiled=compiled) as router:
            parts = {
                "router": [router.process.pid],
                "engines": [engine.process.pid for engine in engines],
                "good clients": [os.getpid()],
                "hostile clients": [side.clients.pid],
                "hostile engines": [side.engines.pid],
            }
            send = partial(run_phase, router=router, parts=parts, rate=rate, rng=rng)
            memory: list[int] = []
            before = await send("before", seconds=QUIET_S)
            measuring = asyncio.create_task(measure_memory(router, memory))
            side.begin(router.port)
            during = await send("hostile", seconds=minutes * 60)
            measuring.cancel()
            counts = await asyncio.to_thread(side.end)
            after = await send("after", seconds=QUIET_S)
            router.end()
            return report(before.good, during.good, after.good, memory, counts, router.read_stalls())


def report(
    before: Results,
    during: Results,
    after: Results,
    memory: list[int],
    counts: dict[str, int],
    stalls: Stalls,
) -> int:
    """Print figures; return 1 if one misses its bar."""
    idle = [
        kind for kind in (*CLIENTS, *(f"engine: {name}" for name in ENGINE_RESPONSES)) if not counts.get(kind)
    ]
    print(f"hostile: {sum(counts.values())} of {len(counts)} kinds; never: {idle or 'none'}")
    for message, count in (before.failures + during.failures + after.failures).most_common(10):
        print(f"failed {count}: {message}")
    third = max(1, len(memory) // 3)
    first, last = statistics.median(memory[third : 2 * third] or memory), statistics.median(memory[-third:])
    print(f"memory each tenth: {[size >> 20 for size in memory[:: max(1, len(memory) // 10)]]} MiB")
    print(
        f"event loop: {stalls.ticks} measurements, processor time p99.99 {stalls.cpu_p9999_s * 1e3:.1f} ms,"
        f" max {stalls.cpu_max_s * 1e3:.1f} ms; with other processes {stalls.wall_p9999_s * 1e3:.1f} and"
        f" {stalls.wall_max_s * 1e3:.1f} ms"
    )
    print(stalls.describe_callbacks())
    without_s = percentile(before.latencies_s + after.latencies_s, 99) or 0.0
    ratio = (percentile(during.latencies_s, 99) or 0.0) / without_s
    growth = last / first - 1
    print(f"p99 with / without: {ratio:.2f}; memory, last third / middle third: {growth:+.1%}")
    failed = sum(sum(phase.failures.values()) for phase in (before, during, after))
    met = failed == 0 and ratio <= P99_RATIO_MAX and growth <= RSS_GROWTH_MAX and not idle
    return 0 if met and stalls.cpu_p9999_s <= STALL_MAX_S else 1


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="time with hostile load (%(default)s)")
    parser.add_argument("--rate", type=float, default=50.0, help="good requests a second (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all requests (%(default)s)")
    parser.add_argument("--compiled", action="store_true", help="compile the router's data path first")
    parser.add_argument("--hostile", choices=("engines", "clients"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    raise_file_limit()
    if given.hostile:
        die_with_parent()
        uvloop.run((run_hostile_engines if given.hostile == "engines" else run_hostile_clients)(given.seed))
    else:
        compiled = compile_packages() if given.compiled else None
        sys.exit(uvloop.run(run(given.minutes, given.rate, given.seed, compiled)))


if __name__ == "__main__":
    main()
