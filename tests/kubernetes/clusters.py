"""Starts test clusters with the CRDs, or skips with the reason; creates namespaces for single tests."""

import contextlib
import json
import os
import secrets
import tempfile
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
"""Seconds that starting a cluster or loading an image took in this run, by what it was."""

# Requests of everything except Kubernetes itself, for tests of permissions and of write rates.
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler", "system:kube-proxy"]
- level: None
  userGroups: ["system:nodes", "system:serviceaccounts:kube-system"]
- level: None # tests poll
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
    controller_manager: Mapping[str, str] | None = None,
    crds: bool = True,
) -> Cluster:
    """Start a cluster with `nodes` nodes, the images in `archives` and, by default, the CRDs."""
    cluster = Cluster(
        folder, api_server=api_server, controller_manager=controller_manager, audit=AUDIT_POLICY
    )
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
    """Skip with the reason if no cluster can run here; fail if KUBERNETES_TESTS=required."""
    try:
        check_machine()
        if not locate_program().exists():  # building takes minutes, longer than a test's time-out
            raise ClusterUnavailable("its program is not built yet; `make test-kubernetes` builds it")
    except ClusterUnavailable as reason:
        if os.environ.get("KUBERNETES_TESTS") == "required":
            raise
        pytest.skip(f"levels 3 and 4 need a real Kubernetes: {reason}")


def apply_crds(cluster: Cluster) -> None:
    """Apply the CRDs in `crds/` and wait until the API server serves them."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    _wait_for_crds(cluster)


def delete_crds(cluster: Cluster) -> None:
    """Delete those of the CRDs in `crds/` that there are, and their objects; returns when they are gone.

    The API server deletes their objects first. If it fails to, it tries again later and later; a change of
    the CRD makes it try at once.
    """
    kinds = [f"{path.stem}.fulcrum.dev" for path in sorted(CRDS.glob("*.yaml"))]
    delete = ("delete", "crd", "--ignore-not-found", "--wait=true", "--timeout=20s", *kinds)
    for attempt in range(3):
        with contextlib.suppress(RuntimeError):
            cluster.kubectl(*delete)
            return
        with contextlib.suppress(RuntimeError):  # of those that are gone
            cluster.kubectl(
                "annotate", "crd", "--overwrite", *kinds, f"fulcrum.dev/deletion-attempt={attempt}"
            )
    cluster.kubectl(*delete)


def _wait_for_crds(cluster: Cluster) -> None:
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
    wait_for(
        lambda: b"pdservices" in cluster.get("/apis/fulcrum.dev/v1alpha1")[1],
        "the CRDs to be served",
        timeout_s=30,
    )


@contextlib.contextmanager
def temporary_namespace(cluster: Cluster) -> Iterator[str]:
    """Create a namespace in which pods can start at once; delete it with its contents afterwards."""
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
    """Make the API server refuse pods in this namespace that violate the restricted Pod Security Standard."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    path = f"/api/v1/namespaces/{namespace}"
    body = json.dumps(label).encode()
    status, response = cluster.request("PATCH", path, body, content_type="application/merge-patch+json")
    assert status == 200, response


@contextlib.contextmanager
def run_control_plane() -> Iterator[Cluster]:
    """Run a control plane with the CRDs while the block runs, for a measurement."""
    with tempfile.TemporaryDirectory(prefix="control-plane-") as folder:
        cluster = Cluster(Path(folder), audit=AUDIT_POLICY)
        cluster.start(0)
        try:
            apply_crds(cluster)
            yield cluster
        finally:
            cluster.stop()
