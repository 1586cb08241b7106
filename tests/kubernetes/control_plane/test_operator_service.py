"""The operator on a real API server: what it makes of a PDService and keeps. The test plays the nodes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.kubernetes.clusters import fresh_namespace
from tests.kubernetes.control_plane.operators import (
    Engines,
    Kubelet,
    OperatorProcess,
    Space,
    engines_at,
    some_address,
    until,
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
class World:
    """A namespace that an operator looks after, and the hands of a kubelet."""

    space: Space
    kubelet: Kubelet
    engines: Engines

    def up(self, count: int = 4, **spec: Any) -> None:
        """A service all of whose instances serve."""
        names = [f"chat-{number}" for number in range(count)]
        self.space.service(**(spec if "pools" in spec else {"instances": count, **spec}))
        until(lambda: set(names) <= set(self.space.names("pods")), "the pods")
        self.kubelet.ready(*names)
        until(lambda: self.space.phases() == dict.fromkeys(names, "Serving"), "all to serve")

    def router_serves(self) -> None:
        """What the active router writes when it serves."""
        endpoint = {"addresses": ["10.1.2.3"], "conditions": {"ready": True}}
        self.space.patch("discovery.k8s.io/v1/endpointslices", "chat-router", {"endpoints": [endpoint]})

    def kubectl(self, *arguments: str) -> str:
        """As a person types it in this namespace; RuntimeError with what it says if it fails."""
        return self.space.cluster.kubectl(*arguments, f"--namespace={self.space.name}")

    def entry(self, name: str) -> dict[str, Any]:
        """What the assignment says of an instance."""
        return dict(self.space.get("pdassignments", "chat")["spec"]["roles"][name])


@pytest.fixture
def world(control_plane: Cluster, namespace: str, operator: OperatorProcess) -> Iterator[World]:  # noqa: ARG001
    address, space = some_address(), Space(control_plane, namespace)
    with engines_at(address) as engines:
        yield World(space, Kubelet(space, address), engines)


def of_fulcrum(space: Space, kind: str) -> list[str]:
    found = space.list(kind)
    return sorted(
        item["metadata"]["name"]
        for item in found
        if item["metadata"].get("labels", {}).get("fulcrum.dev/service") == "chat" or kind in ("pdservices",)
    )


def test_six_lines_become_pools_instances_pods_and_all_around_them(world: World) -> None:
    world.up()
    world.router_serves()
    until(lambda: world.space.condition("Ready")["status"] == "True", "the service to be ready")
    status = world.space.get("pdservices", "chat")["status"]
    assert {kind: of_fulcrum(world.space, kind) for kind in CHILDREN} == CHILDREN
    assert (status["ready"], status["ratio"], status["endpoint"]) == (
        "4/4",
        "2:2",
        f"http://chat.{world.space.name}.svc",
    )
    told = "pool chat-flex from 0 to 4 instances"
    until(lambda: world.space.events().get("ScaledUp") == told, "the event")
    written = world.space.get("pdservices", "chat")["metadata"]
    assert {"finalizers", "annotations"} & written.keys() == set(), "a user's object stays the user's"


def test_pods_are_owned_and_say_which_role_they_play(world: World) -> None:
    world.up(2)
    pods = {pod["metadata"]["name"]: pod["metadata"] for pod in world.space.list("pods")}
    until(
        lambda: (
            {
                name: world.space.get("pods", name)["metadata"]["labels"].get("fulcrum.dev/role")
                for name in ("chat-0", "chat-1")
            }
            == {"chat-0": "Prefill", "chat-1": "Decode"}
        ),
        "the roles",
    )
    owners = [(owner["kind"], owner["name"]) for owner in pods["chat-0"]["ownerReferences"]]
    assert owners == [("PDInstance", "chat-0")]


def test_a_flip_changes_an_effective_role_and_no_pod_but_its_label(world: World) -> None:
    world.up()
    before = world.space.get("pods", "chat-0")["metadata"]["uid"]
    entry = {"role": "Decode", "since": "2026-01-01T00:00:00Z", "by": "Person", "reason": "asked"}
    world.space.patch("pdassignments", "chat", {"spec": {"roles": {"chat-0": entry}}})
    until(
        lambda: world.space.get("pods", "chat-0")["metadata"]["labels"]["fulcrum.dev/role"] == "Decode",
        "the label",
    )
    pod, instance = world.space.get("pods", "chat-0"), world.space.get("pdinstances", "chat-0")
    assert (pod["metadata"]["uid"], instance["status"]["role"]) == (before, "Decode")
    until(lambda: "RoleFlipped" in world.space.events(), "the event")


def test_a_person_s_patch_is_followed_or_written_back_with_the_reason(world: World) -> None:
    world.up()
    pinned = {"role": "Decode", "by": "Person", "pinnedUntil": "2999-01-01T00:00:00Z"}
    wish = ("patch", "pda", "chat", "--type=merge", "-p")
    world.kubectl(*wish, json.dumps({"spec": {"roles": {"chat-0": pinned}}}))
    until(lambda: world.space.get("pdinstances", "chat-0")["status"]["role"] == "Decode", "the flip")
    world.kubectl(*wish, json.dumps({"spec": {"roles": {"chat-1": {"role": "Decode", "by": "Person"}}}}))
    until(lambda: "refused" in world.entry("chat-1"), "the refusal")
    why = "0 instances would serve Prefill, the floor is 1; leaving: chat-1"
    until(lambda: world.space.events().get("WishRefused") == f"chat-1 to Decode: {why}", "the event")
    refused = world.entry("chat-1")
    assert (refused["role"], refused["refused"]["role"], refused["refused"]["reason"]) == (
        "Prefill",
        "Decode",
        why,
    )
    assert (world.entry("chat-0")["role"], "refused" in world.entry("chat-0")) == ("Decode", False)


def test_each_engine_is_probed_once_in_each_of_its_lives(world: World) -> None:
    world.up(2)
    first = sorted(world.engines.asked)
    world.kubelet.died("chat-1", 1)
    until(lambda: world.space.phases()["chat-1"] != "Serving", "the end of chat-1")
    world.kubelet.ready("chat-1", restarts=1)
    until(lambda: world.space.phases()["chat-1"] == "Serving", "chat-1 to serve again")
    assert first == ["completion"] * 2 + ["prefill"] * 2
    assert sorted(world.engines.asked) == ["completion"] * 3 + ["prefill"] * 3


def test_an_engine_that_refuses_a_role_is_flipped_by_a_restart(world: World) -> None:
    world.engines.refuses = {"prefill"}
    world.up(2)
    strategies = [item["status"]["strategy"] for item in world.space.list("pdinstances")]
    assert strategies == ["Restart", "Restart"]


def test_an_image_that_does_not_pull_is_told(world: World) -> None:
    world.space.service(instances=2)
    until(lambda: "chat-1" in world.space.names("pods"), "the pods")
    world.kubelet.waits("chat-1", "ImagePullBackOff", 'Back-off pulling image "x:1"')
    until(lambda: "ImagePullFailed" in world.space.events(), "the event")
    assert world.space.events()["ImagePullFailed"] == 'chat-1: ImagePullBackOff: Back-off pulling image "x:1"'


def test_the_budget_follows_the_number_of_instances(world: World) -> None:
    world.up(4)
    budget = world.space.get("policy/v1/poddisruptionbudgets", "chat-engines")["spec"]["minAvailable"]
    world.space.patch("pdservices", "chat", {"spec": {"instances": 6}})
    until(
        lambda: (
            world.space.get("policy/v1/poddisruptionbudgets", "chat-engines")["spec"]["minAvailable"] == 5
        ),
        "the budget",
    )
    assert budget == 3


def test_one_engine_at_a_time_may_be_evicted(world: World) -> None:
    world.up(4)
    budget = "policy/v1/poddisruptionbudgets"
    until(
        lambda: world.space.get(budget, "chat-engines").get("status", {}).get("disruptionsAllowed") == 1,
        "the budget to count four",
    )
    world.space.evict("chat-3")
    with pytest.raises(LookupError, match="429"):
        world.space.evict("chat-2")
    until(lambda: "chat-4" in world.space.names("pods") or _reborn(world, "chat-3"), "the replacement")


def test_a_deleted_service_leaves_nothing(world: World) -> None:
    world.up(2)
    world.space.delete("pdservices", "chat", {"propagationPolicy": "Background"})
    until(
        lambda: not any(of_fulcrum(world.space, kind) for kind in ALL_KINDS), "everything to go", timeout_s=40
    )


def test_a_service_deleted_in_the_foreground_is_not_made_anew(world: World) -> None:
    world.up(2)
    world.space.delete("pdservices", "chat", {"propagationPolicy": "Foreground"})
    until(
        lambda: not any(of_fulcrum(world.space, kind) for kind in ALL_KINDS), "everything to go", timeout_s=40
    )


def test_a_missing_tier_is_a_condition_and_an_event_that_names_it_and_the_rest_serves_on(
    world: World,
) -> None:
    def says(reason: str) -> bool:
        return bool(world.space.condition("TiersAccepted")["reason"] == reason)

    world.up(2, qosTiers=["gold"])
    world.router_serves()
    assert says("TierNotFound")
    tier = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "QoSTier", "metadata": {"name": "gold"}, "spec": {}}
    world.space.create("qostiers", tier)
    until(lambda: says("TiersFound"), "the tier to be seen")
    until(lambda: world.space.condition("Ready")["status"] == "True", "the service to be ready")
    world.space.delete("qostiers", "gold")
    until(lambda: says("TierNotFound"), "the tier to be missed")
    until(lambda: list(world.space.told("TierMissing").values()) == [2], "an event for each time")
    named = world.space.condition("TiersAccepted")["message"], world.space.events()["TierMissing"]
    assert ["named gold in" in words for words in named] == [True, True]
    assert world.space.condition("Ready")["status"] == "True"


def test_an_instance_whose_node_is_lost_is_replaced_under_another_name(world: World) -> None:
    world.up(3)
    world.kubelet.node_lost("chat-1")
    until(lambda: "chat-3" in world.space.names("pods"), "the replacement")
    until(lambda: world.space.phases()["chat-1"] == "Failed", "its phase")
    world.kubelet.ready("chat-3")
    until(
        lambda: world.space.phases() == dict.fromkeys(("chat-0", "chat-2", "chat-3"), "Serving"),
        "the lost one to go",
        timeout_s=30,
    )
    until(lambda: "chat-1" not in world.space.names("pods"), "its pod to go", timeout_s=30)
    until(lambda: {"InstanceFailed", "InstanceReplaced"} <= world.space.events().keys(), "the events")


def test_an_instance_whose_pod_somebody_deletes_is_replaced(world: World) -> None:
    world.up(3)
    world.space.delete("pods", "chat-1")
    until(lambda: "chat-3" in world.space.names("pods") or _reborn(world, "chat-1"), "the replacement")


def _reborn(world: World, name: str) -> bool:
    pod = world.space.get("pods", name)
    return pod.get("status", {}).get("phase") == "Pending" and "deletionTimestamp" not in pod["metadata"]


def test_a_revision_that_does_not_come_to_serve_is_given_up_for_the_last_good_one(world: World) -> None:
    world.up(2, rollout={"progressDeadline": "3s"})
    world.router_serves()
    until(lambda: "lastGood" in world.space.get("pdpools", "chat-flex")["status"], "the good one to be known")
    world.space.patch("pdservices", "chat", {"spec": {"engine": {"image": "localhost/none:1"}}})
    until(lambda: "chat-2" in world.space.names("pods"), "the first of the new revision")
    world.kubelet.waits("chat-2", "ImagePullBackOff", 'Back-off pulling image "localhost/none:1"')
    until(lambda: "ImagePullFailed" in world.space.events(), "the image's event")
    until(lambda: world.space.condition("Degraded")["reason"] == "RolledBack", "the way back")
    until(lambda: world.space.phases() == {"chat-0": "Serving", "chat-1": "Serving"}, "the new one to go")
    until(lambda: "RolledBack" in world.space.events(), "the event")
    assert "chat-2 did not serve within 3 s: its engine" in world.space.condition("Degraded")["message"]
    assert "RolloutStarted" in world.space.events()
    assert world.space.condition("Ready")["status"] == "True"
    world.space.patch(
        "pdservices", "chat", {"spec": {"engine": {"image": "x:2"}, "rollout": {"paused": True}}}
    )
    until(lambda: world.space.condition("Progressing")["reason"] == "RolloutPaused", "the pause")
    assert world.space.phases() == {"chat-0": "Serving", "chat-1": "Serving"}


def test_a_scale_beyond_its_bounds_or_below_the_floors_is_clamped_and_told(world: World) -> None:
    def says(reason: str) -> bool:
        return bool(world.space.condition("ScalingLimited")["reason"] == reason)

    def told(words: str) -> bool:
        return world.space.events().get("ScalingLimited") == words

    world.up(1, pools=[{"name": "flex", "instances": {"min": 1, "max": 3}}])
    world.kubectl("scale", "pdp", "chat-flex", "--replicas=9")
    until(lambda: says("TooManyReplicas"), "the upper bound")
    allowed = "pool chat-flex: asked for 9 instances, the bounds 1 to 3 allow 3"
    until(lambda: told(allowed), "its event")
    names = ["chat-0", "chat-1", "chat-2"]
    until(lambda: set(names) <= set(world.space.names("pods")), "as many as are allowed")
    world.kubelet.ready(*names)
    until(lambda: world.space.phases() == dict.fromkeys(names, "Serving"), "all to serve")
    world.kubectl("scale", "pdp", "chat-flex", "--replicas=1")
    until(lambda: says("FloorsHold"), "the floors")
    until(lambda: "the floor is 1" in world.space.events()["ScalingLimited"], "their event")
    assert (sorted(world.space.phases()), list(world.space.phases().values()).count("Serving")) == (names, 2)
    assert world.space.get("pdpools", "chat-flex")["spec"]["replicas"] == 1, "nobody writes it but who scales"


def test_a_pool_is_scaled_by_its_owner(world: World) -> None:
    pools = [{"name": "flex", "role": "Flexible", "instances": {"min": 2, "max": 4}}]
    world.space.service(pools=pools, autoscaling={"scale": {"owner": "External"}})
    until(lambda: "chat-1" in world.space.names("pods"), "the pods")
    world.kubelet.ready("chat-0", "chat-1")
    world.space.cluster.kubectl(
        "scale", "pdp", "chat-flex", "--replicas=3", f"--namespace={world.space.name}"
    )
    until(lambda: "chat-2" in world.space.names("pods"), "the third pod")
    until(lambda: "pool chat-flex from 2 to 3 instances" in world.space.told("ScaledUp"), "the event")


def test_a_pod_that_is_refused_is_told_and_the_rest_serves_on(world: World) -> None:
    world.space.create("resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"count/pods": "3"}}})
    until(lambda: "status" in world.space.get("resourcequotas", "few"), "the quota")
    world.space.service(instances=4)
    until(lambda: "EngineDoesNotStart" in world.space.events(), "the event")
    assert "exceeded quota" in world.space.events()["EngineDoesNotStart"]


@pytest.mark.usefixtures("operator")
def test_services_of_one_name_in_two_namespaces_do_not_meet(control_plane: Cluster, namespace: str) -> None:
    address = some_address()
    with fresh_namespace(control_plane) as other, engines_at(address):
        spaces = [Space(control_plane, name) for name in (namespace, other)]
        for space, count in zip(spaces, (2, 3), strict=True):
            space.service(instances=count)
            until(lambda: f"chat-{count - 1}" in space.names("pods"), "the pods")  # noqa: B023
            Kubelet(space, address).ready(*(f"chat-{number}" for number in range(count)))
        for space in spaces:
            until(lambda: set(space.phases().values()) == {"Serving"}, "all to serve")  # noqa: B023
        assert [len(space.phases()) for space in spaces] == [2, 3]
