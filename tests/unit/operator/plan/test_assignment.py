"""Who plays which role: the first split, new instances, wishes refused, cordons."""

from typing import Any

import pytest

from fulcrum_core.api import Floors, PDAssignment, PDAssignmentSpec, Refusal
from fulcrum_core.assignment import AssignmentRules, may_apply, with_flip
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan import Observed, plan_service
from fulcrum_operator.plan.assignment import REFUSED_FOR_S, Member, first_split, role_for_new
from tests.unit.operator.builders import (
    NOW_S,
    D,
    P,
    assignment,
    entry,
    instance,
    pool,
    router,
    settled,
    wish,
)

FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}


def flexible(count: int) -> list[Member]:
    return [Member(f"chat-{number}", None) for number in range(count)]


def planned(seen: Observed) -> PDAssignmentSpec:
    return next(obj.spec for obj in plan_service(seen).objects if isinstance(obj, PDAssignment))


@pytest.mark.parametrize(
    ("members", "floors", "split"),
    [
        pytest.param(flexible(4), (1, 1), "PPDD", id="half and half, the first ones prefill"),
        pytest.param(flexible(3), (1, 1), "PDD", id="an odd one decodes"),
        pytest.param(flexible(1), (1, 1), "D", id="a single one decodes"),
        pytest.param(flexible(4), (3, 1), "PPPD", id="prefill's floor before half"),
        pytest.param(flexible(4), (1, 3), "PDDD", id="decode's floor before half"),
        pytest.param(flexible(3), (2, 2), "PDD", id="too few for both floors: decode's holds"),
        pytest.param(
            [Member("chat-0", P), Member("chat-1", P), *flexible(4)[2:]],
            (1, 1),
            "PPDD",
            id="fixed ones count",
        ),
        pytest.param(
            [Member("chat-0", D), Member("chat-1", D), Member("chat-2", D), Member("chat-3", None)],
            (1, 1),
            "DDDP",
            id="the flexible one fills what the fixed ones lack",
        ),
        pytest.param(flexible(12), (1, 1), "PPPPPPDDDDDD", id="ten comes after nine"),
    ],
)
def test_first_split(members: list[Member], floors: tuple[int, int], split: str) -> None:
    roles = first_split(members, prefill_floor=floors[0], decode_floor=floors[1])
    names = [f"chat-{number}" for number in range(len(members))]
    assert "".join(roles[name].value[0] for name in names) == split


@pytest.mark.parametrize(
    ("had", "floors", "role"),
    [
        pytest.param([], (1, 1), D, id="the first one decodes"),
        pytest.param([D], (1, 1), P, id="the second one prefills"),
        pytest.param([P, P, D], (1, 1), D, id="the fewer get it"),
        pytest.param([P, D], (1, 1), D, id="a tie goes to decode"),
        pytest.param([P, D, D], (1, 3), D, id="a floor goes before the fewer"),
        pytest.param([P, D], (2, 1), P, id="prefill's floor, too"),
    ],
)
def test_role_of_a_new_instance(had: list[Role], floors: tuple[int, int], role: Role) -> None:
    assert role_for_new(had, prefill_floor=floors[0], decode_floor=floors[1]) is role


def test_new_instances_get_entries_and_gone_ones_lose_theirs() -> None:
    roles = {"chat-0": entry(P), "chat-1": entry(D), "chat-9": entry(D)}
    seen = settled(
        {"chat-0": P, "chat-1": D, "chat-2": D}, assignment=assignment(wish(roles)), accepted=wish(roles)
    )
    new: dict[str, Any] = {"role": D, "since": NOW_S, "reason": "new instance"}
    assert planned(seen) == wish({"chat-0": entry(P), "chat-1": entry(D), "chat-2": entry(**new)})


def test_floors_follow_the_spec() -> None:
    seen = settled(FOUR, spec={"instances": 4, "roles": {"prefill": {"min": 2}}})
    assert planned(seen).floors == Floors(prefill=2, decode=1)


def flipped(by: Actor, to: Role, *names: str) -> PDAssignmentSpec:
    """FOUR with these instances flipped just now."""
    spec = wish({name: entry(role) for name, role in FOUR.items()})
    for name in names:
        spec = with_flip(spec, name, to, by=by, reason="because", now_s=NOW_S)
    return spec


def test_a_wish_that_may_be_applied_stands_as_it_is() -> None:
    asked = flipped(Actor.AUTOSCALER, D, "chat-1")
    assert planned(settled(FOUR, assignment=assignment(asked))) == asked


def test_a_wish_below_the_floor_is_written_back_with_the_reason() -> None:
    asked = flipped(Actor.PERSON, D, "chat-0", "chat-1")
    reason = "0 instances would serve Prefill, the floor is 1; leaving: chat-0, chat-1"
    refusal = Refusal(role=D, reason=reason, until=NOW_S + REFUSED_FOR_S)
    assert planned(settled(FOUR, assignment=assignment(asked))) == wish(
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
def test_a_reader_that_took_a_refused_wish_for_good_follows_the_refusal(name: str, to: Role) -> None:
    """A router that has not yet heard of a crash finds the floor kept where the operator does not."""
    last = flipped(Actor.AUTOSCALER, to.other, name)  # so that the role that comes back has a cooldown, too
    current = last.model_copy(update={"last_prefill_to_decode": NOW_S - 60})
    asked = with_flip(current, name, to, by=Actor.AUTOSCALER, reason="busy", now_s=NOW_S)
    rules = AssignmentRules(10.0, floors=current.floors)
    same_role = tuple(n for n, e in current.roles.items() if e.role is to.other and n != name)
    fewer = frozenset(FOUR) - frozenset(same_role)

    instances = tuple(i for i in settled(FOUR).instances if i.metadata.name in fewer)
    failed = tuple(instance(n, Phase.FAILED) for n in same_role)
    seen = settled(FOUR, assignment=assignment(asked), accepted=current, instances=(*instances, *failed))
    back = planned(seen)

    assert back.roles[name].role is to.other
    assert may_apply(current, asked, frozenset(FOUR), rules, now_s=NOW_S).allowed
    assert may_apply(asked, back, frozenset(FOUR), rules, now_s=NOW_S).allowed


def test_a_refused_wish_does_not_take_its_cooldown_into_the_future() -> None:
    asked = flipped(Actor.PERSON, D, "chat-0", "chat-1").model_copy(
        update={"last_prefill_to_decode": NOW_S + 3600}
    )
    assert planned(settled(FOUR, assignment=assignment(asked))).last_prefill_to_decode is None


def test_an_entry_that_somebody_took_out_is_made_again() -> None:
    asked = wish({name: entry(role) for name, role in FOUR.items() if name != "chat-0"})
    assert planned(settled(FOUR, assignment=assignment(asked))).roles["chat-0"].role is P


def test_an_operator_without_memory_takes_the_wish_for_judged() -> None:
    asked = flipped(Actor.AUTOSCALER, D, "chat-1")
    assert planned(settled(FOUR, assignment=assignment(asked), accepted=None)) == asked


def scaled_down(roles: dict[str, Role], replicas: int, **fields: Any) -> Observed:
    return settled(
        roles,
        spec={"pools": [{"name": "flex", "instances": {"min": 1, "max": 9}}]},
        pools=(pool(replicas=replicas, bounds=(1, 9)),),
        **fields,
    )


def cordoned(seen: Observed) -> list[str]:
    return [name for name, given in planned(seen).roles.items() if given.cordoned]


def with_failed(seen: Observed, name: str) -> tuple[Any, ...]:
    return tuple(instance(name, Phase.FAILED) if i.metadata.name == name else i for i in seen.instances)


def test_of_those_that_serve_the_one_with_the_fewest_legs_leaves() -> None:
    legs = {"chat-0": 3, "chat-1": 2, "chat-2": 1, "chat-3": 4}
    assert cordoned(scaled_down(FOUR, 3, router=router(legs=legs))) == ["chat-2"]


def test_with_equal_legs_the_highest_number_leaves() -> None:
    assert cordoned(scaled_down(FOUR, 3)) == ["chat-3"]


def test_an_instance_that_does_not_serve_leaves_first() -> None:
    seen = scaled_down(FOUR, 3)
    assert cordoned(scaled_down(FOUR, 3, instances=with_failed(seen, "chat-1"))) == ["chat-1"]


def test_nobody_leaves_below_a_floor() -> None:
    legs = {"chat-0": 0, "chat-1": 9, "chat-2": 9}
    seen = scaled_down({"chat-0": P, "chat-1": D, "chat-2": D}, 1, router=router(legs=legs))
    assert cordoned(seen) == ["chat-2"]


def test_the_choice_of_who_leaves_stays_made() -> None:
    roles = {**{name: entry(role) for name, role in FOUR.items()}, "chat-2": entry(D, cordoned=True)}
    seen = scaled_down(FOUR, 3, assignment=assignment(wish(roles)), accepted=wish(roles))
    assert planned(seen) == wish(roles)


@pytest.mark.parametrize(
    ("by", "stays"),
    [
        pytest.param(Actor.OPERATOR, False, id="the operator's own"),
        pytest.param(Actor.PERSON, True, id="but not a person's"),
    ],
)
def test_a_cordon_is_lifted_when_the_instance_is_wanted_again(by: Actor, stays: bool) -> None:
    roles = {**{name: entry(role) for name, role in FOUR.items()}, "chat-2": entry(D, by, cordoned=True)}
    seen = settled(FOUR, assignment=assignment(wish(roles)), accepted=wish(roles))
    assert planned(seen).roles["chat-2"].cordoned is stays
