"""Deleting a service deletes all its objects; uninstalling the release leaves only the CRDs."""

import contextlib

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.installation import NAMESPACE, Helm
from tests.kubernetes.nodes.permissions import list_forbidden
from tests.kubernetes.nodes.service import DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

MADE_BY_KUBERNETES = frozenset({"kube-root-ca.crt", "default", "kubernetes"})
"""Objects that Kubernetes itself creates in each namespace."""
LONG_STREAM_TOKENS = 400
"""Takes eight seconds, longer than the end of an idle pod."""


@pytest.mark.timeout(600)
def test_deleted_service_drains_and_after_helm_uninstall_only_the_crds_are_left(
    cluster: Cluster, service: DeployedService, helm: Helm, record_measurement: RecordMeasurement
) -> None:
    with service.stream("n1", tokens=LONG_STREAM_TOKENS) as answer:
        begun = answer.readline()
        cluster.kubectl("delete", "pdservice", "chat", "--timeout=120s")
        streamed = (begun + answer.read()).split(b"\n\n")
    assert (len(streamed) >= LONG_STREAM_TOKENS, streamed[-2:]) == (True, [b"data: [DONE]", b""])
    deleted_after_s = wait_for(
        lambda: _list_objects(cluster, "default") == [], "the service's objects to be deleted", timeout_s=180
    )
    forbidden = [
        list_forbidden(cluster, NAMESPACE, part) for part in ("fulcrum-operator", "fulcrum-autoscaler")
    ]
    helm.uninstall()
    with contextlib.suppress(TimeoutError):
        wait_for(
            lambda: _list_objects(cluster, NAMESPACE) == [],
            "the release's objects to be deleted",
            timeout_s=30,
        )
    record_measurement(f"service deleted: all its objects deleted {deleted_after_s:.1f} s afterwards")
    assert (forbidden, _list_objects(cluster, NAMESPACE)) == ([set(), set()], [])
    assert _list_cluster_objects(cluster) == [
        f"customresourcedefinition.apiextensions.k8s.io/{kind}.fulcrum.dev"
        for kind in ("pdassignments", "pdinstances", "pdpools", "pdservices", "qostiers")
    ]


def _list_objects(cluster: Cluster, namespace: str) -> list[str]:
    """Return all objects of the namespace except Events and those that Kubernetes creates."""
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
    found = cluster.kubectl("get", listed, f"--namespace={namespace}", "--output=name", "--ignore-not-found")
    return [name for name in found.split() if name.rpartition("/")[2] not in MADE_BY_KUBERNETES]


def _list_cluster_objects(cluster: Cluster) -> list[str]:
    """Return Fulcrum's cluster-scoped objects."""
    kinds = "customresourcedefinitions,clusterroles,clusterrolebindings,validatingwebhookconfigurations"
    found = cluster.kubectl("get", kinds, "--output=name").split()
    return sorted(name for name in found if "fulcrum" in name)
