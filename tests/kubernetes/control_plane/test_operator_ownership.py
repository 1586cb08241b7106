"""The operator never changes an object that is not the service's; Degraded/NameTaken names the object."""

from typing import Any

import pytest

from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    OperatorProcess,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tools.kubernetes.cluster import Cluster

POLICIES = "networking.k8s.io/v1/networkpolicies"
RBAC = "rbac.authorization.k8s.io/v1"
PORTS = [{"name": "web", "port": 8080, "targetPort": 8080, "protocol": "TCP"}]
SELECTOR = {"matchLabels": {"app": "payments"}}
POD_TEMPLATE = {
    "metadata": {"labels": SELECTOR["matchLabels"]},
    "spec": {"containers": [{"name": "web", "image": "localhost/web:1"}]},
}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "Service": ("services", {"metadata": {"name": "chat"}, "spec": {"ports": PORTS}}),
    "ServiceAccount": ("serviceaccounts", {"metadata": {"name": "chat-engine"}}),
    "Role": (f"{RBAC}/roles", {"metadata": {"name": "chat-router"}, "rules": []}),
    "RoleBinding": (
        f"{RBAC}/rolebindings",
        {
            "metadata": {"name": "chat-router"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "chat-router"},
        },
    ),
    "Lease": ("coordination.k8s.io/v1/leases", {"metadata": {"name": "chat-router"}, "spec": {}}),
    "EndpointSlice": (
        "discovery.k8s.io/v1/endpointslices",
        {"metadata": {"name": "chat-router"}, "addressType": "IPv4", "endpoints": [], "ports": []},
    ),
    "NetworkPolicy": (POLICIES, {"metadata": {"name": "chat-engines"}, "spec": {"podSelector": SELECTOR}}),
    "PodDisruptionBudget": (
        "policy/v1/poddisruptionbudgets",
        {"metadata": {"name": "chat-engines"}, "spec": {"minAvailable": 1, "selector": SELECTOR}},
    ),
    "Deployment": (
        "apps/v1/deployments",
        {
            "metadata": {"name": "chat-router"},
            "spec": {"replicas": 0, "selector": SELECTOR, "template": POD_TEMPLATE},
        },
    ),
}
"""An object of somebody else for each kind of a service's children, with the name of a child."""
CHILDREN = {
    *("apps/v1/deployments", "services", POLICIES, "policy/v1/poddisruptionbudgets", "serviceaccounts"),
    *("coordination.k8s.io/v1/leases", "discovery.k8s.io/v1/endpointslices"),
    *(f"{RBAC}/roles", f"{RBAC}/rolebindings"),
}

WAITING = {
    "Service": ("EndpointSlice chat-router", "Deployment chat-router"),
    "ServiceAccount": ("RoleBinding chat-router", "Deployment chat-router"),
    "Role": ("RoleBinding chat-router", "Deployment chat-router"),
    "RoleBinding": ("Deployment chat-router",),
    "Lease": ("Deployment chat-router",),
    "EndpointSlice": ("Deployment chat-router",),
}
"""Children that refer to an object of the router, and are not made while that is somebody else's."""
PLURALS = {kind: plural for kind, (plural, _) in FOREIGN.items()}

CHILD_PAIRS = {POLICIES, "policy/v1/poddisruptionbudgets", "serviceaccounts"}
"""Kinds of which a service has two children, one for routers and one for engines."""


@pytest.fixture
def api(control_plane: Cluster, namespace: str, operator: OperatorProcess) -> NamespaceClient:  # noqa: ARG001
    return NamespaceClient(control_plane, namespace)


def without_status(found: dict[str, Any]) -> dict[str, Any]:
    """The object without what the controllers of Kubernetes write: its status and annotations."""
    meta = {key: found["metadata"].get(key) for key in ("uid", "labels", "ownerReferences")}
    return {**{key: value for key, value in found.items() if key != "status"}, "metadata": meta}


def writers(found: dict[str, Any]) -> set[str]:
    return {entry["manager"] for entry in found["metadata"].get("managedFields", ())}


def degraded(api: NamespaceClient, service: str = "chat") -> tuple[str, str, str]:
    found = api.condition("Degraded", service)
    return found["status"], found["reason"], found["message"]


def created_children(api: NamespaceClient) -> set[str]:
    """Kinds of which the service has a child."""
    return {
        kind
        for kind in CHILDREN
        for found in api.list(kind)
        for owner in found["metadata"].get("ownerReferences", ())
        if owner["kind"] == "PDService"
    }


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if kind not in WAITING])
def test_a_foreign_object_with_the_name_of_a_child_is_left_alone_and_named(
    api: NamespaceClient, kind: str
) -> None:
    plural, body = FOREIGN[kind]
    before = api.create(plural, body)
    api.service(instances=2)
    wait_until(lambda: degraded(api)[:2] == ("True", "NameTaken"), f"the condition: {api.list('pdservices')}")
    name = body["metadata"]["name"]
    assert f"{kind} {name} exists and was not made for this service" in degraded(api)[2]
    wait_until(lambda: f"{kind} {name}" in api.events()["NameTaken"], "the event")
    others = CHILDREN if plural in CHILD_PAIRS else CHILDREN - {plural}
    wait_until(lambda: created_children(api) == others, "all other children")
    after = api.get(plural, name)
    assert without_status(after) == without_status(before)
    assert "fulcrum-operator" not in writers(after)
    wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the engines")


@pytest.mark.parametrize("kind", WAITING)
def test_children_that_refer_to_a_foreign_object_wait_until_its_name_is_free(
    api: NamespaceClient, kind: str
) -> None:
    plural, body = FOREIGN[kind]
    name = "chat" if kind == "Service" else "chat-router"
    before = api.create(plural, {**body, "metadata": {"name": name}})
    api.service(instances=2)
    wait_until(lambda: degraded(api)[1] == "NameTaken", "the condition")
    said = f"{kind} {name} exists and was not made for this service; rename one of them"
    waiting = WAITING[kind]
    assert degraded(api)[2] == f"{said}; not created until then: {', '.join(waiting)}"
    made = CHILDREN - {PLURALS[each.partition(" ")[0]] for each in waiting} - {plural}
    if plural in CHILD_PAIRS:
        made |= {plural}
    wait_until(lambda: created_children(api) == made, "all other children")
    wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the engines")
    after = api.get(plural, name)
    assert without_status(after) == without_status(before)
    api.delete(plural, name)
    wait_until(lambda: created_children(api) == CHILDREN, "all children", timeout_s=25)


def test_no_engine_runs_in_a_foreign_service_account(api: NamespaceClient) -> None:
    api.create("serviceaccounts", {"metadata": {"name": "chat-engine"}})
    api.service(instances=2)
    wait_until(lambda: degraded(api)[1] == "NameTaken", "the condition")
    assert "; not created until then: all engines" in degraded(api)[2]
    wait_until(lambda: created_children(api) == CHILDREN, "all other children")
    assert not {"chat-0", "chat-1"} & set(api.names("pods"))
    api.delete("serviceaccounts", "chat-engine")
    wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the engines", timeout_s=25)


def test_the_endpoints_of_a_service_that_became_foreign_are_deleted(api: NamespaceClient) -> None:
    """The slice names the Service by a label, so it would direct the new Service's traffic to the router."""
    plural, _ = FOREIGN["Service"]
    api.service(instances=1)
    wait_until(lambda: created_children(api) == CHILDREN, "the children")
    others = {"metadata": {"labels": {"fulcrum.dev/service": None}, "ownerReferences": None}}
    before = api.patch(plural, "chat", others)
    wait_until(lambda: degraded(api)[1] == "NameTaken", "the condition")
    wait_until(lambda: "chat-router" not in api.names(PLURALS["EndpointSlice"]), "the slice to be deleted")
    assert api.get(plural, "chat")["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_child_is_created_once_its_name_is_free(api: NamespaceClient) -> None:
    plural, body = FOREIGN["Service"]
    api.create(plural, body)
    api.service(instances=2)
    wait_until(lambda: degraded(api)[1] == "NameTaken", "the condition")
    api.delete(plural, "chat")
    wait_until(lambda: degraded(api)[1] != "NameTaken", "the condition to clear", timeout_s=25)
    assert api.get(plural, "chat")["metadata"]["ownerReferences"][0]["kind"] == "PDService"


def test_deleting_a_service_deletes_no_foreign_object(api: NamespaceClient) -> None:
    plural, body = FOREIGN["Service"]
    api.create(plural, body)
    api.service(instances=1)
    wait_until(lambda: degraded(api)[1] == "NameTaken", "the condition")
    api.delete("pdservices", "chat")
    wait_until(lambda: not api.names("pdinstances"), "garbage collection", timeout_s=40)
    assert api.names("services") == ["chat"]


def test_two_services_whose_pool_names_collide_do_not_touch_each_other(api: NamespaceClient) -> None:
    api.service("chat", pools=[{"name": "eu-flex", "instances": {"min": 2}}])
    wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the first service's pods")
    api.service(
        "chat-eu", pools=[{"name": "flex", "instances": {"min": 1}}, {"name": "b", "instances": {"min": 1}}]
    )
    wait_until(lambda: degraded(api, "chat-eu")[:2] == ("True", "NameTaken"), "the condition")
    assert degraded(api, "chat-eu")[2].startswith("PDPool chat-eu-flex exists and belongs to PDService chat;")
    wait_until(lambda: "chat-eu-0" in api.names("pods"), "the other pool of the second service")
    pool = api.get("pdpools", "chat-eu-flex")
    owners = [owner["name"] for owner in pool["metadata"]["ownerReferences"]]
    assert (pool["spec"]["service"], pool["spec"]["replicas"], owners) == ("chat", 2, ["chat"])
    assert {i["spec"]["pool"] for i in api.list("pdinstances") if i["spec"]["service"] == "chat-eu"} == {
        "chat-eu-b"
    }
    assert degraded(api, "chat")[1] != "NameTaken"
    api.delete("pdservices", "chat")
    wait_until(lambda: degraded(api, "chat-eu")[1] != "NameTaken", "the freed name to be used", timeout_s=40)
    assert api.get("pdpools", "chat-eu-flex")["spec"]["service"] == "chat-eu"


def test_a_foreign_assignment_is_named_and_left_alone(api: NamespaceClient) -> None:
    owner = api.create("configmaps", {"metadata": {"name": "somebody"}})["metadata"]["uid"]
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "somebody",
        "uid": owner,
        "controller": True,
    }
    body = {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDAssignment",
        "metadata": {"name": "chat", "ownerReferences": [reference]},
        "spec": {"service": "chat", "roles": {}, "floors": {"prefill": 1, "decode": 1}},
    }
    before = api.create("pdassignments", body)["metadata"]["resourceVersion"]
    api.service(instances=2)
    message = "PDAssignment chat exists and belongs to ConfigMap somebody; rename one of them"
    wait_until(lambda: degraded(api) == ("True", "NameTaken", message), "the condition")
    assert api.get("pdassignments", "chat")["metadata"]["resourceVersion"] == before


def test_a_new_service_adopts_what_a_deletion_orphaned(api: NamespaceClient) -> None:
    address = pick_loopback_address()
    with serve_engines(address):
        api.service(instances=2)
        wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the pods")
        FakeKubelet(api, address).set_ready("chat-0", "chat-1")
        wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve")
        wait_until(lambda: created_children(api) == CHILDREN, "the children")
        before = {name: api.get("pods", name)["metadata"]["uid"] for name in ("chat-0", "chat-1")}
        router = api.get("apps/v1/deployments", "chat-router")["metadata"]["uid"]
        api.delete("pdservices", "chat", {"propagationPolicy": "Orphan"})
        wait_until(lambda: not api.names("pdservices"), "the service to be deleted")
        wait_until(lambda: not created_children(api), "the children to be orphaned")
        api.service(instances=2)
        wait_until(lambda: created_children(api) == CHILDREN, "the children to be adopted")
        wait_until(lambda: api.condition("Progressing")["reason"] == "Settled", "the service to settle")
        assert degraded(api)[1] != "NameTaken"
        assert {name: api.get("pods", name)["metadata"]["uid"] for name in before} == before
        assert api.get("apps/v1/deployments", "chat-router")["metadata"]["uid"] == router
        uid = api.get("pdservices", "chat")["metadata"]["uid"]
        for kind, name in (("pdpools", "chat-flex"), ("pdassignments", "chat")):
            assert [o["uid"] for o in api.get(kind, name)["metadata"]["ownerReferences"]] == [uid]


def test_orphaned_engines_and_routers_serve_on_without_their_service(api: NamespaceClient) -> None:
    address = pick_loopback_address()
    with serve_engines(address):
        api.service(instances=2)
        wait_until(lambda: {"chat-0", "chat-1"} <= set(api.names("pods")), "the pods")
        FakeKubelet(api, address).set_ready("chat-0", "chat-1")
        wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve")
        wait_until(lambda: created_children(api) == CHILDREN, "the children")
        api.cluster.kubectl("delete", "pds", "chat", "--cascade=orphan", f"--namespace={api.name}")
        wait_until(lambda: not created_children(api), "the children to be orphaned")
        # A change that the operator notices: it must not end the engines then, either.
        api.patch("pods", "chat-1", {"metadata": {"labels": {"example.com/touched": "yes"}}})
        api.service("other", instances=1)
        wait_until(lambda: "other-0" in api.names("pods"), "the operator to have acted since")
        deleted = [p["metadata"]["name"] for p in api.list("pods") if "deletionTimestamp" in p["metadata"]]
        assert (deleted, {"chat-0", "chat-1"} <= set(api.names("pods"))) == ([], True)
        assert {name: api.phases()[name] for name in ("chat-0", "chat-1")} == {
            "chat-0": "Serving",
            "chat-1": "Serving",
        }
