"""The operator reverts manual edits of a service's children and creates deleted children again."""

from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.control_plane.operator_process import NamespaceClient, OperatorProcess, wait_until
from tools.kubernetes.cluster import Cluster

DEPLOYMENTS, POLICIES = "apps/v1/deployments", "networking.k8s.io/v1/networkpolicies"
ROLES, BUDGETS = "rbac.authorization.k8s.io/v1/roles", "policy/v1/poddisruptionbudgets"
CREATED = 12
"""Number of children of a service."""
ANYTHING = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]


@pytest.fixture
def log(operator: OperatorProcess) -> Path:
    """The operator's log."""
    return operator.log


@pytest.fixture
def api(control_plane: Cluster, namespace: str, log: Path) -> NamespaceClient:
    """A namespace with a service whose children were all created."""
    client = NamespaceClient(control_plane, namespace)
    client.service(instances=2)
    wait_until(lambda: count_logged(log, client, "child created") == CREATED, f"the children: {log}")
    return client


def applied(log: Path, api: NamespaceClient, kind: str, name: str) -> int:
    """Number of times that this child was applied."""
    return count_logged(log, api, "child applied", f'"kind": "{api.get(kind, name)["kind"]}"', f'"{name}"')


def count_logged(log: Path, api: NamespaceClient, *texts: str) -> int:
    lines = log.read_text().splitlines()
    return sum(all(text in line for text in (api.name, *texts)) for line in lines)


def spec(api: NamespaceClient, kind: str, name: str) -> Any:
    found = api.get(kind, name)
    return found.get("spec", found.get("rules"))


def another_argument(found: Any) -> dict[str, Any]:
    (container,) = found["template"]["spec"]["containers"]
    changed = {**container, "args": [*container["args"], "--evil"]}
    return {"spec": {"template": {"spec": {"containers": [changed]}}}}


@pytest.mark.parametrize(
    ("kind", "name", "edit"),
    [
        pytest.param(DEPLOYMENTS, "chat-router", {"spec": {"replicas": 0}}, id="replicas of the router"),
        pytest.param(DEPLOYMENTS, "chat-router", another_argument, id="arguments of the router"),
        pytest.param("services", "chat", {"spec": {"type": "NodePort"}}, id="type of the Service"),
        pytest.param(POLICIES, "chat-engines", {"spec": {"ingress": [{}]}}, id="ingress of the engines"),
        pytest.param(ROLES, "chat-router", {"rules": ANYTHING}, id="permissions of the router"),
        pytest.param(
            BUDGETS, "chat-engines", {"spec": {"minAvailable": 0}}, id="disruption budget of the engines"
        ),
    ],
)
def test_a_manual_edit_is_reverted_once(
    api: NamespaceClient, log: Path, kind: str, name: str, edit: Any
) -> None:
    before, counted = spec(api, kind, name), applied(log, api, kind, name)
    api.patch(kind, name, edit(before) if callable(edit) else edit)
    wait_until(lambda: spec(api, kind, name) == before, "the edit to be reverted")
    wait_until(lambda: applied(log, api, kind, name) > counted, "the operator to log it")
    assert applied(log, api, kind, name) - counted == 1


def test_fields_added_by_others_stay_and_cause_no_write(api: NamespaceClient, log: Path) -> None:
    """A label of an inventory and a requested restart remain when an edit is reverted."""
    counted = applied(log, api, DEPLOYMENTS, "chat-router")
    label = {"metadata": {"labels": {"example.com/owner": "me"}}}
    restart = {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}
    api.patch(DEPLOYMENTS, "chat-router", {**label, "spec": {"template": restart}})
    api.patch(DEPLOYMENTS, "chat-router", {"spec": {"replicas": 7}})
    wait_until(lambda: applied(log, api, DEPLOYMENTS, "chat-router") > counted, "the edit to be reverted")
    kept = api.get(DEPLOYMENTS, "chat-router")
    assert kept["spec"]["replicas"] == 2
    assert kept["metadata"]["labels"]["example.com/owner"] == "me"
    assert kept["spec"]["template"]["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] == "now"
    assert applied(log, api, DEPLOYMENTS, "chat-router") - counted == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("services", "chat"),
        (DEPLOYMENTS, "chat-router"),
        ("discovery.k8s.io/v1/endpointslices", "chat-router"),
        ("serviceaccounts", "chat-engine"),
        (BUDGETS, "chat-engines"),
    ],
)
def test_a_deleted_child_is_created_again(api: NamespaceClient, kind: str, name: str) -> None:
    before = api.get(kind, name)["metadata"]["uid"]
    api.delete(kind, name)
    wait_until(lambda: api.get(kind, name)["metadata"]["uid"] != before, "a new object")


def router_serves(api: NamespaceClient, name: str, *args: str) -> None:
    """Create a router's pod and write the EndpointSlice as that router does when it becomes active."""
    labels = {"fulcrum.dev/router": "chat", "app.kubernetes.io/managed-by": "fulcrum-operator"}
    container = {"name": "router", "image": "localhost/fulcrum:1", "args": list(args)}
    api.create("pods", {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}})
    endpoint = {"addresses": ["10.1.2.3"], "targetRef": {"kind": "Pod", "name": name}}
    api.patch("discovery.k8s.io/v1/endpointslices", "chat-router", {"endpoints": [endpoint]})


def test_clients_keep_their_port_until_a_router_serves_tls(api: NamespaceClient, log: Path) -> None:
    """The Secret may be missing or wrong: the new routers then do not start, and the former ones serve."""

    def ports() -> list[int]:
        return [port["port"] for port in spec(api, "services", "chat")["ports"]]

    router_serves(api, "former")
    counted, seen = applied(log, api, DEPLOYMENTS, "chat-router"), [ports()]
    api.patch("pdservices", "chat", {"spec": {"router": {"tls": {"secretName": "missing"}}}})
    wait_until(lambda: applied(log, api, DEPLOYMENTS, "chat-router") > counted, "the new Deployment")
    seen.append(ports())
    router_serves(api, "new", "--tls-certificate", "/tls.crt")
    wait_until(lambda: ports() == [443, 9091], "the port of TLS")
    assert seen == [[80, 9091]] * 2


def test_the_state_port_is_read_as_the_active_router_serves_it(api: NamespaceClient, log: Path) -> None:
    """No token is sent without TLS once a router serves it; until then the former routers are read."""

    def published() -> bool | None:
        found: bool | None = api.get("pdservices", "chat").get("status", {}).get("stateTls")
        return found

    router_serves(api, "former")
    counted = applied(log, api, DEPLOYMENTS, "chat-router")
    api.patch("pdservices", "chat", {"spec": {"router": {"stateTls": {"secretName": "state"}}}})
    wait_until(lambda: applied(log, api, DEPLOYMENTS, "chat-router") > counted, "the new Deployment")
    before = published()
    router_serves(api, "new", "--state-tls-certificate", "/tls.crt")
    wait_until(lambda: published() is True, "the scheme of the state port")
    assert not before
