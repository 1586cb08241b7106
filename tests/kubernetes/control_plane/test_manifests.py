"""A real API server accepts the operator's manifests, and deletes a service's children with the service.

Unknown fields are refused, and the namespace enforces the restricted Pod Security Standard. Deletion needs
the garbage collector of the controller manager.
"""

import json
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService
from fulcrum_operator.manifests.children import service_children
from fulcrum_operator.manifests.engine_pod import engine_pod
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

SETTINGS = InstallationSettings(
    image="localhost/fulcrum:1",
    operator=ServiceAccount("fulcrum-system", "fulcrum-operator"),
    autoscaler=ServiceAccount("fulcrum-system", "fulcrum-autoscaler"),
    image_pull_secrets=("pull",),
)
TEMPLATE = {
    "metadata": {"annotations": {"example.com/note": "kept"}},
    "spec": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [{"name": "engine", "resources": {"limits": {"memory": "64Gi"}}}],
    },
}
COLLECTION_PATHS = {
    "Deployment": "apis/apps/v1/{}/deployments",
    "EndpointSlice": "apis/discovery.k8s.io/v1/{}/endpointslices",
    "Lease": "apis/coordination.k8s.io/v1/{}/leases",
    "LimitRange": "api/v1/{}/limitranges",
    "NetworkPolicy": "apis/networking.k8s.io/v1/{}/networkpolicies",
    "PDService": "apis/fulcrum.dev/v1alpha1/{}/pdservices",
    "Pod": "api/v1/{}/pods",
    "PodDisruptionBudget": "apis/policy/v1/{}/poddisruptionbudgets",
    "ResourceQuota": "api/v1/{}/resourcequotas",
    "Role": "apis/rbac.authorization.k8s.io/v1/{}/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/{}/rolebindings",
    "Service": "api/v1/{}/services",
    "ServiceAccount": "api/v1/{}/serviceaccounts",
}


class RestrictedNamespace:
    """A namespace that enforces the restricted Pod Security Standard."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def path(self, kind: str) -> str:
        """Path of the objects of a kind."""
        return "/" + COLLECTION_PATHS[kind].format(f"namespaces/{self.namespace}")

    def create(self, body: dict[str, Any], *, dry: bool = False) -> dict[str, Any]:
        """Create an object; with `dry`, only have it validated.

        Raises:
            AssertionError: if the API server refuses it, with its message.
        """
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry else "")
        status, response = self.cluster.request(
            "POST", self.path(body["kind"]) + query, json.dumps(body).encode()
        )
        made: dict[str, Any] = json.loads(response)
        assert status == 201, made.get("message")
        return made


@pytest.fixture
def restricted(control_plane: Cluster, namespace: str) -> RestrictedNamespace:
    """The test's namespace, with the restricted Pod Security Standard."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    path = f"/api/v1/namespaces/{namespace}"
    control_plane.request(
        "PATCH", path, json.dumps(label).encode(), content_type="application/merge-patch+json"
    )
    return RestrictedNamespace(control_plane, namespace)


@pytest.fixture
def chat(restricted: RestrictedNamespace) -> PDService:
    """A service in the API server. Its children's owner references need its uid."""
    body = {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDService",
        "metadata": {"name": "chat"},
        "spec": {"model": "m", "instances": 4},
    }
    return PDService.model_validate(restricted.create(body))


@pytest.fixture
def children(restricted: RestrictedNamespace, chat: PDService) -> list[dict[str, Any]]:
    """The children of the service, created in the API server."""
    return [restricted.create(child) for child in service_children(chat, SETTINGS, min_available=4)]


def test_the_api_server_accepts_every_child(restricted: RestrictedNamespace, chat: PDService) -> None:
    made = [restricted.create(child, dry=True) for child in service_children(chat, SETTINGS, min_available=4)]
    assert sorted((child["kind"], child["metadata"]["name"]) for child in made) == [
        ("Deployment", "chat-router"),
        ("EndpointSlice", "chat-router"),
        ("Lease", "chat-router"),
        ("NetworkPolicy", "chat-engines"),
        ("NetworkPolicy", "chat-router"),
        ("PodDisruptionBudget", "chat-engines"),
        ("PodDisruptionBudget", "chat-router"),
        ("Role", "chat-router"),
        ("RoleBinding", "chat-router"),
        ("Service", "chat"),
        ("ServiceAccount", "chat-engine"),
        ("ServiceAccount", "chat-router"),
    ]


def test_children_are_deleted_with_their_service(
    restricted: RestrictedNamespace, chat: PDService, children: list[dict[str, Any]]
) -> None:
    restricted.cluster.request("DELETE", f"{restricted.path('PDService')}/{chat.metadata.name}")
    paths = [f"{restricted.path(child['kind'])}/{child['metadata']['name']}" for child in children]

    def left() -> list[str]:
        return [path for path in paths if restricted.cluster.get(path)[0] != 404]

    # The garbage collector finds new kinds every half minute.
    wait_for(lambda: left() == [], "the children to be gone", timeout_s=90)


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="plain"),
        pytest.param({"role": "Decode", "revision": "0a1b2c3d4e"}, id="with a fixed role"),
        pytest.param({"hardware": {"resource": "nvidia.com/gpu", "count": 4}}, id="with accelerators"),
        pytest.param({"template": TEMPLATE}, id="with its pool's template"),
    ],
)
def test_an_engine_pod_is_admitted_under_the_restricted_standard(
    restricted: RestrictedNamespace, chat: PDService, changed: dict[str, Any]
) -> None:
    spec = {"service": "chat", "pool": "chat-flex", "model": "m", "engine": {}, **changed}
    meta = {"name": "chat-0", "namespace": restricted.namespace, "uid": "u"}
    instance = PDInstance.model_validate({"metadata": meta, "spec": spec})
    made = restricted.create(engine_pod(instance, chat, SETTINGS, startup_s=180.0), dry=True)
    assert made["metadata"]["name"] == "chat-0"


@pytest.mark.usefixtures("children")
def test_an_engine_pod_is_admitted_under_a_quota_and_gets_no_default_limit(
    restricted: RestrictedNamespace, chat: PDService
) -> None:
    counted = ("requests.cpu", "requests.memory", "limits.cpu", "limits.memory", "requests.nvidia.com/gpu")
    quota = {"hard": {name: "1000Gi" if "memory" in name else "100" for name in counted}}
    limits = {"limits": [{"type": "Container", "default": {"cpu": "500m", "memory": "512Mi"}}]}
    for kind, spec in (("ResourceQuota", quota), ("LimitRange", limits)):
        restricted.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": "team"}, "spec": spec})
    path = f"{restricted.path('ResourceQuota')}/team"
    wait_for(
        lambda: bool(restricted.cluster.read(path).get("status", {}).get("used")), "the quota", timeout_s=60
    )
    start = {"service": "chat", "pool": "chat-flex", "model": "m", "engine": {"type": "vLLM"}}
    meta = {"name": "chat-0", "namespace": restricted.namespace, "uid": "u"}
    instance = PDInstance.model_validate({"metadata": meta, "spec": start})
    made = restricted.create(engine_pod(instance, chat, SETTINGS, startup_s=180.0), dry=True)
    assert made["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": "12",
        "memory": "24Gi",
        "nvidia.com/gpu": "1",
    }


def test_a_router_pod_is_admitted_under_the_restricted_standard(
    restricted: RestrictedNamespace, children: list[dict[str, Any]]
) -> None:
    (deployment,) = (child for child in children if child["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {"name": "router", **template["metadata"]},
    }
    assert restricted.create(pod, dry=True)["spec"]["serviceAccountName"] == "chat-router"
