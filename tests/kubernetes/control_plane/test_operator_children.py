"""What stands around a service's engines is as the operator wants it, whatever hands change there."""

from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.control_plane.operators import OperatorProcess, Space, until
from tools.kubernetes.cluster import Cluster

DEPLOYMENTS, POLICIES = "apps/v1/deployments", "networking.k8s.io/v1/networkpolicies"
ROLES, BUDGETS = "rbac.authorization.k8s.io/v1/roles", "policy/v1/poddisruptionbudgets"
APPLIED = 10
"""Children of a service, without those that are made once."""
ANYTHING = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]


@pytest.fixture
def log(operator: OperatorProcess) -> Path:
    """The operator's."""
    return operator.log


@pytest.fixture
def space(control_plane: Cluster, namespace: str, log: Path) -> Space:
    """A namespace with a service that has everything around it."""
    made = Space(control_plane, namespace)
    made.service(instances=2)
    until(lambda: applied(log, made) == APPLIED, f"the children: {log}")
    return made


def applied(log: Path, space: Space) -> int:
    """How often a child was applied."""
    lines = log.read_text().splitlines()
    return sum("child applied" in line and space.name in line for line in lines)


def spec(space: Space, kind: str, name: str) -> Any:
    found = space.get(kind, name)
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
        pytest.param(POLICIES, "chat-engines", {"spec": {"ingress": [{}]}}, id="who may reach the engines"),
        pytest.param(ROLES, "chat-router", {"rules": ANYTHING}, id="what the router may do"),
        pytest.param(BUDGETS, "chat-engines", {"spec": {"minAvailable": 0}}, id="how many may be evicted"),
    ],
)
def test_an_edit_by_hand_is_taken_back_once(space: Space, log: Path, kind: str, name: str, edit: Any) -> None:
    before, counted = spec(space, kind, name), applied(log, space)
    space.patch(kind, name, edit(before) if callable(edit) else edit)
    until(lambda: spec(space, kind, name) == before, "the edit to be taken back")
    until(lambda: applied(log, space) > counted, "the operator to tell of it")
    assert applied(log, space) - counted == 1


def test_what_others_add_stays_and_is_no_reason_to_write(space: Space, log: Path) -> None:
    """A label of an inventory, a restart that was asked for: they outlive an edit that is taken back."""
    counted = applied(log, space)
    label = {"metadata": {"labels": {"example.com/owner": "me"}}}
    restart = {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}
    space.patch(DEPLOYMENTS, "chat-router", {**label, "spec": {"template": restart}})
    space.patch(DEPLOYMENTS, "chat-router", {"spec": {"replicas": 7}})
    until(lambda: applied(log, space) > counted, "the edit to be taken back")
    kept = space.get(DEPLOYMENTS, "chat-router")
    assert kept["spec"]["replicas"] == 2
    assert kept["metadata"]["labels"]["example.com/owner"] == "me"
    assert kept["spec"]["template"]["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] == "now"
    assert applied(log, space) - counted == 1


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
def test_a_child_that_somebody_deletes_is_made_again(space: Space, kind: str, name: str) -> None:
    before = space.get(kind, name)["metadata"]["uid"]
    space.delete(kind, name)
    until(lambda: space.get(kind, name)["metadata"]["uid"] != before, "it to be made again")
