"""The operator with many instances, on a real API server and no nodes: memory, CPU, writes, how soon it acts.

One control plane, one operator, `--services` services of together `--instances` instances whose pods this
program declares ready. Then nothing happens for `--quiet` seconds; then changes are made, one by one.

    python bench/operator_scale.py [--instances 200] [--services 10] [--quiet 60] [--changes 10]

Needs Linux and root, like the Kubernetes levels of the tests. Exit code 1 if a bar is missed: 200 MB, 2 % of
a core, no write but to Leases in the quiet time, one second from a change to what the operator makes of it.
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulcrum_core.api.meta import parse_time
from tests.kubernetes.clusters import AUDIT, apply_crds, fresh_namespace
from tests.kubernetes.control_plane.operators import (
    Kubelet,
    OperatorProcess,
    Space,
    engines_at,
    operators,
    some_address,
    until,
)
from tools.kubernetes.cluster import Cluster

RSS_BAR_MB = 200.0
CPU_BAR = 0.02
ACT_BAR_S = 1.0
READS = frozenset({"get", "list", "watch"})


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A control plane of its own."""
    with tempfile.TemporaryDirectory(prefix="operator-scale-") as folder:
        made = Cluster(Path(folder), audit=AUDIT)
        made.start(0)
        try:
            apply_crds(made)
            yield made
        finally:
            made.stop()


def main() -> int:
    """Prints the figures; returns the exit code."""
    args = _parser().parse_args()
    with (
        cluster() as control_plane,
        fresh_namespace(control_plane) as namespace,
        tempfile.TemporaryDirectory() as logs,
        operators(control_plane, namespace, Path(logs)) as start,
    ):
        figures = measured(Space(control_plane, namespace), start(), args)
    print(json.dumps(figures, indent=2))
    return int(not held(figures))


def measured(space: Space, operator: OperatorProcess, args: argparse.Namespace) -> dict[str, Any]:
    """Bring everything up, be quiet, make changes."""
    names = [f"s{number}" for number in range(args.services)]
    address = some_address()
    with engines_at(address):
        until(operator.leads, "the operator to lead")
        up_s = _up(space, Kubelet(space, address), operator, names, args.instances)
        quiet = _quiet(space, operator, args.quiet)
        took_s = sorted(_change(space, names[number % len(names)]) for number in range(args.changes))
    return {
        "instances": args.instances,
        "services": args.services,
        "up_s": round(up_s, 1),
        **quiet,
        "rss_after_mb": round(operator.rss_mb(), 1),
        "act_median_s": round(took_s[len(took_s) // 2], 3),
        "act_max_s": round(took_s[-1], 3),
    }


def held(figures: dict[str, Any]) -> bool:
    """Whether every bar is held."""
    return bool(
        figures["rss_after_mb"] <= RSS_BAR_MB
        and figures["quiet_cpu"] <= CPU_BAR
        and not figures["quiet_writes"]
        and figures["act_max_s"] <= ACT_BAR_S
    )


def _up(space: Space, kubelet: Kubelet, operator: OperatorProcess, names: list[str], instances: int) -> float:
    """All services, with all instances serving; returns the seconds that took."""
    began_s = time.monotonic()
    shares = [instances // len(names) + (index < instances % len(names)) for index in range(len(names))]
    for name, share in zip(names, shares, strict=True):
        space.service(name, instances=share)
    done: set[str] = set()

    def serve() -> bool:
        if operator.process.poll() is not None:
            sys.exit(f"error: the operator ended: {operator.log.read_text().splitlines()[-1]}")
        time.sleep(0.5)  # to read 200 pods costs more than to look after them
        for pod in set(space.names("pods")) - done:
            if pod.rpartition("-")[2].isdigit():
                kubelet.ready(pod)
                done.add(pod)
        phases = space.phases()
        return len(phases) == instances and set(phases.values()) == {"Serving"}

    until(serve, "all instances to serve", timeout_s=300)
    until(lambda: all(_settled(space, *pair) for pair in zip(names, shares, strict=True)), "the statuses")
    return time.monotonic() - began_s


def _settled(space: Space, name: str, share: int) -> bool:
    return bool(space.get("pdservices", name)["status"]["ready"] == f"{share}/{share}")


def _quiet(space: Space, operator: OperatorProcess, quiet_s: float) -> dict[str, Any]:
    """What the operator uses and writes while nothing happens."""
    time.sleep(12.0)  # a status may be put off for ten seconds
    began, cpu_s = time.time(), operator.cpu_s()
    time.sleep(quiet_s)
    used = (operator.cpu_s() - cpu_s) / quiet_s
    found = writes(space.cluster, space.name, began, began + quiet_s)
    return {
        "quiet_s": quiet_s,
        "quiet_cpu": round(used, 4),
        "quiet_rss_mb": round(operator.rss_mb(), 1),
        "quiet_writes": {" ".join(key): count for key, count in found.items()},
    }


def _change(space: Space, service: str) -> float:
    """Flip an instance; returns the seconds from the answer to that until the operator has written for it."""
    instance = f"{service}-0"
    now = space.get("pdassignments", service)["spec"]["roles"][instance]["role"]
    role = "Decode" if now == "Prefill" else "Prefill"
    entry = {"role": role, "since": "2026-01-01T00:00:00Z", "by": "Person", "reason": secrets.token_hex(4)}
    space.patch("pdassignments", service, {"spec": {"roles": {instance: entry}}})
    return until(
        lambda: space.get("pdinstances", instance)["status"]["role"] == role, f"{instance} to be {role}"
    )


def writes(cluster: Cluster, namespace: str, since_s: float, until_s: float) -> Counter[tuple[str, str]]:
    """Writes of operators in a namespace in some seconds, by verb and kind, but for Leases."""
    found: Counter[tuple[str, str]] = Counter()
    for line in cluster.audit_log.read_text().splitlines():
        entry = json.loads(line)
        at, what = parse_time(entry["requestReceivedTimestamp"]), entry.get("objectRef", {})
        ours = what.get("namespace") == namespace and "fulcrum-operator" in entry.get("userAgent", "")
        if (
            ours
            and entry["verb"] not in READS
            and what.get("resource") != "leases"
            and since_s <= at < until_s
        ):
            found[entry["verb"], what["resource"]] += 1
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--services", type=int, default=10)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds")
    parser.add_argument("--changes", type=int, default=10)
    return parser


if __name__ == "__main__":
    sys.exit(main())
