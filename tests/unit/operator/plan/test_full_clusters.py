"""Roll-outs and drains of nodes on clusters without room for one more instance."""

from typing import Any

import pytest

from fulcrum_core.values import Phase
from fulcrum_operator.plan.instance_state import revision_of
from fulcrum_operator.plan.start_deadlines import PROGRESS_TIMEOUT_MIN_S, REPLACEMENT_WAIT_S, SURGE_WAIT_S
from tests.properties.simulated_service import SimulatedService, make_settled_service

STEP_S = 2.0


def serving(fleet: SimulatedService) -> int:
    return sum(i.status.phase is Phase.SERVING for i in fleet.instances.values())


def progressing(fleet: SimulatedService) -> tuple[str, str]:
    found = next(c for c in fleet.service.status.conditions if c.type == "Progressing")
    return found.reason, found.message


def run(fleet: SimulatedService, seconds: float, *, draining: bool = False) -> list[tuple[int, str]]:
    """Serving instances and the reason of Progressing after each reconcile."""
    seen = []
    for _ in range(int(seconds / STEP_S)):
        fleet.reconcile()
        seen.append((serving(fleet), progressing(fleet)[0]))
        if draining:
            fleet.evict_from_cordoned_nodes()
            fleet.reconcile()  # the operator sees the end of a pod begin
        fleet.advance(STEP_S)
    return seen


def all_updated(fleet: SimulatedService) -> bool:
    requested = fleet.pools["chat-flex"].spec.launch_revision
    return {revision_of(i) for i in fleet.instances.values()} == {requested}


def full_service(instances: int, **spec: Any) -> SimulatedService:
    """A settled service on a cluster whose nodes have room for exactly its instances."""
    fleet = make_settled_service({"instances": instances, **spec})
    fleet.capacity = instances
    return fleet


def test_a_rollout_on_a_full_cluster_replaces_in_place_after_a_while() -> None:
    fleet = full_service(4)
    fleet.edit_service(engine={"image": "next"})
    waiting = run(fleet, SURGE_WAIT_S - STEP_S)
    assert {count for count, _ in waiting} == {4}
    assert waiting[-1][1] == "RolloutProgressing"
    replacing = run(fleet, 900)
    assert min(count for count, _ in replacing) == 3
    assert "RollingOutInPlace" in {reason for _, reason in replacing}
    assert (all_updated(fleet), serving(fleet), progressing(fleet)[0]) == (True, 4, "Settled")


def test_the_condition_names_the_instance_without_room() -> None:
    fleet = full_service(4)
    fleet.edit_service(engine={"image": "next"})
    run(fleet, SURGE_WAIT_S + STEP_S)
    assert progressing(fleet)[1].split("; ")[1] == (
        "no node has room for chat-4: one instance fewer serves meanwhile"
    )


def test_replacing_in_place_keeps_the_floors() -> None:
    fleet = full_service(4, roles={"prefill": {"min": 2}, "decode": {"min": 2}})
    fleet.edit_service(engine={"image": "next"})
    assert min(count for count, _ in run(fleet, 2 * SURGE_WAIT_S)) == 4


def test_a_rollout_with_room_never_replaces_in_place() -> None:
    fleet = full_service(4)
    fleet.capacity = 5
    fleet.edit_service(engine={"image": "next"})
    seen = run(fleet, 600)
    assert min(count for count, _ in seen) == 4
    assert "RollingOutInPlace" not in {reason for _, reason in seen}
    assert all_updated(fleet)


@pytest.mark.parametrize("instances", [1, 2, 3, 8])
def test_instances_of_a_drained_node_are_replaced_first_where_there_is_room(instances: int) -> None:
    fleet = make_settled_service({"instances": instances})
    on_node = ["chat-0"] if instances < 8 else ["chat-0", "chat-1", "chat-2"]
    fleet.cordon(*on_node)
    fleet.reconcile()  # the operator sees the cordon; then pods are evicted
    seen = run(fleet, 120, draining=True)
    assert fleet.cordoned == {}
    assert min(count for count, _ in seen) >= max(1, instances - 1)
    assert (serving(fleet), len(fleet.instances), progressing(fleet)[0]) == (instances, instances, "Settled")


@pytest.mark.parametrize("instances", [1, 2, 3, 8])
def test_a_node_without_a_replacement_is_drained_after_a_while(instances: int) -> None:
    fleet = full_service(instances)
    on_node = ["chat-0"] if instances < 8 else ["chat-0", "chat-1", "chat-2"]
    fleet.cordon(*on_node)
    fleet.reconcile()
    seen = run(fleet, 90, draining=True)
    assert fleet.cordoned == {}
    assert serving(fleet) == instances - len(on_node)
    if instances < 3:
        assert {count for count, _ in seen[: int(REPLACEMENT_WAIT_S / STEP_S) - 1]} == {instances}
        assert "EvictionAllowed" in {reason for _, reason in seen}


@pytest.mark.parametrize(
    ("fault", "wait_s"),
    [
        pytest.param("starts_fail", REPLACEMENT_WAIT_S, id="it crash-loops"),
        pytest.param("refuses_instances", REPLACEMENT_WAIT_S, id="it cannot be created"),
        pytest.param("starts_hang", PROGRESS_TIMEOUT_MIN_S, id="it starts for ever"),
    ],
)
@pytest.mark.parametrize("instances", [1, 2, 8])
def test_a_drain_goes_on_if_the_replacement_never_serves(instances: int, fault: str, wait_s: float) -> None:
    fleet = make_settled_service({"instances": instances})
    setattr(fleet, fault, True)
    fleet.cordon("chat-0")
    fleet.reconcile()
    waiting = run(fleet, wait_s - STEP_S)
    assert {count for count, _ in waiting} == {instances}
    assert "EvictionAllowed" not in {reason for _, reason in waiting}
    seen = run(fleet, 2 * wait_s, draining=True)
    assert fleet.cordoned == {}
    if instances < 3:
        assert "EvictionAllowed" in {reason for _, reason in seen}
    assert serving(fleet) == instances - 1


def test_the_condition_says_that_no_instance_can_be_created() -> None:
    fleet = make_settled_service({"instances": 2})
    fleet.refuses_instances = True
    fleet.cordon("chat-0")
    run(fleet, REPLACEMENT_WAIT_S + STEP_S)
    assert progressing(fleet)[1].split("; ")[0] == (
        "chat-0 on nodes to be drained (cordoned): no new instance can be created instead, "
        "so an eviction may take one away"
    )


def largest_number_of_instances(fleet: SimulatedService, *names: str, taint: str = "") -> int:
    """The largest number of instances while these move away from their node."""
    fleet.cordon(*names, taint=taint)
    largest = 0
    for _ in range(200):
        fleet.reconcile()
        largest = max(largest, sum(i.status.phase is not Phase.TERMINATING for i in fleet.instances.values()))
        fleet.advance(STEP_S)
    assert (fleet.cordoned, serving(fleet)) == ({}, 8)
    return largest


@pytest.mark.parametrize(
    ("spec", "taint", "largest"),
    [
        pytest.param({}, "", 9, id="one at a time from a cordoned node"),
        pytest.param({"disruption": {"maxUnavailable": 3}}, "", 11, id="as many as the manifest allows"),
        pytest.param({}, "karpenter.sh/disrupted", 14, id="all at once if the node will be deleted"),
    ],
)
def test_instances_move_from_a_cordoned_node_a_few_at_a_time(
    spec: dict[str, Any], taint: str, largest: int
) -> None:
    fleet = make_settled_service({"instances": 8, **spec})
    names = [f"chat-{number}" for number in range(6)]
    assert largest_number_of_instances(fleet, *names, taint=taint) == largest


@pytest.mark.parametrize(("taint", "moves"), [("", False), ("ToBeDeletedByClusterAutoscaler", True)])
def test_instances_that_stay_on_cordoned_nodes_leave_only_nodes_that_will_be_deleted(
    taint: str, moves: bool
) -> None:
    fleet = make_settled_service({"instances": 2, "disruption": {"cordonedNodes": "Stay"}})
    fleet.cordon("chat-0", taint=taint)
    run(fleet, 60)
    assert (fleet.min_available, "chat-0" not in fleet.instances) == (1, moves)


def test_the_last_of_a_role_moves_too() -> None:
    fleet = make_settled_service({"instances": 2})
    fleet.cordon("chat-0")
    run(fleet, 60)  # nobody evicts: the operator itself drains and removes the instance
    assert sorted(fleet.instances) == ["chat-1", "chat-2"]
    assert fleet.assignment is not None
    assert {entry.role for entry in fleet.assignment.spec.roles.values()} == {"Prefill", "Decode"}


def test_an_uncordoned_node_keeps_its_instance() -> None:
    fleet = full_service(2)
    fleet.cordon("chat-0")
    run(fleet, 10)
    fleet.cordoned.clear()
    fleet.capacity = 2
    run(fleet, 60)
    assert sorted(fleet.instances) == ["chat-0", "chat-1"]
