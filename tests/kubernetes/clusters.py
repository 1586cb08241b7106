"""What the Kubernetes levels share: a cluster or why there is none, our kinds, a namespace for one test."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.program import ClusterUnavailable, check_machine, locate_program
from tools.kubernetes.waiting import wait_for

CRDS = ROOT / "crds"

START_DURATIONS_S: dict[str, float] = {}
"""How long what was started in this run took."""

# Who did what, without the cluster's own parts: what a test of rights or of write rates reads.
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler", "system:kube-proxy"]
- level: None
  userGroups: ["system:nodes", "system:serviceaccounts:kube-system"]
- level: None # tests look all the time
  users: ["admin"]
  verbs: ["get", "list", "watch"]
- level: Metadata
"""


def start_test_cluster(
    folder: Path,
    nodes: int,
    *,
    archives: tuple[Path, ...] = (),
    api_server: Mapping[str, str] | None = None,
    crds: bool = True,
) -> Cluster:
    """A running cluster, by default with our kinds."""
    cluster = Cluster(folder, api_server=api_server, audit=AUDIT_POLICY)
    try:
        begin = time.monotonic()
        cluster.start(nodes, manifests=CRDS if crds else None)
        START_DURATIONS_S[f"{nodes} nodes"] = time.monotonic() - begin
        for archive in archives:
            begin = time.monotonic()
            cluster.load_image(archive)
            START_DURATIONS_S[archive.stem] = time.monotonic() - begin
        if crds:
            _wait_for_crds(cluster)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def require_kubernetes() -> None:
    """Skips where no cluster can run and says why; with KUBERNETES_TESTS=required it fails instead."""
    try:
        check_machine()
        if not locate_program().exists():  # minutes, which no test's own timeout allows for
            raise ClusterUnavailable("its program is not built yet; make kubernetes builds it")
    except ClusterUnavailable as reason:
        if os.environ.get("KUBERNETES_TESTS") == "required":
            raise
        pytest.skip(f"levels 3 and 4 need a real Kubernetes: {reason}")


def apply_crds(cluster: Cluster) -> None:
    """Our kinds as they lie in `crds/`, and the moment they are served."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    _wait_for_crds(cluster)


def _wait_for_crds(cluster: Cluster) -> None:
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
    wait_for(lambda: b"pdservices" in cluster.get("/apis/fulcrum.dev/v1alpha1")[1], "our kinds", timeout_s=30)


@contextlib.contextmanager
def temporary_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace that pods may start in at once, deleted with all that is in it."""
    name = f"t-{secrets.token_hex(4)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    status, response = cluster.request("POST", "/api/v1/namespaces", json.dumps(body).encode())
    assert status == 201, response
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_for(lambda: cluster.get(account)[0] == 200, f"the service account of {name}", timeout_s=60)
    try:
        yield name
    finally:
        cluster.request("DELETE", f"/api/v1/namespaces/{name}")


def enforce_restricted_pod_security(cluster: Cluster, namespace: str) -> None:
    """From now on the namespace takes no pod that is not restricted."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    path = f"/api/v1/namespaces/{namespace}"
    body = json.dumps(label).encode()
    status, response = cluster.request("PATCH", path, body, content_type="application/merge-patch+json")
    assert status == 200, response
