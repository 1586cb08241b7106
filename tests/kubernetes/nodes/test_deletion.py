"""What is deleted is gone: a service with all that was made for it, a release but for what it keeps."""

import contextlib

import pytest

from tests.kubernetes.nodes.installation import NAMESPACE, Helm
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

EVERYWHERE = frozenset({"kube-root-ca.crt", "default", "kubernetes"})
"""What Kubernetes itself makes in a namespace."""


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("service")
def test_deleted_service_and_release_leave_nothing_but_the_crds(cluster: Cluster, helm: Helm) -> None:
    cluster.kubectl("delete", "pdservice", "chat", "--timeout=120s")
    gone_s = wait_for(lambda: _things(cluster, "default") == [], "the service's things to go", timeout_s=180)
    helm.uninstall()
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: _things(cluster, NAMESPACE) == [], "the release's things to go", timeout_s=30)
    print(f"\nthe service was gone after {gone_s:.1f} s")
    assert _things(cluster, NAMESPACE) == []
    assert _of_the_cluster(cluster) == [
        f"customresourcedefinition.apiextensions.k8s.io/{kind}.fulcrum.dev"
        for kind in ("pdassignments", "pdinstances", "pdpools", "pdservices", "qostiers")
    ]


def _things(cluster: Cluster, namespace: str) -> list[str]:
    """Every object of the namespace, but for events and for what Kubernetes makes."""
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    wanted = ",".join(kind for kind in kinds if not kind.startswith("events"))
    found = cluster.kubectl("get", wanted, f"--namespace={namespace}", "--output=name", "--ignore-not-found")
    return [name for name in found.split() if name.rpartition("/")[2] not in EVERYWHERE]


def _of_the_cluster(cluster: Cluster) -> list[str]:
    """What is ours of the objects without a namespace."""
    kinds = "customresourcedefinitions,clusterroles,clusterrolebindings,validatingwebhookconfigurations"
    found = cluster.kubectl("get", kinds, "--output=name").split()
    return sorted(name for name in found if "fulcrum" in name)
