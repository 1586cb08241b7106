"""The chart in one namespace under the restricted Pod Security Standard, with Roles only."""

from collections.abc import Iterator

import pytest

from tests.kubernetes.clusters import CRDS, apply_crds, enforce_restricted_pod_security
from tests.kubernetes.nodes.installation import Helm, build_values
from tests.kubernetes.nodes.permissions import list_forbidden
from tests.kubernetes.nodes.service import DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

MANIFEST = """
apiVersion: fulcrum.dev/v1alpha1
kind: PDService
metadata: {name: own}
spec: {model: laptop-1b, instances: 2, engine: {type: Simulated}}
"""


@pytest.fixture
def installed(cluster: Cluster, namespace: str) -> Iterator[Helm]:
    """The release for one namespace, after a release for all namespaces was uninstalled."""
    Helm(cluster).uninstall()
    crds_exist = cluster.get("/apis/fulcrum.dev/v1alpha1")[0] == 200  # kept by that release
    if not crds_exist:
        apply_crds(cluster)
    enforce_restricted_pod_security(cluster, namespace)
    helm = Helm(cluster, namespace)
    helm.install(build_values(watchNamespace=namespace, crds={"enabled": False}))
    yield helm
    helm.uninstall()
    if not crds_exist:
        cluster.kubectl("delete", "-f", str(CRDS))


@pytest.mark.timeout(600)
def test_release_for_one_namespace_serves_without_cluster_roles(
    cluster: Cluster, namespace: str, installed: Helm
) -> None:
    cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=MANIFEST)
    own = DeployedService(cluster, namespace, "own")
    own.wait_until_ready(2, timeout_s=120)
    wait_for(lambda: own.receive_first_token("n1"), "a first token", timeout_s=30)
    installed.test()
    roles = cluster.kubectl("get", "clusterroles,clusterrolebindings", "--output=name").split()
    parts = ("fulcrum-operator", "fulcrum-autoscaler", "own-router")
    assert [role for role in roles if "fulcrum" in role] == []
    assert {part: list_forbidden(cluster, namespace, part) for part in parts} == {
        part: set() for part in parts
    }
    cluster.kubectl("delete", "pdservice", "own", f"--namespace={namespace}", "--timeout=60s")
    wait_for(lambda: own.engines() == own.routers() == [], "its pods to go", timeout_s=120)
