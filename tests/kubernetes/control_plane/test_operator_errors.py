"""What is invalid or refused is named in Degraded, stops nothing else, and is repaired by itself."""

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


def router_pods(api: NamespaceClient) -> list[str]:
    return [name for name in api.names("pods") if name.startswith("chat-router-")]


def test_an_unschedulable_router_is_a_named_cause(api: NamespaceClient) -> None:
    """There are no nodes."""
    api.service(instances=1)
    wait_until(lambda: "router chat-router-" in degraded(api)[1], "the cause")
    assert "Unschedulable: no nodes available to schedule pods" in degraded(api)[1].partition("router ")[2]


@pytest.mark.parametrize(
    ("waiting", "message", "reason"),
    [
        pytest.param("ImagePullBackOff", "no credentials", "ImagePullFailed", id="no pull secret"),
        pytest.param("CreateContainerConfigError", "no such key", "RouterStartFailed", id="a missing key"),
        pytest.param("CrashLoopBackOff", "back-off 10s", "RouterStartFailed", id="a container that exits"),
    ],
)
def test_a_router_that_does_not_start_is_named_in_conditions_and_events(
    api: NamespaceClient, waiting: str, message: str, reason: str
) -> None:
    address = pick_loopback_address()
    with serve_engines(address):
        api.service(instances=1)
        wait_until(lambda: "chat-0" in api.names("pods") and len(router_pods(api)) == 2, "the pods")
        kubelet = FakeKubelet(api, address)
        kubelet.set_ready("chat-0")

        def is_named() -> bool:
            for name in router_pods(api):  # again: the scheduler tries to place the pods now and then
                kubelet.set_waiting(name, waiting, message)
            return degraded(api)[0] == reason and expected in degraded(api)[1]

        expected = f"router {router_pods(api)[0]}: {waiting}: {message}"
        named = f"waiting for the router: {expected}"
        wait_until(lambda: is_named() and api.condition("Ready")["message"] == named, "both conditions")
    wait_until(lambda: api.events()[reason].startswith("router chat-router-"), "the event")


def test_routers_refused_by_a_quota_are_named(api: NamespaceClient) -> None:
    api.create("resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"count/pods": "1"}}})
    wait_until(lambda: "used" in api.get("resourcequotas", "few")["status"], "the quota")
    api.service(instances=1)
    wait_until(lambda: "router: FailedCreate: pods" in degraded(api)[1], "the cause")
    wait_until(lambda: "exceeded quota: few" in api.events()["RouterStartFailed"], "the event")
