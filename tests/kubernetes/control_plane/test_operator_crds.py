"""The operator waits for its CRDs, and watches them when they are applied later or once more."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.kubernetes.clusters import apply_crds
from tests.kubernetes.control_plane.operator_process import (
    NamespaceClient,
    OperatorProcess,
    operator_starter,
    wait_until,
)
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster

WATCHED_WITHIN_S = 10.0


@pytest.fixture
def start_operator(
    bare_cluster: Cluster, bare_namespace: str, tmp_path: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    with operator_starter(bare_cluster, "", tmp_path) as start:
        yield lambda identity: start(identity, "--lease-namespace", bare_namespace)


def readyz(operator: OperatorProcess) -> tuple[int, str]:
    response = httpx.get(f"http://127.0.0.1:{operator.port}/readyz", trust_env=False)
    return response.status_code, response.text.strip()


def wait_ready(operator: OperatorProcess) -> None:
    wait_until(lambda: readyz(operator) == (200, "ok"), "readiness", timeout_s=WATCHED_WITHIN_S)


def test_crds_that_are_applied_later_or_again_are_watched_within_ten_seconds(
    bare_cluster: Cluster, bare_namespace: str, start_operator: Callable[..., OperatorProcess]
) -> None:
    operator, api = start_operator("op-a"), NamespaceClient(bare_cluster, bare_namespace)
    missing = "does not serve pdservices"
    wait_until(lambda: missing in readyz(operator)[1], "the operator to lead", timeout_s=30)
    assert readyz(operator)[0] == 503
    apply_crds(bare_cluster)
    wait_ready(operator)
    api.service(instances=1)
    wait_until(lambda: "chat-0" in api.names("pods"), "the service to be seen", timeout_s=WATCHED_WITHIN_S)
    bare_cluster.kubectl("delete", "-f", str(ROOT / "crds"), "--wait=true")
    assert operator.process.wait(timeout=30) == 1, "it exits, and the kubelet starts it again"
    restarted = start_operator("op-b")
    wait_until(lambda: missing in readyz(restarted)[1], "the next operator to lead", timeout_s=30)
    apply_crds(bare_cluster)
    wait_ready(restarted)
    api.service("again", instances=1)
    wait_until(lambda: "again-0" in api.names("pods"), "the service to be seen", timeout_s=WATCHED_WITHIN_S)
