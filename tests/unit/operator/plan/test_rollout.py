"""Instances over several reconciles: roll-outs, scaling, lost engines and flips by a restart."""

from collections.abc import Callable
from typing import Any

import pytest

from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.assignment import build_flip
from fulcrum_core.ports import EngineState
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan import Observed, plan_service
from fulcrum_operator.plan.instance_state import revision_of
from tests.properties.simulated_service import BAD_PROFILE, SimulatedService, make_settled_service
from tests.unit.operator.builders import STARTING, D, P, engine, engines, pool, settled

FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}
BOUNDS: dict[str, Any] = {"name": "flex", "instances": {"min": 1, "max": 9}}


def serving_names(chat_fleet: SimulatedService) -> list[str]:
    return sorted(n for n, i in chat_fleet.instances.items() if i.status.phase is Phase.SERVING)


def condition(chat_fleet: SimulatedService, kind: str) -> tuple[str, str]:
    found = next(c for c in chat_fleet.service.status.conditions if c.type == kind)
    return found.status, found.reason


def record_counts(chat_fleet: SimulatedService, reconciles: int = 60) -> list[tuple[int, int]]:
    """Instances and serving instances after each reconcile."""
    observed = []
    for _ in range(reconciles):
        chat_fleet.reconcile()
        observed.append((len(chat_fleet.instances), len(serving_names(chat_fleet))))
        chat_fleet.advance(2.0)
    return observed


def all_updated(chat_fleet: SimulatedService) -> bool:
    requested = chat_fleet.pools["chat-flex"].spec.launch_revision
    return {revision_of(i) for i in chat_fleet.instances.values()} == {requested}


@pytest.mark.parametrize(
    ("rules", "most", "fewest"),
    [
        pytest.param({}, 5, 4, id="one more at a time, none fewer"),
        pytest.param({"maxSurge": 0, "maxUnavailable": 1}, 4, 3, id="in place, one at a time"),
        pytest.param({"maxSurge": 4}, 8, 4, id="all at once"),
    ],
)
def test_rollout_keeps_max_surge_and_max_unavailable(rules: dict[str, Any], most: int, fewest: int) -> None:
    chat_fleet = make_settled_service({"instances": 4, "rollout": rules})
    chat_fleet.edit_service(engine={"image": "next"})
    counts = record_counts(chat_fleet)
    assert (
        max(n for n, _ in counts),
        min(n for _, n in counts),
        len(serving_names(chat_fleet)),
        all_updated(chat_fleet),
    ) == (
        most,
        fewest,
        4,
        True,
    )


def test_single_instance_is_replaced_without_a_gap() -> None:
    chat_fleet = make_settled_service({"instances": 1})
    chat_fleet.edit_service(engine={"image": "next"})
    counts = record_counts(chat_fleet, 20)
    assert (min(n for _, n in counts), len(chat_fleet.instances), all_updated(chat_fleet)) == (1, 1, True)


@pytest.mark.parametrize("crashed", ["chat-0", "chat-1", "chat-2"])
def test_a_rollout_goes_on_when_all_its_new_instances_have_the_same_role(crashed: str) -> None:
    """The floor keeps all old prefill instances: a new decode instance flips before one of them leaves."""
    roles = {"prefill": {"min": 2}, "decode": {"min": 1}}
    fleet = make_settled_service(
        {"pools": [BOUNDS], "roles": roles, "autoscaling": {"scale": {"owner": "External"}}}
    )
    fleet.scale("chat-flex", 3)
    fleet.settle()
    fleet.crash(crashed)
    fleet.scale("chat-flex", 4)
    fleet.reconcile()
    fleet.edit_service(engine={"image": "next"}, rollout={"maxSurge": 1})
    fleet.scale("chat-flex", 3)
    fleet.settle()
    assert (len(serving_names(fleet)), all_updated(fleet)) == (3, True), fleet.describe()


def test_paused_rollout_replaces_nothing_and_scales_with_the_last_good_revision() -> None:
    chat_fleet = make_settled_service({"pools": [BOUNDS], "autoscaling": {"scale": {"owner": "External"}}})
    chat_fleet.scale("chat-flex", 2)
    chat_fleet.settle()
    old = {revision_of(i) for i in chat_fleet.instances.values()}
    chat_fleet.edit_service(engine={"image": "next"}, rollout={"paused": True})
    chat_fleet.scale("chat-flex", 3)
    chat_fleet.settle()
    assert (len(serving_names(chat_fleet)), {revision_of(i) for i in chat_fleet.instances.values()}) == (
        3,
        old,
    )
    assert condition(chat_fleet, "Progressing") == ("False", "RolloutPaused")
    chat_fleet.edit_service(rollout={})
    chat_fleet.settle()
    assert (len(serving_names(chat_fleet)), all_updated(chat_fleet)) == (3, True)


def test_revision_that_does_not_start_is_rolled_back_until_the_spec_changes() -> None:
    chat_fleet = make_settled_service({"instances": 4})
    before = dict(chat_fleet.instances)
    chat_fleet.edit_service(engine={"profile": BAD_PROFILE})
    counts = record_counts(chat_fleet)
    assert min(n for _, n in counts) == 4
    assert set(chat_fleet.instances) == set(before)
    assert (condition(chat_fleet, "Degraded"), condition(chat_fleet, "Ready")) == (
        ("True", "RolledBack"),
        ("True", "InstancesServing"),
    )
    chat_fleet.edit_service(engine={"image": "fixed"})
    chat_fleet.settle()
    assert (all_updated(chat_fleet), condition(chat_fleet, "Degraded")) == (True, ("False", "AsExpected"))


def test_revision_that_never_becomes_ready_is_rolled_back() -> None:
    chat_fleet = make_settled_service({"instances": 4})
    chat_fleet.edit_service(engine={"image": "next"})
    chat_fleet.reconcile()
    for new in (e for e in chat_fleet.engines.values() if e.state is EngineState.STARTING):
        new.ready_at_s, new.endpoint = float("inf"), "127.0.0.1:1"
    record_counts(chat_fleet, 90)
    assert condition(chat_fleet, "Degraded") == ("True", "RolledBack")


def test_past_rollout_deadline_requeues_nothing() -> None:
    """A return to the last good revision has no deadline: there is nothing to roll back."""
    chat_fleet = make_settled_service({"instances": 4})
    chat_fleet.edit_service(engine={"image": "next"})
    record_counts(chat_fleet, 12)
    chat_fleet.edit_service(engine={})
    chat_fleet.reconcile()
    for new in (e for e in chat_fleet.engines.values() if e.state is EngineState.STARTING):
        new.ready_at_s = float("inf")
    chat_fleet.reconcile()
    chat_fleet.advance(100_000.0)
    _, plan = chat_fleet.reconcile()
    assert condition(chat_fleet, "Progressing") == ("True", "RolloutProgressing")
    assert plan.requeue_after_s is None or plan.requeue_after_s > 0.0


def test_rollout_continues_after_an_operator_restart_and_a_scale() -> None:
    chat_fleet = make_settled_service({"pools": [BOUNDS], "autoscaling": {"scale": {"owner": "External"}}})
    chat_fleet.scale("chat-flex", 4)
    chat_fleet.settle()
    chat_fleet.edit_service(engine={"image": "next"})
    record_counts(chat_fleet, 6)
    chat_fleet.accepted = None
    chat_fleet.scale("chat-flex", 6)
    chat_fleet.settle()
    assert (len(serving_names(chat_fleet)), len(chat_fleet.instances), all_updated(chat_fleet)) == (
        6,
        6,
        True,
    )


def test_incompatible_revisions_each_serve_both_roles_during_a_rollout() -> None:
    chat_fleet = make_settled_service({"instances": 4})
    chat_fleet.edit_service(engine={"image": "next"})
    incomplete = []
    for _ in range(40):
        chat_fleet.reconcile()
        incomplete.append(chat_fleet.groups_missing_a_role())
        chat_fleet.advance(2.0)
    assert (incomplete, all_updated(chat_fleet)) == ([[]] * 40, True)


def test_scaling_up_and_back_keeps_the_serving_instances() -> None:
    chat_fleet = make_settled_service({"pools": [{**BOUNDS, "instances": {"min": 4, "max": 9}}]})
    serving = serving_names(chat_fleet)
    chat_fleet.scale("chat-flex", 8)
    record_counts(chat_fleet, 2)
    chat_fleet.scale("chat-flex", 4)
    counts = record_counts(chat_fleet, 10)
    assert (serving_names(chat_fleet), min(n for _, n in counts)) == (serving, 4)


@pytest.mark.parametrize(
    ("floors", "serving", "limited"),
    [
        pytest.param((2, 1), 3, ("True", "LimitedByFloors"), id="higher floors are kept and reported"),
        pytest.param((1, 1), 1, ("False", "DesiredWithinRange"), id="a single instance plays both roles"),
    ],
)
def test_scale_to_one_instance_stops_at_floors_that_it_cannot_meet(
    floors: tuple[int, int], serving: int, limited: tuple[str, str]
) -> None:
    roles = {"prefill": {"min": floors[0]}, "decode": {"min": floors[1]}}
    spec = {"pools": [{**BOUNDS, "instances": {"min": 3, "max": 9}}], "roles": roles}
    chat_fleet = make_settled_service(spec)
    chat_fleet.edit_service(pools=[BOUNDS])
    chat_fleet.scale("chat-flex", 1)
    chat_fleet.settle()
    assert (len(serving_names(chat_fleet)), condition(chat_fleet, "ScalingLimited")) == (serving, limited)
    assert condition(chat_fleet, "Ready") == ("True", "InstancesServing")


@pytest.mark.parametrize(
    ("owner", "count"), [("Fulcrum", 4), ("External", 2)], ids=["bounds move replicas", "nobody but you"]
)
def test_changed_bounds_move_the_replicas_only_where_fulcrum_owns_them(owner: str, count: int) -> None:
    chat_fleet = make_settled_service({"instances": 2, "autoscaling": {"scale": {"owner": owner}}})
    chat_fleet.edit_service(instances=4)
    chat_fleet.settle()
    assert (chat_fleet.pools["chat-flex"].spec.replicas, len(serving_names(chat_fleet))) == (count, 4)


def lose_node(chat_fleet: SimulatedService) -> None:
    chat_fleet.lose_engine("chat-1", deleted=False)


def evict(chat_fleet: SimulatedService) -> None:
    chat_fleet.evict("chat-1")


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        pytest.param(lose_node, Phase.FAILED, id="lost with its node: failed"),
        pytest.param(evict, Phase.DRAINING, id="stopped by someone else: drains at once"),
    ],
)
def test_lost_engine_is_replaced_at_once(fault: Callable[[SimulatedService], None], phase: Phase) -> None:
    chat_fleet = make_settled_service({"instances": 4})
    fault(chat_fleet)
    _, plan = chat_fleet.reconcile()
    assert (chat_fleet.instances["chat-1"].status.phase, [i.metadata.name for i in plan.start]) == (
        phase,
        ["chat-4"],
    )
    record_counts(chat_fleet, 40)
    assert (serving_names(chat_fleet), sorted(chat_fleet.instances)) == (
        ["chat-0", "chat-2", "chat-3", "chat-4"],
        ["chat-0", "chat-2", "chat-3", "chat-4"],
    )


def test_repeatedly_lost_instances_are_replaced_more_slowly() -> None:
    chat_fleet = make_settled_service({"instances": 2})
    made = set(chat_fleet.instances)
    for _ in range(10):
        chat_fleet.reconcile()
        made |= set(chat_fleet.instances)
        for name, one in chat_fleet.engines.items():
            if one.state is not EngineState.LOST:
                chat_fleet.lose_engine(name, deleted=False)
        chat_fleet.advance(1.0)
    assert len(made) <= 6


def test_a_flip_by_restart_starts_the_engine_for_the_new_role() -> None:
    chat_fleet = make_settled_service({"instances": 4, "autoscaling": {"flip": {"strategy": "Restart"}}})
    assert {n: i.spec.role for n, i in chat_fleet.instances.items()} == FOUR
    assert chat_fleet.assignment
    chat_fleet.write_assignment(
        build_flip(
            chat_fleet.assignment.spec, "chat-1", D, by=Actor.PERSON, reason="", now_s=chat_fleet.now_s
        )
    )
    phases = []
    for _ in range(12):
        chat_fleet.reconcile()
        phases.append(chat_fleet.instances["chat-1"].status.phase)
        chat_fleet.advance(1.0)
    assert list(dict.fromkeys(phases)) == [
        *(Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING, Phase.SERVING),
    ]
    assert (
        chat_fleet.engines["chat-1"].created_from.spec.role,
        chat_fleet.instances["chat-1"].status.role,
    ) == (D, D)


def test_a_rollout_does_not_count_an_instance_that_restarts_to_flip() -> None:
    """Else it would take one more of that role, before the flipped one serves."""
    floors = {"prefill": {"min": 1}, "decode": {"min": 2}}
    spec = {"instances": 4, "roles": floors, "autoscaling": {"flip": {"strategy": "Restart"}}}
    chat_fleet = make_settled_service(spec)
    assert chat_fleet.assignment
    flipped = build_flip(
        chat_fleet.assignment.spec, "chat-1", D, by=Actor.PERSON, reason="", now_s=chat_fleet.now_s
    )
    chat_fleet.write_assignment(flipped)
    chat_fleet.edit_service(engine={"image": "next"}, rollout={"maxSurge": 0, "maxUnavailable": 2})
    chat_fleet.reconcile()
    assert chat_fleet.serving_names(chat_fleet.assignment.spec, D) == {"chat-2", "chat-3"}


def test_a_refused_cordon_is_written_back_with_the_reason() -> None:
    chat_fleet = make_settled_service({"instances": 2})
    assert chat_fleet.assignment
    spec = chat_fleet.assignment.spec
    requested = spec.roles["chat-0"].model_copy(update={"cordoned": True, "cordoned_by": Actor.PERSON})
    chat_fleet.write_assignment(spec.model_copy(update={"roles": {**spec.roles, "chat-0": requested}}))
    chat_fleet.reconcile()
    back = chat_fleet.assignment.spec.roles["chat-0"]
    assert back.refused is not None
    assert (back.cordoned, back.refused.role, back.refused.reason) == (
        False,
        None,
        "0 instances would serve Prefill, the floor is 1; leaving: chat-0",
    )


def test_the_operator_never_lifts_a_persons_cordon() -> None:
    chat_fleet = make_settled_service({"instances": 4})
    assert chat_fleet.assignment
    spec = chat_fleet.assignment.spec
    requested = spec.roles["chat-0"].model_copy(update={"cordoned": True, "cordoned_by": Actor.PERSON})
    chat_fleet.write_assignment(spec.model_copy(update={"roles": {**spec.roles, "chat-0": requested}}))
    chat_fleet.settle()
    status = chat_fleet.instances["chat-0"].status
    assert (chat_fleet.assignment.spec.roles["chat-0"].cordoned, status.phase, status.message) == (
        True,
        Phase.DRAINING,
        "cordoned, drained",
    )


def with_start_failure(reason: str, message: str) -> Observed:
    stuck = {**engines(FOUR), "chat-3": engine("chat-3", STARTING, reason=reason, message=message)}
    return settled(FOUR, engines=stuck)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param('ImagePullBackOff: Back-off pulling "x"', "ImagePullFailed", id="no such image"),
        pytest.param("Unschedulable: 0/3 nodes are available", "Unschedulable", id="no node fits"),
        pytest.param("PodRefused: exceeded quota", "EngineStartFailed", id="a pod that is refused"),
    ],
)
def test_start_failure_is_reported_and_the_other_instances_serve(message: str, reason: str) -> None:
    plan = plan_service(with_start_failure(reason, message))
    status = plan.objects[-1].status  # type: ignore[attr-defined]
    (starting,) = (o for o in plan.objects if isinstance(o, PDInstance) and o.metadata.name == "chat-3")
    assert starting.status.reason == reason
    found = {c.type: (c.status, c.reason, c.message) for c in status.conditions}
    assert (found["Degraded"], found["Ready"][0]) == (
        ("True", reason, f"chat-3: its engine is starting: {message}"),
        "True",
    )


def test_floors_above_the_instance_count_are_reported() -> None:
    floors = {"prefill": {"min": 2}, "decode": {"min": 2}}
    spec = {"pools": [BOUNDS], "roles": floors}
    three = {"chat-0": P, "chat-1": D, "chat-2": D}
    observed = settled(three, spec=spec, pools=(pool(replicas=3, bounds=(1, 9)),))
    status = plan_service(observed).objects[-1].status  # type: ignore[attr-defined]
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert (ready.reason, ready.message) == (
        "FloorsTooHigh",
        "3 instances cannot satisfy the floors of 2 Prefill and 2 Decode",
    )


def test_instance_keeps_its_start_spec_until_it_is_replaced() -> None:
    chat_fleet = make_settled_service({"instances": 2})
    chat_fleet.edit_service(engine={"image": "next"}, rollout={"paused": True})
    chat_fleet.reconcile()
    assert {i.spec.engine.image for i in chat_fleet.instances.values()} == {None}
    assert chat_fleet.pools["chat-flex"].spec.engine.image == "next"


def test_single_instance_plays_both_roles() -> None:
    chat_fleet = make_settled_service({"instances": 1})
    assert [i.status.role for i in chat_fleet.instances.values()] == [Role.BOTH]


def test_an_instance_that_never_serves_gives_its_role_to_one_that_does() -> None:
    """The floor of prefill counts the bad instance, so that another one must prefill before it can go."""
    bounds = {"min": 1, "max": 8}
    spec = {
        "pools": [{"name": "flex", "instances": bounds}],
        "roles": {"prefill": {"min": 2}, "decode": {"min": 2}},
        "autoscaling": {"scale": {"owner": "External"}},
    }
    chat_fleet = make_settled_service(spec)
    chat_fleet.lose_engine("chat-0", deleted=True)
    chat_fleet.scale("chat-flex", 5)
    chat_fleet.edit_service(
        engine={"image": "b", "profile": BAD_PROFILE}, rollout={"maxSurge": 0, "maxUnavailable": 2}
    )
    chat_fleet.reconcile()
    chat_fleet.edit_service(engine={"image": "good"}, rollout={"maxSurge": 1, "progressDeadline": "60s"})
    chat_fleet.settle()
    assert [i.status.phase for i in chat_fleet.instances.values()] == [Phase.SERVING] * 5
