"""What is invalid or refused is named in Degraded, stops nothing else, and is repaired by itself."""

import pytest

from tests.kubernetes.control_plane.operator_process import NamespaceClient, OperatorProcess, wait_until
from tools.kubernetes.cluster import Cluster

QUOTA = {"metadata": {"name": "few"}, "spec": {"hard": {"count/pdinstances.fulcrum.dev": "2"}}}


@pytest.fixture
def api(control_plane: Cluster, namespace: str, operator: OperatorProcess) -> NamespaceClient:  # noqa: ARG001
    return NamespaceClient(control_plane, namespace)


def degraded(api: NamespaceClient) -> tuple[str, str]:
    found = api.condition("Degraded")
    return found["reason"], found["message"]


@pytest.mark.parametrize("profile", ["lapptop", "/etc/passwd", "mine.yaml"])
def test_an_unknown_profile_or_a_path_is_refused_with_the_names_that_exist(
    api: NamespaceClient, profile: str
) -> None:
    with pytest.raises(LookupError) as refused:
        api.service(engine={"type": "Simulated", "profile": profile})
    text = str(refused.value).replace("\\", "")
    assert f'Unsupported value: "{profile}": supported values: "l70-a100' in text


def test_a_refused_instance_is_named_and_stops_no_other_and_is_created_once_allowed(
    api: NamespaceClient,
) -> None:
    api.create("resourcequotas", QUOTA)
    wait_until(lambda: "used" in api.get("resourcequotas", "few")["status"], "the quota")
    api.service(instances=4)
    wait_until(lambda: degraded(api)[0] == "ChildRefused", "the condition")
    assert "exceeded quota: few" in degraded(api)[1]
    wait_until(lambda: "exceeded quota: few" in api.events()["ChildApplyFailed"], "the event")
    assert {"chat-0", "chat-1"} <= set(api.names("pods"))
    wait_until(lambda: "chat-router" in api.names("apps/v1/deployments"), "the router")
    api.delete("resourcequotas", "few")
    names = {f"chat-{number}" for number in range(4)}
    wait_until(lambda: names <= set(api.names("pods")), "the other instances")
    wait_until(lambda: degraded(api)[0] != "ChildRefused", "the condition to clear")
