"""What becomes of instances over time: roll-outs, scales, lost engines, flips by a restart."""

from collections.abc import Callable
from typing import Any

import pytest

from fulcrum_core.assignment import with_flip
from fulcrum_core.ports import EngineState
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan import Observed, plan_service
from fulcrum_operator.plan.rollout import revision_of
from tests.properties.fleet import BAD, Fleet, fleet
from tests.unit.operator.builders import STARTING, D, P, engine, engines, pool, settled

FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}
BOUNDS: dict[str, Any] = {"name": "flex", "instances": {"min": 1, "max": 9}}


def up(there: Fleet) -> list[str]:
    return sorted(n for n, i in there.instances.items() if i.status.phase is Phase.SERVING)


def condition(there: Fleet, kind: str) -> tuple[str, str]:
    found = next(c for c in there.service.status.conditions if c.type == kind)
    return found.status, found.reason


def course(there: Fleet, passes: int = 60) -> list[tuple[int, int]]:
    """Of each pass: how many instances there are, and how many of them serve."""
    seen = []
    for _ in range(passes):
        there.act()
        seen.append((len(there.instances), len(up(there))))
        there.wait(2.0)
    return seen


def all_updated(there: Fleet) -> bool:
    asked = there.pools["chat-flex"].spec.start_revision
    return {revision_of(i) for i in there.instances.values()} == {asked}


@pytest.mark.parametrize(
    ("rules", "most", "fewest"),
    [
        pytest.param({}, 5, 4, id="one more at a time, none fewer"),
        pytest.param({"maxSurge": 0, "maxUnavailable": 1}, 4, 3, id="in place, one at a time"),
        pytest.param({"maxSurge": 4}, 8, 4, id="all at once"),
    ],
)
def test_a_rollout_keeps_its_bounds(rules: dict[str, Any], most: int, fewest: int) -> None:
    there = fleet({"instances": 4, "rollout": rules})
    there.change(engine={"image": "next"})
    counts = course(there)
    assert (max(n for n, _ in counts), min(n for _, n in counts), len(up(there)), all_updated(there)) == (
        most,
        fewest,
        4,
        True,
    )


def test_a_single_instance_is_exchanged_without_a_gap() -> None:
    there = fleet({"instances": 1})
    there.change(engine={"image": "next"})
    counts = course(there, 20)
    assert (min(n for _, n in counts), len(there.instances), all_updated(there)) == (1, 1, True)


def test_a_paused_rollout_exchanges_nobody_and_scales_by_the_last_good_revision() -> None:
    there = fleet({"pools": [BOUNDS], "autoscaling": {"scale": {"owner": "External"}}})
    there.scale("chat-flex", 2)
    there.settle()
    old = {revision_of(i) for i in there.instances.values()}
    there.change(engine={"image": "next"}, rollout={"paused": True})
    there.scale("chat-flex", 3)
    there.settle()
    assert (len(up(there)), {revision_of(i) for i in there.instances.values()}) == (3, old)
    assert condition(there, "Progressing") == ("False", "RolloutPaused")
    there.change(rollout={})
    there.settle()
    assert (len(up(there)), all_updated(there)) == (3, True)


def test_a_revision_that_does_not_start_is_given_up_for_the_last_good_one_until_the_spec_changes() -> None:
    there = fleet({"instances": 4})
    before = dict(there.instances)
    there.change(engine={"profile": BAD})
    counts = course(there)
    assert min(n for _, n in counts) == 4
    assert set(there.instances) == set(before)
    assert (condition(there, "Degraded"), condition(there, "Ready")) == (
        ("True", "RolledBack"),
        ("True", "InstancesServing"),
    )
    there.change(engine={"image": "fixed"})
    there.settle()
    assert (all_updated(there), condition(there, "Degraded")) == (True, ("False", "AllWell"))


def test_a_revision_whose_engines_are_ready_and_never_answer_is_given_up_too() -> None:
    there = fleet({"instances": 4})
    there.change(engine={"image": "next"})
    there.act()
    for new in (e for e in there.engines.values() if e.state is EngineState.STARTING):
        new.ready_at_s, new.endpoint = float("inf"), "127.0.0.1:1"
    course(there, 90)
    assert condition(there, "Degraded") == ("True", "RolledBack")


def test_a_deadline_that_is_past_wakes_nobody() -> None:
    """Back to what was good last: there is nothing left to give up, however long it takes to start."""
    there = fleet({"instances": 4})
    there.change(engine={"image": "next"})
    course(there, 12)
    there.change(engine={})
    there.act()
    for new in (e for e in there.engines.values() if e.state is EngineState.STARTING):
        new.ready_at_s = float("inf")
    there.act()
    there.wait(100_000.0)
    _, plan = there.act()
    assert condition(there, "Progressing") == ("True", "RolloutProgressing")
    assert plan.wake_after_s is None or plan.wake_after_s > 0.0


def test_a_rollout_goes_on_where_a_crash_of_the_operator_and_a_scale_left_it() -> None:
    there = fleet({"pools": [BOUNDS], "autoscaling": {"scale": {"owner": "External"}}})
    there.scale("chat-flex", 4)
    there.settle()
    there.change(engine={"image": "next"})
    course(there, 6)
    there.accepted = None
    there.scale("chat-flex", 6)
    there.settle()
    assert (len(up(there)), len(there.instances), all_updated(there)) == (6, 6, True)


def test_while_two_revisions_cannot_exchange_kv_each_can_do_both() -> None:
    there = fleet({"instances": 4})
    there.change(engine={"image": "next"})
    lonely = []
    for _ in range(40):
        there.act()
        lonely.append(there.lonely_groups())
        there.wait(2.0)
    assert (lonely, all_updated(there)) == ([[]] * 40, True)


def test_scaling_up_and_down_again_at_once_leaves_what_serves() -> None:
    there = fleet({"pools": [{**BOUNDS, "instances": {"min": 4, "max": 9}}]})
    serving = up(there)
    there.scale("chat-flex", 8)
    course(there, 2)
    there.scale("chat-flex", 4)
    counts = course(there, 10)
    assert (up(there), min(n for _, n in counts)) == (serving, 4)


def test_a_scale_below_the_floors_stops_at_them_and_says_so() -> None:
    there = fleet({"pools": [{**BOUNDS, "instances": {"min": 3, "max": 9}}]})
    there.change(pools=[BOUNDS])
    there.scale("chat-flex", 1)
    there.settle()
    assert (len(up(there)), condition(there, "ScalingLimited")) == (2, ("True", "FloorsHold"))


@pytest.mark.parametrize(
    ("owner", "count"), [("Fulcrum", 4), ("External", 2)], ids=["bounds move replicas", "nobody but you"]
)
def test_changed_bounds_move_the_replicas_only_where_fulcrum_owns_them(owner: str, count: int) -> None:
    there = fleet({"instances": 2, "autoscaling": {"scale": {"owner": owner}}})
    there.change(instances=4)
    there.settle()
    assert (there.pools["chat-flex"].spec.replicas, len(up(there))) == (count, 4)


def lost(there: Fleet) -> None:
    there.lose("chat-1", gone=False)


def evicted(there: Fleet) -> None:
    there.evict("chat-1")


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        pytest.param(lost, Phase.FAILED, id="lost with its node: failed"),
        pytest.param(evicted, Phase.DRAINING, id="told to end by somebody else: drains at once"),
    ],
)
def test_an_engine_that_is_taken_away_is_replaced_at_once(
    fault: Callable[[Fleet], None], phase: Phase
) -> None:
    there = fleet({"instances": 4})
    fault(there)
    _, plan = there.act()
    assert (there.instances["chat-1"].status.phase, [i.metadata.name for i in plan.start]) == (
        phase,
        ["chat-4"],
    )
    course(there, 40)
    assert (up(there), sorted(there.instances)) == (
        ["chat-0", "chat-2", "chat-3", "chat-4"],
        ["chat-0", "chat-2", "chat-3", "chat-4"],
    )


def test_instances_that_are_lost_again_and_again_are_replaced_more_slowly() -> None:
    there = fleet({"instances": 2})
    made = set(there.instances)
    for _ in range(10):
        there.act()
        made |= set(there.instances)
        for name, one in there.engines.items():
            if one.state is not EngineState.LOST:
                there.lose(name, gone=False)
        there.wait(1.0)
    assert len(made) <= 6


def test_a_flip_by_restart_starts_the_engine_for_the_new_role() -> None:
    there = fleet({"instances": 4, "autoscaling": {"flip": {"strategy": "Restart"}}})
    assert {n: i.spec.role for n, i in there.instances.items()} == FOUR
    assert there.assignment
    there.wish(with_flip(there.assignment.spec, "chat-1", D, by=Actor.PERSON, reason="", now_s=there.now_s))
    phases = []
    for _ in range(12):
        there.act()
        phases.append(there.instances["chat-1"].status.phase)
        there.wait(1.0)
    assert list(dict.fromkeys(phases)) == [
        *(Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING, Phase.SERVING),
    ]
    assert (there.engines["chat-1"].made_from.spec.role, there.instances["chat-1"].status.role) == (D, D)


def test_a_refused_cordon_is_written_back_with_the_reason() -> None:
    there = fleet({"instances": 2})
    assert there.assignment
    spec = there.assignment.spec
    asked = spec.roles["chat-0"].model_copy(update={"cordoned": True, "cordoned_by": Actor.PERSON})
    there.wish(spec.model_copy(update={"roles": {**spec.roles, "chat-0": asked}}))
    there.act()
    back = there.assignment.spec.roles["chat-0"]
    assert back.refused is not None
    assert (back.cordoned, back.refused.role, back.refused.reason) == (
        False,
        None,
        "0 instances would serve Prefill, the floor is 1; leaving: chat-0",
    )


def test_the_operator_never_lifts_a_persons_cordon() -> None:
    there = fleet({"instances": 4})
    assert there.assignment
    spec = there.assignment.spec
    asked = spec.roles["chat-0"].model_copy(update={"cordoned": True, "cordoned_by": Actor.PERSON})
    there.wish(spec.model_copy(update={"roles": {**spec.roles, "chat-0": asked}}))
    there.settle()
    status = there.instances["chat-0"].status
    assert (there.assignment.spec.roles["chat-0"].cordoned, status.phase, status.message) == (
        True,
        Phase.DRAINING,
        "cordoned, drained",
    )


def hindered(message: str) -> Observed:
    stuck = {**engines(FOUR), "chat-3": engine("chat-3", STARTING, message=message)}
    return settled(FOUR, engines=stuck)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param('ImagePullBackOff: Back-off pulling "x"', "ImagePullFailed", id="no such image"),
        pytest.param("Unschedulable: 0/3 nodes are available", "Unschedulable", id="no node fits"),
        pytest.param("PodRefused: exceeded quota", "EngineDoesNotStart", id="a pod that is refused"),
    ],
)
def test_what_keeps_an_engine_from_starting_is_told_and_the_rest_serves(message: str, reason: str) -> None:
    status = plan_service(hindered(message)).objects[-1].status  # type: ignore[attr-defined]
    told = {c.type: (c.status, c.reason, c.message) for c in status.conditions}
    assert (told["Degraded"], told["Ready"][0]) == (
        ("True", reason, f"chat-3: its engine starts: {message}"),
        "True",
    )


def test_floors_that_the_instances_cannot_hold_are_told() -> None:
    floors = {"prefill": {"min": 2}, "decode": {"min": 2}}
    spec = {"pools": [BOUNDS], "roles": floors}
    three = {"chat-0": P, "chat-1": D, "chat-2": D}
    seen = settled(three, spec=spec, pools=(pool(replicas=3, bounds=(1, 9)),))
    status = plan_service(seen).objects[-1].status  # type: ignore[attr-defined]
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert (ready.reason, ready.message) == (
        "FloorsTooHigh",
        "3 instances cannot hold the floors of 2 Prefill and 2 Decode",
    )


def test_an_old_instance_keeps_what_it_was_started_with_until_it_is_exchanged() -> None:
    there = fleet({"instances": 2})
    there.change(engine={"image": "next"}, rollout={"paused": True})
    there.act()
    assert {i.spec.engine.image for i in there.instances.values()} == {None}
    assert there.pools["chat-flex"].spec.engine.image == "next"


def test_a_role_of_a_single_instance_is_both() -> None:
    there = fleet({"instances": 1})
    assert [i.status.role for i in there.instances.values()] == [Role.BOTH]
