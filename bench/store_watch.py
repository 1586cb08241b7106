"""Latency of the store between processes, from a conditional write to the change parsed by a watcher.

Three processes: the store on a unix socket, a writer that flips one role of an assignment of eight
instances, a watcher that reads the change and parses it. This is the store's share of a flip.

    python bench/store_watch.py [--flips N]

Exit code 1 if the 99th percentile of decision → watcher is above 10 ms.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from fulcrum_cluster.client import open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.process import announce_ready, die_with_parent
from fulcrum_cluster.store_server import serve_store
from fulcrum_core.api import ObjectMeta, PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.meta import format_time
from fulcrum_core.values import Actor, Role

P99_MAX_MS = 10.0
NAMESPACE = "default"


async def run_store(path: Path) -> None:
    """Serve the store until the process ends."""
    async with serve_store(MemoryStore(SystemClock()), path):
        announce_ready()
        await asyncio.Event().wait()


async def run_watcher(path: Path, flips: int) -> None:
    """Watch the store; print the time at which each change was parsed."""
    arrived_s: list[float] = []
    async with open_store(f"unix:{path}") as store:
        since = (await store.list(PDAssignment, namespace=NAMESPACE)).resource_version
        announce_ready()
        async for event in store.watch(PDAssignment, namespace=NAMESPACE, since=since):
            if event.object is not None:
                arrived_s.append(time.time())
            if len(arrived_s) == flips:
                break
    print("\n".join(map(repr, arrived_s)))


async def write_flips(path: Path, flips: int) -> tuple[list[float], list[float]]:
    """Return the times of each flip's decision and of the response to its write."""
    decided_s, written_s = [], []
    async with open_store(f"unix:{path}") as store:
        current = await store.get(PDAssignment, "chat", namespace=NAMESPACE)
        for flip in range(flips):
            decided_s.append(time.time())
            role = Role.DECODE if flip % 2 == 0 else Role.PREFILL
            patch = {"spec": {"roles": {"chat-0": {"role": role, "since": format_time(decided_s[-1])}}}}
            version = current.metadata.resource_version
            current = await store.patch(
                PDAssignment, "chat", patch, namespace=NAMESPACE, resource_version=version
            )
            written_s.append(time.time())
            await asyncio.sleep(0.005)
    return decided_s, written_s


async def create_assignment(path: Path) -> None:
    """Return an assignment of eight instances."""
    role = RoleAssignment(role=Role.PREFILL, since=time.time(), by=Actor.OPERATOR, reason="as found" * 12)
    spec = PDAssignmentSpec(service="chat", roles={f"chat-{index}": role for index in range(8)})
    async with open_store(f"unix:{path}") as store:
        await store.create(PDAssignment(metadata=ObjectMeta(name="chat"), spec=spec))


def start_process(part: str, path: Path, flips: int) -> subprocess.Popen[str]:
    """Start another process of this measurement; return it when it is ready."""
    command = [sys.executable, __file__, "--part", part, "--socket", str(path), "--flips", str(flips)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def print_quantiles(what: str, values_s: list[float]) -> float:
    """Print the quantiles; return the 99th percentile in milliseconds."""
    ordered = sorted(value * 1000 for value in values_s)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    print(f"{what:24} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   max {ordered[-1]:6.2f} ms   n {len(ordered)}")
    return p99


def measure(flips: int) -> int:
    """Run the three processes and print their figures; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sock"
        server = start_process("serve", path, flips)
        try:
            uvloop.run(create_assignment(path))
            watcher = start_process("watch", path, flips)
            decided_s, written_s = uvloop.run(write_flips(path, flips))
            arrived_s = [float(line) for line in watcher.communicate(timeout=60)[0].split()]
        finally:
            server.terminate()
            server.communicate()
    pairs = zip(decided_s, written_s, strict=True)
    print_quantiles("decision -> answered", [answered - decided for decided, answered in pairs])
    arrivals = zip(decided_s, arrived_s, strict=True)
    p99_ms = print_quantiles("decision -> watcher", [arrived - decided for decided, arrived in arrivals])
    return 0 if p99_ms <= P99_MAX_MS else 1


def main() -> int:
    """Run one part, or the whole measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--part", choices=["serve", "watch"], help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is None:
        return measure(arguments.flips)
    die_with_parent()
    part = (
        run_store(arguments.socket)
        if arguments.part == "serve"
        else run_watcher(arguments.socket, arguments.flips)
    )
    uvloop.run(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
