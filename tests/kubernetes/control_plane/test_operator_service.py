"""The operator on a real API server creates and repairs what a PDService needs. The kubelet is a fake."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.kubernetes.clusters import enforce_restricted_pod_security, temporary_namespace
from tests.kubernetes.control_plane.operator_process import (
    FakeEngines,
    FakeKubelet,
    NamespaceClient,
    OperatorProcess,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tools.kubernetes.cluster import Cluster

CHILDREN = {
    "apps/v1/deployments": ["chat-router"],
    "services": ["chat"],
    "discovery.k8s.io/v1/endpointslices": ["chat-router"],
    "coordination.k8s.io/v1/leases": ["chat-router"],
    "policy/v1/poddisruptionbudgets": ["chat-engines", "chat-router"],
    "networking.k8s.io/v1/networkpolicies": ["chat-engines", "chat-router"],
    "rbac.authorization.k8s.io/v1/roles": ["chat-router"],
    "rbac.authorization.k8s.io/v1/rolebindings": ["chat-router"],
    "serviceaccounts": ["chat-engine", "chat-router"],
}
ALL_KINDS = (*CHILDREN, "pods", "pdpools", "pdinstances", "pdassignments", "pdservices")


@dataclass
class ServiceUnderTest:
    """A namespace with an operator, a fake kubelet and fake engines."""

    api: NamespaceClient
    kubelet: FakeKubelet
    engines: FakeEngines

    def up(self, count: int = 4, **spec: Any) -> None:
        """Create a service and wait until all its instances serve."""
        names = [f"chat-{number}" for number in range(count)]
        self.api.service(**(spec if "pools" in spec else {"instances": count, **spec}))
        wait_until(lambda: set(names) <= set(self.api.names("pods")), "the pods")
        self.kubelet.set_ready(*names)
        wait_until(lambda: self.api.phases() == dict.fromkeys(names, "Serving"), "all to serve")

    def router_serves(self) -> None:
        """Write the EndpointSlice as the active router does when it serves."""
        endpoint = {"addresses": ["10.1.2.3"], "conditions": {"ready": True}}
        self.api.patch("discovery.k8s.io/v1/endpointslices", "chat-router", {"endpoints": [endpoint]})

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in this namespace; raises RuntimeError with its error output."""
        return self.api.cluster.kubectl(*arguments, f"--namespace={self.api.name}")

    def entry(self, name: str) -> dict[str, Any]:
        """Entry of an instance in the assignment."""
        return dict(self.api.get("pdassignments", "chat")["spec"]["roles"][name])


@pytest.fixture
def under_test(
    control_plane: Cluster,
    namespace: str,
    operator: OperatorProcess,  # noqa: ARG001
) -> Iterator[ServiceUnderTest]:
    address, api = pick_loopback_address(), NamespaceClient(control_plane, namespace)
    with serve_engines(address) as engines:
        yield ServiceUnderTest(api, FakeKubelet(api, address), engines)


def names_of_service(api: NamespaceClient, kind: str) -> list[str]:
    found = api.list(kind)
    return sorted(
        item["metadata"]["name"]
        for item in found
        if item["metadata"].get("labels", {}).get("fulcrum.dev/service") == "chat" or kind in ("pdservices",)
    )


def test_a_minimal_service_becomes_pools_instances_pods_and_children(under_test: ServiceUnderTest) -> None:
    under_test.up()
    under_test.router_serves()
    wait_until(lambda: under_test.api.condition("Ready")["status"] == "True", "the service to be ready")
    status = under_test.api.get("pdservices", "chat")["status"]
    assert {kind: names_of_service(under_test.api, kind) for kind in CHILDREN} == CHILDREN
    assert (status["ready"], status["ratio"], status["endpoint"]) == (
        "4/4",
        "2:2",
        f"http://chat.{under_test.api.name}.svc",
    )
    message = "pool chat-flex scaled from 0 to 4 instances"
    wait_until(lambda: under_test.api.events().get("ScaledUp") == message, "the event")
    written = under_test.api.get("pdservices", "chat")["metadata"]
    assert {"finalizers", "annotations"} & written.keys() == set(), (
        "the operator adds nothing to the user's object"
    )


def test_pods_are_owned_by_their_instance_and_labelled_with_its_role(under_test: ServiceUnderTest) -> None:
    under_test.up(2)
    pods = {pod["metadata"]["name"]: pod["metadata"] for pod in under_test.api.list("pods")}
    wait_until(
        lambda: (
            {
                name: under_test.api.get("pods", name)["metadata"]["labels"].get("fulcrum.dev/role")
                for name in ("chat-0", "chat-1")
            }
            == {"chat-0": "Prefill", "chat-1": "Decode"}
        ),
        "the roles",
    )
    owners = [(owner["kind"], owner["name"]) for owner in pods["chat-0"]["ownerReferences"]]
    assert owners == [("PDInstance", "chat-0")]


def test_a_flip_changes_the_role_and_the_pods_label_but_not_the_pod(under_test: ServiceUnderTest) -> None:
    under_test.up()
    before = under_test.api.get("pods", "chat-0")["metadata"]["uid"]
    entry = {"role": "Decode", "since": "2026-01-01T00:00:00Z", "by": "Person", "reason": "requested"}
    under_test.api.patch("pdassignments", "chat", {"spec": {"roles": {"chat-0": entry}}})
    wait_until(
        lambda: under_test.api.get("pods", "chat-0")["metadata"]["labels"]["fulcrum.dev/role"] == "Decode",
        "the label",
    )
    pod, instance = under_test.api.get("pods", "chat-0"), under_test.api.get("pdinstances", "chat-0")
    assert (pod["metadata"]["uid"], instance["status"]["role"]) == (before, "Decode")
    wait_until(lambda: "RoleFlipped" in under_test.api.events(), "the event")


def test_kubectl_shows_who_plays_which_role(under_test: ServiceUnderTest) -> None:
    under_test.up()
    cells = ("get", "pda", "chat", "--output=wide", "--no-headers")

    def shown() -> list[str]:
        return under_test.kubectl(*cells).split()

    wait_until(lambda: shown()[:4] == ["chat", "2", "2", "0"], "two instances of each role, none cordoned")
    assert " ".join(shown()[7:11]) == "chat-0, chat-1 chat-2, chat-3"
    entry = {"role": "Decode", "since": "2026-01-01T00:00:00Z", "by": "Person", "reason": "requested"}
    under_test.api.patch("pdassignments", "chat", {"spec": {"roles": {"chat-0": entry}}})
    wait_until(lambda: shown()[:4] == ["chat", "1", "3", "0"], "the roles after a flip")


def test_a_manual_assignment_is_applied_or_reverted_with_a_reason(under_test: ServiceUnderTest) -> None:
    under_test.up()
    pinned = {"role": "Decode", "by": "Person", "pinnedUntil": "2999-01-01T00:00:00Z"}
    patch = ("patch", "pda", "chat", "--type=merge", "-p")
    under_test.kubectl(*patch, json.dumps({"spec": {"roles": {"chat-0": pinned}}}))
    wait_until(lambda: under_test.api.get("pdinstances", "chat-0")["status"]["role"] == "Decode", "the flip")
    under_test.kubectl(
        *patch, json.dumps({"spec": {"roles": {"chat-1": {"role": "Decode", "by": "Person"}}}})
    )
    wait_until(lambda: "refused" in under_test.entry("chat-1"), "the refusal")
    why = "0 instances would serve Prefill, the floor is 1; leaving: chat-1"
    wait_until(
        lambda: under_test.api.events().get("AssignmentRefused") == f"chat-1 to Decode: {why}", "the event"
    )
    refused = under_test.entry("chat-1")
    assert (refused["role"], refused["refused"]["role"], refused["refused"]["reason"]) == (
        "Prefill",
        "Decode",
        why,
    )
    assert (under_test.entry("chat-0")["role"], "refused" in under_test.entry("chat-0")) == ("Decode", False)


def test_an_engine_is_probed_once_after_each_start(under_test: ServiceUnderTest) -> None:
    under_test.up(2)
    first = sorted(under_test.engines.requests)
    under_test.kubelet.set_terminated("chat-1", 1)
    wait_until(lambda: under_test.api.phases()["chat-1"] != "Serving", "the end of chat-1")
    under_test.kubelet.set_ready("chat-1", restarts=1)
    wait_until(lambda: under_test.api.phases()["chat-1"] == "Serving", "chat-1 to serve again")
    assert first == ["completion"] * 2 + ["prefill"] * 2
    assert sorted(under_test.engines.requests) == ["completion"] * 3 + ["prefill"] * 3


def test_an_engine_that_refuses_a_role_is_flipped_by_a_restart(under_test: ServiceUnderTest) -> None:
    under_test.engines.refuses = {"prefill"}
    under_test.up(2)
    strategies = [item["status"]["flipStrategy"] for item in under_test.api.list("pdinstances")]
    assert strategies == ["Restart", "Restart"]


def test_a_failing_image_pull_causes_an_event(under_test: ServiceUnderTest) -> None:
    under_test.api.service(instances=2)
    wait_until(lambda: "chat-1" in under_test.api.names("pods"), "the pods")
    under_test.kubelet.set_waiting("chat-1", "ImagePullBackOff", 'Back-off pulling image "x:1"')
    wait_until(lambda: "ImagePullFailed" in under_test.api.events(), "the event")
    assert (
        under_test.api.events()["ImagePullFailed"] == 'chat-1: ImagePullBackOff: Back-off pulling image "x:1"'
    )


def test_the_disruption_budget_follows_the_number_of_instances(under_test: ServiceUnderTest) -> None:
    under_test.up(4)
    budget = under_test.api.get("policy/v1/poddisruptionbudgets", "chat-engines")["spec"]["minAvailable"]
    under_test.api.patch("pdservices", "chat", {"spec": {"instances": 6}})
    wait_until(
        lambda: (
            under_test.api.get("policy/v1/poddisruptionbudgets", "chat-engines")["spec"]["minAvailable"] == 5
        ),
        "the budget",
    )
    assert budget == 3


def test_one_engine_at_a_time_may_be_evicted(under_test: ServiceUnderTest) -> None:
    under_test.up(4)
    budget = "policy/v1/poddisruptionbudgets"
    wait_until(
        lambda: under_test.api.get(budget, "chat-engines").get("status", {}).get("disruptionsAllowed") == 1,
        "the budget to count four",
    )
    under_test.api.evict("chat-3")
    with pytest.raises(LookupError, match="429"):
        under_test.api.evict("chat-2")
    wait_until(
        lambda: "chat-4" in under_test.api.names("pods") or _is_recreated(under_test, "chat-3"),
        "the replacement",
    )


def test_a_deleted_service_leaves_no_objects(under_test: ServiceUnderTest) -> None:
    under_test.up(2)
    under_test.api.delete("pdservices", "chat", {"propagationPolicy": "Background"})
    wait_until(
        lambda: not any(names_of_service(under_test.api, kind) for kind in ALL_KINDS),
        "everything to be deleted",
        timeout_s=40,
    )


def test_foreground_deletion_leaves_no_objects(under_test: ServiceUnderTest) -> None:
    under_test.up(2)
    under_test.api.delete("pdservices", "chat", {"propagationPolicy": "Foreground"})
    wait_until(
        lambda: not any(names_of_service(under_test.api, kind) for kind in ALL_KINDS),
        "everything to be deleted",
        timeout_s=40,
    )


def test_a_missing_tier_is_a_condition_and_an_event_and_the_service_stays_ready(
    under_test: ServiceUnderTest,
) -> None:
    def has_reason(reason: str) -> bool:
        return bool(under_test.api.condition("TiersAccepted")["reason"] == reason)

    under_test.up(2, qosTiers=["gold"])
    under_test.router_serves()
    assert has_reason("TierNotFound")
    tier = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "QoSTier", "metadata": {"name": "gold"}, "spec": {}}
    under_test.api.create("qostiers", tier)
    wait_until(lambda: has_reason("TiersFound"), "the tier to be found")
    wait_until(lambda: under_test.api.condition("Ready")["status"] == "True", "the service to be ready")
    under_test.api.delete("qostiers", "gold")
    wait_until(lambda: has_reason("TierNotFound"), "the tier to be missing")
    wait_until(
        lambda: list(under_test.api.event_counts("TierMissing").values()) == [2], "an event for each time"
    )
    named = under_test.api.condition("TiersAccepted")["message"], under_test.api.events()["TierMissing"]
    assert ["named gold in" in message for message in named] == [True, True]
    assert under_test.api.condition("Ready")["status"] == "True"


def test_an_instance_on_a_lost_node_is_replaced_under_another_name(under_test: ServiceUnderTest) -> None:
    under_test.up(3)
    under_test.kubelet.set_node_lost("chat-1")
    wait_until(lambda: "chat-3" in under_test.api.names("pods"), "the replacement")
    wait_until(lambda: under_test.api.phases()["chat-1"] == "Failed", "its phase")
    under_test.kubelet.set_ready("chat-3")
    wait_until(
        lambda: under_test.api.phases() == dict.fromkeys(("chat-0", "chat-2", "chat-3"), "Serving"),
        "the lost instance to be deleted",
        timeout_s=30,
    )
    wait_until(lambda: "chat-1" not in under_test.api.names("pods"), "its pod to be deleted", timeout_s=30)
    wait_until(lambda: {"InstanceFailed", "InstanceReplaced"} <= under_test.api.events().keys(), "the events")


def test_an_instance_whose_pod_is_deleted_is_replaced(under_test: ServiceUnderTest) -> None:
    under_test.up(3)
    under_test.api.delete("pods", "chat-1")
    wait_until(
        lambda: "chat-3" in under_test.api.names("pods") or _is_recreated(under_test, "chat-1"),
        "the replacement",
    )


def _is_recreated(under_test: ServiceUnderTest, name: str) -> bool:
    pod = under_test.api.get("pods", name)
    return pod.get("status", {}).get("phase") == "Pending" and "deletionTimestamp" not in pod["metadata"]


def test_a_revision_that_misses_its_progress_deadline_is_rolled_back(under_test: ServiceUnderTest) -> None:
    under_test.up(2, rollout={"progressDeadline": "3s"})
    under_test.router_serves()
    wait_until(
        lambda: "lastGood" in under_test.api.get("pdpools", "chat-flex")["status"],
        "the last good revision to be stored",
    )
    under_test.api.patch("pdservices", "chat", {"spec": {"engine": {"image": "localhost/none:1"}}})
    wait_until(lambda: "chat-2" in under_test.api.names("pods"), "the first pod of the new revision")
    under_test.kubelet.set_waiting("chat-2", "ImagePullBackOff", 'Back-off pulling image "localhost/none:1"')
    wait_until(lambda: "ImagePullFailed" in under_test.api.events(), "the image's event")
    wait_until(lambda: under_test.api.condition("Degraded")["reason"] == "RolledBack", "the rollback")
    wait_until(
        lambda: under_test.api.phases() == {"chat-0": "Serving", "chat-1": "Serving"},
        "the new instance to be deleted",
    )
    wait_until(lambda: "RolledBack" in under_test.api.events(), "the event")
    assert "chat-2 did not serve within 3 s: its engine" in under_test.api.condition("Degraded")["message"]
    assert "RolloutStarted" in under_test.api.events()
    assert under_test.api.condition("Ready")["status"] == "True"
    under_test.api.patch(
        "pdservices", "chat", {"spec": {"engine": {"image": "x:2"}, "rollout": {"paused": True}}}
    )
    wait_until(lambda: under_test.api.condition("Progressing")["reason"] == "RolloutPaused", "the pause")
    assert under_test.api.phases() == {"chat-0": "Serving", "chat-1": "Serving"}


def test_a_scale_outside_bounds_or_below_floors_is_clamped_and_reported(under_test: ServiceUnderTest) -> None:
    def has_reason(reason: str) -> bool:
        return bool(under_test.api.condition("ScalingLimited")["reason"] == reason)

    def is_reported(message: str) -> bool:
        return under_test.api.events().get("ScalingLimited") == message

    floors = {"decode": {"min": 2}}
    under_test.up(1, roles=floors, pools=[{"name": "flex", "instances": {"min": 1, "max": 3}}])
    under_test.kubectl("scale", "pdp", "chat-flex", "--replicas=9")
    wait_until(lambda: has_reason("TooManyReplicas"), "the upper bound")
    allowed = "pool chat-flex: 9 instances requested; the bounds 1 to 3 allow 3"
    wait_until(lambda: is_reported(allowed), "its event")
    names = ["chat-0", "chat-1", "chat-2"]
    wait_until(lambda: set(names) <= set(under_test.api.names("pods")), "as many as are allowed")
    under_test.kubelet.set_ready(*names)
    wait_until(lambda: under_test.api.phases() == dict.fromkeys(names, "Serving"), "all to serve")
    under_test.kubectl("scale", "pdp", "chat-flex", "--replicas=1")
    wait_until(lambda: has_reason("LimitedByFloors"), "the floors")
    wait_until(lambda: "the floor is" in under_test.api.events()["ScalingLimited"], "their event")
    assert under_test.api.phases() == dict.fromkeys(names, "Serving")
    assert under_test.api.get("pdpools", "chat-flex")["spec"]["replicas"] == 1, (
        "only the user writes the pool's replicas"
    )


def test_a_pool_with_an_external_owner_is_scaled_by_kubectl(under_test: ServiceUnderTest) -> None:
    pools = [{"name": "flex", "role": "Flexible", "instances": {"min": 2, "max": 4}}]
    under_test.api.service(pools=pools, autoscaling={"scale": {"owner": "External"}})
    wait_until(lambda: "chat-1" in under_test.api.names("pods"), "the pods")
    under_test.kubelet.set_ready("chat-0", "chat-1")
    under_test.api.cluster.kubectl(
        "scale", "pdp", "chat-flex", "--replicas=3", f"--namespace={under_test.api.name}"
    )
    wait_until(lambda: "chat-2" in under_test.api.names("pods"), "the third pod")
    message = "pool chat-flex scaled from 2 to 3 instances"
    wait_until(lambda: message in under_test.api.event_counts("ScaledUp"), "the event")


def test_a_pod_refused_by_a_quota_causes_an_event(under_test: ServiceUnderTest) -> None:
    under_test.api.create(
        "resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"count/pods": "3"}}}
    )
    wait_until(lambda: "status" in under_test.api.get("resourcequotas", "few"), "the quota")
    under_test.api.service(instances=4)
    wait_until(lambda: "EngineStartFailed" in under_test.api.events(), "the event")
    assert "exceeded quota" in under_test.api.events()["EngineStartFailed"]


@pytest.mark.usefixtures("operator")
def test_services_of_one_name_in_two_namespaces_are_independent(
    control_plane: Cluster, namespace: str
) -> None:
    address = pick_loopback_address()
    with temporary_namespace(control_plane) as other, serve_engines(address):
        apis = [NamespaceClient(control_plane, name) for name in (namespace, other)]
        for api, count in zip(apis, (2, 3), strict=True):
            api.service(instances=count)
            wait_until(lambda: f"chat-{count - 1}" in api.names("pods"), "the pods")  # noqa: B023
            FakeKubelet(api, address).set_ready(*(f"chat-{number}" for number in range(count)))
        for api in apis:
            wait_until(lambda: set(api.phases().values()) == {"Serving"}, "all to serve")  # noqa: B023
        assert [len(api.phases()) for api in apis] == [2, 3]


def test_each_piece_that_a_restricted_namespace_lacks_is_named(under_test: ServiceUnderTest) -> None:
    """The routers of this operator request nothing, as only the chart sets their requests; no node exists."""
    api = under_test.api
    enforce_restricted_pod_security(api.cluster, api.name)
    hard = {"requests.cpu": "4", "requests.memory": "4Gi", "requests.ephemeral-storage": "4Gi"}
    api.create("resourcequotas", {"metadata": {"name": "team"}, "spec": {"hard": hard}})
    wait_until(lambda: "status" in api.get("resourcequotas", "team"), "the quota")
    under_test.up(2)
    wait_until(lambda: "must specify requests.cpu" in api.events().get("RouterStartFailed", ""), "the quota")
    wait_until(lambda: api.condition("Degraded")["reason"] == "RouterStartFailed", "the condition")
    requests = {"cpu": "100m", "memory": "64Mi", "ephemeral-storage": "64Mi"}
    limits = [{"type": "Container", "defaultRequest": requests}]
    api.create("limitranges", {"metadata": {"name": "team"}, "spec": {"limits": limits}})
    wait_until(lambda: "no nodes available" in api.events().get("Unschedulable", ""), "the missing nodes")
    wait_until(lambda: api.condition("Degraded")["reason"] == "Unschedulable", "the condition")
