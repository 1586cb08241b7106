"""The assignment: first split, roles of new instances, refused changes and cordons."""

from typing import Any

import pytest

from fulcrum_core.api import Floors, PDAssignment, PDAssignmentSpec, Refusal
from fulcrum_core.assignment import AssignmentRules, build_flip, may_apply
from fulcrum_core.ports import EngineState
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan import Observed, plan_service
from fulcrum_operator.plan.assignment import (
    REFUSED_FOR_S,
    AssignableInstance,
    choose_role_for_new_instance,
    plan_first_split,
)
from tests.unit.operator.builders import (
    NOW_S,
    D,
    P,
    assignment,
    assignment_spec,
    engines,
    entry,
    instance,
    pool,
    router,
    settled,
)

FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}


def flexible_instances(count: int) -> list[AssignableInstance]:
    return [AssignableInstance(f"chat-{number}", None) for number in range(count)]


def planned_assignment(observed: Observed) -> PDAssignmentSpec:
    return next(obj.spec for obj in plan_service(observed).objects if isinstance(obj, PDAssignment))


@pytest.mark.parametrize(
    ("members", "floors", "split"),
    [
        pytest.param(flexible_instances(4), (1, 1), "PPDD", id="half and half, the first ones prefill"),
        pytest.param(
            flexible_instances(3), (1, 1), "PDD", id="with an odd number the extra instance decodes"
        ),
        pytest.param(flexible_instances(1), (1, 1), "D", id="a single instance decodes"),
        pytest.param(flexible_instances(4), (3, 1), "PPPD", id="prefill's floor before half"),
        pytest.param(flexible_instances(4), (1, 3), "PDDD", id="decode's floor before half"),
        pytest.param(
            flexible_instances(3),
            (2, 2),
            "PDD",
            id="with too few instances the floor of decode has precedence",
        ),
        pytest.param(
            [AssignableInstance("chat-0", P), AssignableInstance("chat-1", P), *flexible_instances(4)[2:]],
            (1, 1),
            "PPDD",
            id="instances with fixed roles count",
        ),
        pytest.param(
            [
                AssignableInstance("chat-0", D),
                AssignableInstance("chat-1", D),
                AssignableInstance("chat-2", D),
                AssignableInstance("chat-3", None),
            ],
            (1, 1),
            "DDDP",
            id="the flexible instance gets the role that the fixed ones lack",
        ),
        pytest.param(flexible_instances(12), (1, 1), "PPPPPPDDDDDD", id="ten comes after nine"),
    ],
)
def test_first_split_halves_the_instances_within_floors_and_fixed_roles(
    members: list[AssignableInstance], floors: tuple[int, int], split: str
) -> None:
    roles = plan_first_split(members, prefill_floor=floors[0], decode_floor=floors[1])
    names = [f"chat-{number}" for number in range(len(members))]
    assert "".join(roles[name].value[0] for name in names) == split


@pytest.mark.parametrize(
    ("had", "floors", "role"),
    [
        pytest.param([], (1, 1), D, id="the first instance decodes"),
        pytest.param([D], (1, 1), P, id="the second instance prefills"),
        pytest.param([P, P, D], (1, 1), D, id="the role with fewer instances"),
        pytest.param([P, D], (1, 1), D, id="a tie goes to decode"),
        pytest.param([P, D, D], (1, 3), D, id="the floor of decode has precedence"),
        pytest.param([P, D], (2, 1), P, id="the floor of prefill has precedence"),
    ],
)
def test_new_instance_gets_the_role_below_its_floor_or_with_fewer_instances(
    had: list[Role], floors: tuple[int, int], role: Role
) -> None:
    assert choose_role_for_new_instance(had, prefill_floor=floors[0], decode_floor=floors[1]) is role


def test_new_instances_get_entries_and_deleted_ones_lose_theirs() -> None:
    roles = {"chat-0": entry(P), "chat-1": entry(D), "chat-9": entry(D)}
    observed = settled(
        {"chat-0": P, "chat-1": D, "chat-2": D},
        assignment=assignment(assignment_spec(roles)),
        accepted_assignment=assignment_spec(roles),
    )
    new: dict[str, Any] = {"role": D, "since": NOW_S, "reason": "new instance"}
    assert planned_assignment(observed) == assignment_spec(
        {"chat-0": entry(P), "chat-1": entry(D), "chat-2": entry(**new)}
    )


def test_floors_follow_the_spec() -> None:
    observed = settled(FOUR, spec={"instances": 4, "roles": {"prefill": {"min": 2}}})
    assert planned_assignment(observed).floors == Floors(prefill=2, decode=1)


def flipped(by: Actor, to: Role, *names: str) -> PDAssignmentSpec:
    """FOUR with these instances flipped just now."""
    spec = assignment_spec({name: entry(role) for name, role in FOUR.items()})
    for name in names:
        spec = build_flip(spec, name, to, by=by, reason="because", now_s=NOW_S)
    return spec


def test_allowed_assignment_is_not_changed() -> None:
    proposed = flipped(Actor.AUTOSCALER, D, "chat-1")
    assert planned_assignment(settled(FOUR, assignment=assignment(proposed))) == proposed


def test_assignment_below_the_floor_is_written_back_with_the_reason() -> None:
    proposed = flipped(Actor.PERSON, D, "chat-0", "chat-1")
    reason = "0 instances would serve Prefill, the floor is 1; leaving: chat-0, chat-1"
    refusal = Refusal(role=D, reason=reason, until=NOW_S + REFUSED_FOR_S)
    assert planned_assignment(settled(FOUR, assignment=assignment(proposed))) == assignment_spec(
        {
            "chat-0": entry(P, refused=refusal),
            "chat-1": entry(P, refused=refusal),
            "chat-2": entry(D),
            "chat-3": entry(D),
        },
        last_prefill_to_decode=NOW_S,
    )


@pytest.mark.parametrize(
    ("name", "to"), [("chat-1", D), ("chat-2", P)], ids=["a flip to decode", "a flip to prefill"]
)
def test_reader_that_applied_a_refused_assignment_may_apply_the_refusal(name: str, to: Role) -> None:
    """A router that has not yet observed a crash accepts a change that the operator refuses."""
    last = flipped(Actor.AUTOSCALER, to.other, name)  # so that the role that comes back has a cooldown, too
    current = last.model_copy(update={"last_prefill_to_decode": NOW_S - 60})
    proposed = build_flip(current, name, to, by=Actor.AUTOSCALER, reason="busy", now_s=NOW_S)
    rules = AssignmentRules(10.0, floors=current.floors)
    same_role = tuple(n for n, e in current.roles.items() if e.role is to.other and n != name)
    fewer = frozenset(FOUR) - frozenset(same_role)

    instances = tuple(i for i in settled(FOUR).instances if i.metadata.name in fewer)
    failed = tuple(instance(n, Phase.FAILED) for n in same_role)
    observed = settled(
        FOUR, assignment=assignment(proposed), accepted_assignment=current, instances=(*instances, *failed)
    )
    written_back = planned_assignment(observed)

    assert written_back.roles[name].role is to.other
    assert may_apply(current, proposed, frozenset(FOUR), rules, now_s=NOW_S).allowed
    assert may_apply(proposed, written_back, frozenset(FOUR), rules, now_s=NOW_S).allowed


def test_refused_assignment_does_not_extend_the_cooldown() -> None:
    proposed = flipped(Actor.PERSON, D, "chat-0", "chat-1").model_copy(
        update={"last_prefill_to_decode": NOW_S + 3600}
    )
    assert planned_assignment(settled(FOUR, assignment=assignment(proposed))).last_prefill_to_decode is None


def test_removed_entry_is_created_again() -> None:
    proposed = assignment_spec({name: entry(role) for name, role in FOUR.items() if name != "chat-0"})
    assert planned_assignment(settled(FOUR, assignment=assignment(proposed))).roles["chat-0"].role is P


def test_restarted_operator_accepts_the_current_assignment() -> None:
    proposed = flipped(Actor.AUTOSCALER, D, "chat-1")
    assert (
        planned_assignment(settled(FOUR, assignment=assignment(proposed), accepted_assignment=None))
        == proposed
    )


def scaled_down(roles: dict[str, Role], replicas: int, **fields: Any) -> Observed:
    return settled(
        roles,
        spec={"pools": [{"name": "flex", "instances": {"min": 1, "max": 9}}]},
        pools=(pool(replicas=replicas, bounds=(1, 9)),),
        **fields,
    )


def cordoned(observed: Observed) -> list[str]:
    return [name for name, given in planned_assignment(observed).roles.items() if given.cordoned]


def with_failed(observed: Observed, name: str) -> tuple[Any, ...]:
    return tuple(instance(name, Phase.FAILED) if i.metadata.name == name else i for i in observed.instances)


def test_serving_instance_with_the_fewest_requests_is_removed_first() -> None:
    legs = {"chat-0": 3, "chat-1": 2, "chat-2": 1, "chat-3": 4}
    assert cordoned(scaled_down(FOUR, 3, router=router(legs=legs))) == ["chat-2"]


def test_with_equal_requests_the_highest_number_is_removed() -> None:
    assert cordoned(scaled_down(FOUR, 3)) == ["chat-3"]


def test_instance_that_does_not_serve_is_removed_first() -> None:
    observed = scaled_down(FOUR, 3)
    assert cordoned(scaled_down(FOUR, 3, instances=with_failed(observed, "chat-1"))) == ["chat-1"]


def test_of_instances_that_do_not_serve_the_one_whose_engine_does_not_run_is_removed_first() -> None:
    """The other one will serve within a reconcile."""
    observed = scaled_down(FOUR, 3)
    starting = tuple(
        instance(i.metadata.name, Phase.STARTING) if i.metadata.name in ("chat-2", "chat-3") else i
        for i in observed.instances
    )
    states = engines(FOUR, chat_2=EngineState.STARTING)
    assert cordoned(scaled_down(FOUR, 3, instances=starting, engines=states)) == ["chat-2"]


def test_the_last_decode_instance_is_never_removed() -> None:
    legs = {"chat-0": 9, "chat-1": 0, "chat-2": 9}
    observed = scaled_down({"chat-0": P, "chat-1": D, "chat-2": D}, 1, router=router(legs=legs))
    assert cordoned(observed) == ["chat-0", "chat-1"]


def test_choice_of_the_removed_instance_does_not_change() -> None:
    roles = {**{name: entry(role) for name, role in FOUR.items()}, "chat-2": entry(D, cordoned=True)}
    observed = scaled_down(
        FOUR, 3, assignment=assignment(assignment_spec(roles)), accepted_assignment=assignment_spec(roles)
    )
    assert planned_assignment(observed) == assignment_spec(roles)


@pytest.mark.parametrize(
    ("by", "stays"),
    [
        pytest.param(Actor.OPERATOR, False, id="the operator's own cordon is removed"),
        pytest.param(Actor.PERSON, True, id="a person's cordon stays"),
    ],
)
def test_operators_cordon_is_lifted_when_the_instance_is_needed_again(by: Actor, stays: bool) -> None:
    roles = {**{name: entry(role) for name, role in FOUR.items()}, "chat-2": entry(D, by, cordoned=True)}
    observed = settled(
        FOUR, assignment=assignment(assignment_spec(roles)), accepted_assignment=assignment_spec(roles)
    )
    assert planned_assignment(observed).roles["chat-2"].cordoned is stays
