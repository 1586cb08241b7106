"""One of several operators leads; a standby takes over when the leader is killed or stops."""

import json
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fulcrum_core.api.meta import parse_time
from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    OperatorProcess,
    operator_starter,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tools.kubernetes.cluster import API_SERVER, Cluster

QUIET_S = 10.0
READS = frozenset({"get", "list", "watch"})

Start = Callable[..., OperatorProcess]


@pytest.fixture
def api(control_plane: Cluster, namespace: str) -> NamespaceClient:
    return NamespaceClient(control_plane, namespace)


@pytest.fixture
def start(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[Start]:
    with operator_starter(control_plane, namespace, tmp_path) as make:
        yield make


@pytest.fixture
def pair(start: Start) -> tuple[OperatorProcess, OperatorProcess]:
    """A leader and a standby."""
    leader = start("op-a")
    wait_until(leader.is_leader, "op-a to lead")
    standby = start("op-b")
    wait_until(lambda: http_get(standby, "readyz") == (200, "ok\n"), "op-b to be a standby")
    return leader, standby


def http_get(operator: OperatorProcess, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/{path}", timeout=5) as response:
        return response.status, response.read().decode()


def metric(operator: OperatorProcess, name: str) -> float:
    line = next(line for line in http_get(operator, "metrics")[1].splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def pods(api: NamespaceClient, count: int) -> Callable[[], bool]:
    return lambda: {f"chat-{number}" for number in range(count)} <= set(api.names("pods"))


def test_one_of_two_operators_leads_and_both_are_healthy(
    pair: tuple[OperatorProcess, OperatorProcess],
) -> None:
    leader, standby = pair
    assert [http_get(one, "healthz") for one in pair] == [(200, "ok\n")] * 2
    assert [metric(one, "fulcrum_operator_leader") for one in (leader, standby)] == [1.0, 0.0]


def test_a_killed_leader_is_replaced_within_fifteen_seconds(
    pair: tuple[OperatorProcess, OperatorProcess], api: NamespaceClient
) -> None:
    api.service(instances=2)
    wait_until(pods(api, 2), "the pods")
    pair[0].kill()
    api.patch("pdservices", "chat", {"spec": {"instances": 3}})
    assert wait_until(pods(api, 3), "the third pod", timeout_s=30) <= 15.0


def test_a_terminated_leader_is_replaced_within_six_seconds(
    pair: tuple[OperatorProcess, OperatorProcess], api: NamespaceClient
) -> None:
    api.service(instances=2)
    wait_until(pods(api, 2), "the pods")
    pair[0].process.send_signal(signal.SIGTERM)
    api.patch("pdservices", "chat", {"spec": {"instances": 3}})
    took_s = wait_until(pods(api, 3), "the third pod")
    assert (pair[0].process.wait(timeout=10), took_s < 6.0) == (0, True)


def test_a_leader_that_cannot_renew_its_lease_exits_with_1(start: Start, control_plane: Cluster) -> None:
    leader = start("op-a")
    wait_until(leader.is_leader, "op-a to lead")
    control_plane.signal_component(API_SERVER, signal.SIGSTOP)
    try:
        code = leader.process.wait(timeout=15)
    finally:
        control_plane.signal_component(API_SERVER, signal.SIGCONT)
    wait_until(lambda: control_plane.get("/readyz")[0] == 200, "the API server")
    assert (code, "lease lost" in leader.log.read_text()) == (1, True)


def test_a_settled_service_causes_no_write_but_to_leases(
    start: Start, api: NamespaceClient, control_plane: Cluster
) -> None:
    address = pick_loopback_address()
    with serve_engines(address):
        wait_until(start().is_leader, "the operator to lead")
        api.service(instances=4)
        wait_until(pods(api, 4), "the pods")
        FakeKubelet(api, address).set_ready("chat-0", "chat-1", "chat-2", "chat-3")
        wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve")
        wait_until(
            lambda: api.get("pdservices", "chat")["status"]["ready"] == "4/4", "the count", timeout_s=20
        )
        settled = time.time() + 1.0
        wait_until(lambda: time.time() >= settled + QUIET_S, "a quiet time", timeout_s=30)
    assert writes(control_plane, api.name, 0.0, settled) != {}, "the audit log shows writes"
    assert writes(control_plane, api.name, settled, settled + QUIET_S) == {}


def writes(cluster: Cluster, namespace: str, since_s: float, until_s: float) -> dict[tuple[str, str], int]:
    """Number of writes of operators in a namespace and a time span by verb and kind, without Leases."""
    found: Counter[tuple[str, str]] = Counter()
    for line in cluster.audit_log.read_text().splitlines():
        entry = json.loads(line)
        at, what = entry["requestReceivedTimestamp"], entry.get("objectRef", {})
        ours = what.get("namespace") == namespace and "fulcrum-operator" in entry.get("userAgent", "")
        if ours and entry["verb"] not in READS and what.get("resource") != "leases":
            found[entry["verb"], what["resource"]] += since_s <= parse_time(at) < until_s
    return {key: count for key, count in found.items() if count}
