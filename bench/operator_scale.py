"""The operator with many instances on a real API server without nodes: memory, CPU, writes, reaction time.

One control plane, one operator, and `--services` services with `--instances` instances in total, whose pods
this program sets ready. After `--quiet` seconds without a change it makes changes, one by one.

    make bench NAME=operator_scale ARGS="[--instances 200] [--services 10] [--quiet 60] [--changes 10]"
    make bench NAME=operator_scale ARGS="--instances 1000 --services 20 --bars 400,0.10,2"

Needs Linux and root, like the Kubernetes levels of the tests. Exit code 1 if a bar is missed: `--bars` are
megabytes, the share of a core, and seconds from a change to the operator's write (default 200,0.02,1). In
the quiet time nothing but Leases may be written.
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fulcrum_core.api.meta import parse_time
from fulcrum_operator.controller.context import STATUS_INTERVAL_S
from tests.kubernetes.clusters import run_control_plane, temporary_namespace
from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    OperatorProcess,
    operator_starter,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

READS = frozenset({"get", "list", "watch"})


def main() -> int:
    """Print the figures; return the exit code."""
    args = _parser().parse_args()
    with (
        run_control_plane() as control_plane,
        temporary_namespace(control_plane) as namespace,
        tempfile.TemporaryDirectory() as logs,
        operator_starter(control_plane, namespace, Path(logs)) as start,
    ):
        figures = measure_all(NamespaceClient(control_plane, namespace), start(), args)
    print(json.dumps(figures, indent=2))
    return int(not meets_limits(figures, *args.bars))


def measure_all(api: NamespaceClient, operator: OperatorProcess, args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, wait without a change, make changes; return the figures."""
    names = [f"s{number}" for number in range(args.services)]
    address = pick_loopback_address()
    with serve_engines(address):
        wait_until(operator.is_leader, "the operator to lead")
        began = time.time()
        startup_s = _start_services(api, FakeKubelet(api, address), operator, names, args.instances)
        startup_writes = count_writes(api.cluster, api.name, began, time.time())
        quiet = _measure_quiet_time(api, operator, args.quiet)
        took_s = sorted(_measure_change_s(api, names[number % len(names)]) for number in range(args.changes))
    return {
        "instances": args.instances,
        "services": args.services,
        "startup_s": round(startup_s, 1),
        "startup_writes": {" ".join(key): count for key, count in sorted(startup_writes.items())},
        **quiet,
        "rss_after_mb": round(operator.rss_mb(), 1),
        "action_median_s": round(took_s[len(took_s) // 2], 3),
        "action_max_s": round(took_s[-1], 3),
    }


def meets_limits(figures: dict[str, Any], rss_max_mb: float, cpu_max: float, action_max_s: float) -> bool:
    """Whether all bars are met."""
    return bool(
        figures["rss_after_mb"] <= rss_max_mb
        and figures["quiet_cpu"] <= cpu_max
        and not figures["quiet_writes"]
        and figures["action_max_s"] <= action_max_s
    )


def _start_services(
    api: NamespaceClient, kubelet: FakeKubelet, operator: OperatorProcess, names: list[str], instances: int
) -> float:
    """Create all services; return the seconds until all instances serve."""
    began_s = time.monotonic()
    shares = [instances // len(names) + (index < instances % len(names)) for index in range(len(names))]
    for name, share in zip(names, shares, strict=True):
        api.service(name, instances=share)
    done: set[str] = set()

    def serve() -> bool:
        if operator.process.poll() is not None:
            sys.exit(f"error: the operator ended: {operator.log.read_text().splitlines()[-1]}")
        for pod in set(api.names("pods")) - done:
            if pod.rpartition("-")[2].isdigit():
                kubelet.set_ready(pod)
                done.add(pod)
        phases = api.phases()
        return len(phases) == instances and set(phases.values()) == {"Serving"}

    # Reading 200 pods takes more CPU than reconciling them: poll rarely.
    wait_for(serve, "all instances to serve", timeout_s=60 + instances, interval_s=0.5)
    wait_until(
        lambda: all(_has_settled_status(api, *pair) for pair in zip(names, shares, strict=True)),
        "the statuses",
    )
    return time.monotonic() - began_s


def _has_settled_status(api: NamespaceClient, name: str, share: int) -> bool:
    return bool(api.get("pdservices", name)["status"]["ready"] == f"{share}/{share}")


def _measure_quiet_time(api: NamespaceClient, operator: OperatorProcess, quiet_s: float) -> dict[str, Any]:
    """Return what the operator uses and writes while nothing changes."""
    time.sleep(STATUS_INTERVAL_S + 2)  # the last status update may be delayed by the interval
    began, cpu_s = time.time(), operator.cpu_s()
    time.sleep(quiet_s)
    used = (operator.cpu_s() - cpu_s) / quiet_s
    found = count_writes(api.cluster, api.name, began, began + quiet_s)
    return {
        "quiet_s": quiet_s,
        "quiet_cpu": round(used, 4),
        "quiet_rss_mb": round(operator.rss_mb(), 1),
        "quiet_writes": {" ".join(key): count for key, count in found.items()},
    }


def _measure_change_s(api: NamespaceClient, service: str) -> float:
    """Flip an instance; return the seconds from the API server's response to the operator's write."""
    instance = f"{service}-0"
    now = api.get("pdassignments", service)["spec"]["roles"][instance]["role"]
    role = "Decode" if now == "Prefill" else "Prefill"
    entry = {"role": role, "since": "2026-01-01T00:00:00Z", "by": "Person", "reason": secrets.token_hex(4)}
    api.patch("pdassignments", service, {"spec": {"roles": {instance: entry}}})
    return wait_until(
        lambda: api.get("pdinstances", instance)["status"]["role"] == role, f"{instance} to be {role}"
    )


def count_writes(
    cluster: Cluster, namespace: str, since_s: float, until_s: float
) -> Counter[tuple[str, str]]:
    """Count the operators' writes in a namespace by verb and kind, except Leases."""
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


def _parse_bars(text: str) -> tuple[float, float, float]:
    rss_mb, cpu, action_s = map(float, text.split(","))
    return rss_mb, cpu, action_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--services", type=int, default=10)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds")
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--bars", type=_parse_bars, default=(200.0, 0.02, 1.0), help="MB,CORES,SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
