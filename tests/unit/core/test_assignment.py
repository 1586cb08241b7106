"""The PDAssignment: which changes its rules allow, what a flip writes, and which instances serve which role.

Also how the rules and the serving instances are made from the objects of a service.
"""

from collections.abc import Callable
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDPool, PDService, load_manifest
from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, Refusal, RoleAssignment
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.assignment import (
    CLOCK_SKEW_S,
    AssignmentRules,
    build_assignment_rules,
    build_flip,
    list_assigned,
    list_serving_instances,
    may_apply,
    resolve_effective_roles,
)
from fulcrum_core.values import Actor, Role
from fulcrum_core.verdict import Verdict

NOW_S = 1_000_000.0
P, D = Role.PREFILL, Role.DECODE
ALLOWED = Verdict(True, "within floors, cooldown and pins")
RULES = AssignmentRules(prefill_to_decode_cooldown_s=10.0)
Change = Callable[[PDAssignmentSpec], PDAssignmentSpec]


def entry(role: Role, **fields: Any) -> RoleAssignment:
    return RoleAssignment(role=role, **{"since": NOW_S - 1000, "by": Actor.OPERATOR, **fields})


def assignment(roles: str, **fields: Any) -> PDAssignmentSpec:
    """Return an assignment with one instance per letter: `PPD` is a and b to prefill, c to decode."""
    entries = {
        name: entry(P if letter == "P" else D) for name, letter in zip("abcdefgh", roles, strict=False)
    }
    return PDAssignmentSpec(service="chat", roles=entries, **fields)


def flip(name: str, to: Role, by: Actor = Actor.AUTOSCALER, *, now_s: float = NOW_S) -> Change:
    return lambda spec: build_flip(spec, name, to, by=by, reason="because", now_s=now_s)


def edit(name: str, **fields: Any) -> Change:
    """Return a change that replaces fields of one entry."""
    return lambda spec: spec.model_copy(
        update={"roles": {**spec.roles, name: spec.roles[name].model_copy(update=fields)}}
    )


def drop(name: str) -> Change:
    return lambda spec: spec.model_copy(update={"roles": {n: e for n, e in spec.roles.items() if n != name}})


def put(name: str, role: Role) -> Change:
    return lambda spec: spec.model_copy(update={"roles": {**spec.roles, name: entry(role)}})


def check_change(
    current: PDAssignmentSpec, change: Change, ready: str, rules: AssignmentRules = RULES
) -> Verdict:
    return may_apply(current, change(current), frozenset(ready), rules, now_s=NOW_S)


@pytest.mark.parametrize(
    ("current", "change", "ready", "reason"),
    [
        pytest.param(
            assignment("PDD"),
            flip("a", D),
            "abc",
            "0 instances would serve Prefill, the floor is 1; leaving: a",
            id="the last prefill instance",
        ),
        pytest.param(
            assignment("PPD"),
            flip("c", P, Actor.PERSON),
            "abc",
            "0 instances would serve Decode, the floor is 1; leaving: c",
            id="the last decode instance, by a person",
        ),
        pytest.param(
            assignment("PPPD", floors=Floors(prefill=3, decode=1)),
            flip("a", D),
            "abcd",
            "2 instances would serve Prefill, the floor is 3; leaving: a",
            id="a floor above one",
        ),
        pytest.param(
            assignment("PPD"),
            flip("a", D),
            "ac",
            "0 instances would serve Prefill, the floor is 1; leaving: a",
            id="an instance that is not ready does not count",
        ),
        pytest.param(
            assignment("PPD"),
            edit("c", cordoned=True),
            "abc",
            "0 instances would serve Decode, the floor is 1; leaving: c",
            id="a cordon of the last instance of a role",
        ),
        pytest.param(
            assignment("PPD"),
            drop("c"),
            "abc",
            "0 instances would serve Decode, the floor is 1; leaving: c",
            id="removal of the last serving instance of a role",
        ),
        pytest.param(
            assignment("PPD"),
            flip("c", P),
            "ab",
            "0 instances would be assigned to Decode, the floor is 1; leaving: c",
            id="the last assigned instance, although it crashed",
        ),
        pytest.param(
            assignment("PPD", last_prefill_to_decode=NOW_S - 4),
            flip("a", D),
            "abc",
            "instance 'a' may not flip to Decode 4.0 s after the last such flip; the cooldown is 10s",
            id="an autoscaler flip within the cooldown",
        ),
        pytest.param(
            assignment("PPD"),
            edit("a", role=D, since=NOW_S, by=Actor.AUTOSCALER),
            "abc",
            "the flip of instance 'a' to Decode is not recorded in lastPrefillToDecode",
            id="an autoscaler flip that does not start the cooldown",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S + 90)(assignment("PPD")),
            flip("a", D),
            "abc",
            "instance 'a' is pinned to Prefill for 1m30s more",
            id="pinned",
        ),
        pytest.param(
            edit("a", refused=Refusal(role=D, reason="did not verify", until=NOW_S + 1))(assignment("PPD")),
            flip("a", D),
            "abc",
            "the flip of instance 'a' to Decode was refused: did not verify",
            id="a change that was refused before",
        ),
        pytest.param(
            assignment("PPD"),
            flip("a", D, now_s=NOW_S + CLOCK_SKEW_S + 1),
            "abc",
            "the flip of instance 'a' is dated 6 s ahead",
            id="an entry dated in the future",
        ),
        pytest.param(
            assignment("PPD", last_prefill_to_decode=NOW_S),
            lambda spec: spec.model_copy(update={"last_prefill_to_decode": None}),
            "abc",
            "lastPrefillToDecode may not be cleared or set back",
            id="the cooldown cleared",
        ),
        pytest.param(
            assignment("PPD", last_prefill_to_decode=NOW_S),
            lambda spec: spec.model_copy(update={"last_prefill_to_decode": NOW_S - 60}),
            "abc",
            "lastPrefillToDecode may not be cleared or set back",
            id="the cooldown moved back",
        ),
        pytest.param(
            assignment("PPD"),
            lambda spec: spec.model_copy(update={"last_prefill_to_decode": NOW_S + 3600}),
            "abc",
            "lastPrefillToDecode is dated 3600 s ahead",
            id="a cooldown that starts in the future",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S + 90)(assignment("PPD")),
            edit("a", pinned_until=None),
            "abc",
            "instance 'a' is pinned to Prefill for 1m30s more",
            id="a person's pin cleared",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S + 90, by=Actor.PERSON)(assignment("PPD")),
            edit("a", pinned_until=NOW_S + 30, by=Actor.AUTOSCALER),
            "abc",
            "instance 'a' is pinned to Prefill for 1m30s more",
            id="a person's pin shortened",
        ),
        pytest.param(
            edit("a", cordoned=True, reason="more instances than desired")(assignment("PPD")),
            flip("a", D, Actor.PERSON),
            "abc",
            "instance 'a' is about to stop: more instances than desired",
            id="an instance that is to be removed",
        ),
    ],
)
def test_change_that_breaks_a_rule_is_refused_with_the_reason(
    current: PDAssignmentSpec, change: Change, ready: str, reason: str
) -> None:
    assert check_change(current, change, ready) == Verdict(False, reason)


@pytest.mark.parametrize(
    ("current", "change", "ready"),
    [
        pytest.param(assignment("PPD"), flip("a", D), "abc", id="a flip that keeps the floor"),
        pytest.param(assignment("PPD"), lambda spec: spec, "abc", id="no change"),
        pytest.param(assignment("PPD"), put("z", D), "abc", id="a new instance"),
        pytest.param(assignment(""), put("a", P), "", id="the first instance"),
        pytest.param(assignment("PDD"), drop("c"), "ab", id="removal of a crashed instance"),
        pytest.param(
            assignment("PD"), drop("b"), "a", id="removal of the last instance of a role after its deletion"
        ),
        pytest.param(assignment("PPD"), edit("a", cordoned=True), "abc", id="a cordon that keeps the floor"),
        pytest.param(
            edit("a", cordoned=True)(assignment("PPD")),
            edit("a", cordoned=False),
            "abc",
            id="a cordon removed",
        ),
        pytest.param(
            assignment("PDD"), flip("b", P), "ac", id="a crashed instance flips while others have its role"
        ),
        pytest.param(assignment("PPD"), flip("b", D), "ab", id="a flip to a role whose instances crashed"),
        pytest.param(
            assignment("PPD", last_prefill_to_decode=NOW_S - 10),
            flip("a", D),
            "abc",
            id="just after the cooldown",
        ),
        pytest.param(
            assignment("PDD", last_prefill_to_decode=NOW_S), flip("c", P), "abc", id="back to prefill at once"
        ),
        pytest.param(
            assignment("PPD", last_prefill_to_decode=NOW_S),
            flip("a", D, Actor.PERSON),
            "abc",
            id="a person within the cooldown",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S + 90)(assignment("PPD")),
            flip("a", D, Actor.PERSON),
            "abc",
            id="a person against a pin",
        ),
        pytest.param(
            edit("a", refused=Refusal(role=D, reason="-", until=NOW_S + 9))(assignment("PPD")),
            flip("a", D, Actor.PERSON),
            "abc",
            id="a person against a refusal",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S)(assignment("PPD")),
            flip("a", D),
            "abc",
            id="a flip after the pin expired",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S + 90)(assignment("PPD")),
            edit("a", pinned_until=None, by=Actor.PERSON),
            "abc",
            id="a person ends a pin",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S)(assignment("PPD")),
            edit("a", pinned_until=None),
            "abc",
            id="an expired pin is cleared",
        ),
        pytest.param(
            edit("a", pinned_until=NOW_S + 90)(assignment("PPD")),
            edit("a", cordoned=True),
            "abc",
            id="a pinned instance is cordoned",
        ),
        pytest.param(
            edit("a", cordoned=True)(assignment("PPD")),
            edit("a", cordoned=False, role=D, since=NOW_S, by=Actor.PERSON),
            "abc",
            id="a flip that also removes the cordon",
        ),
        pytest.param(
            edit("a", cordoned=True, by=Actor.PERSON)(assignment("PPD")),
            flip("a", D, Actor.PERSON),
            "abc",
            id="an instance that a person cordoned",
        ),
        pytest.param(
            assignment("PPD"),
            flip("a", D, now_s=NOW_S + CLOCK_SKEW_S),
            "abc",
            id="a writer whose clock is slightly ahead",
        ),
    ],
)
def test_change_within_the_rules_is_allowed(current: PDAssignmentSpec, change: Change, ready: str) -> None:
    assert check_change(current, change, ready) == ALLOWED


def test_no_actor_can_flip_an_instance_of_a_fixed_pool() -> None:
    fixed = AssignmentRules(10.0, {"a": P})
    for actor in Actor:
        verdict = check_change(assignment("PPD"), flip("a", D, actor), "abc", fixed)
        assert verdict == Verdict(False, "instance 'a' belongs to a pool that only serves Prefill")


def test_flip_records_actor_time_count_and_cooldown() -> None:
    after = build_flip(assignment("PPD", flips=3), "a", D, by=Actor.AUTOSCALER, reason="busy", now_s=NOW_S)
    expected = assignment("PPD", flips=4, last_prefill_to_decode=NOW_S)
    signed = entry(D, since=NOW_S, by=Actor.AUTOSCALER, reason="busy")
    assert after == expected.model_copy(update={"roles": {**expected.roles, "a": signed}})


def test_flip_to_prefill_does_not_start_the_cooldown() -> None:
    after = flip("c", P)(assignment("PDD", last_prefill_to_decode=NOW_S - 3))
    assert (after.flips, after.last_prefill_to_decode) == (1, NOW_S - 3)


def test_pin_to_the_current_role_counts_as_no_flip() -> None:
    before = assignment("PPD", last_prefill_to_decode=NOW_S - 3)
    after = build_flip(before, "c", D, by=Actor.PERSON, reason="stay", now_s=NOW_S, pinned_until_s=NOW_S + 60)
    assert (after.flips, after.last_prefill_to_decode) == (0, NOW_S - 3)
    assert after.roles["c"].pinned_until == NOW_S + 60


def test_writer_with_a_slow_clock_does_not_move_the_cooldown_back() -> None:
    before = assignment("PPD", last_prefill_to_decode=NOW_S)
    after = flip("a", D, Actor.PERSON, now_s=NOW_S - 30)(before)
    assert after.last_prefill_to_decode == NOW_S
    assert may_apply(before, after, frozenset("abc"), RULES, now_s=NOW_S) == ALLOWED


def test_flip_clears_an_expired_refusal_and_pin() -> None:
    before = edit("a", pinned_until=NOW_S - 1, refused=Refusal(role=D, reason="-", until=NOW_S - 1))(
        assignment("PPD")
    )
    after = flip("a", D)(before).roles["a"]
    assert (after.pinned_until, after.refused) == (None, None)


@pytest.mark.parametrize(
    ("roles", "name", "to", "since_flip_s"),
    [
        pytest.param("PDD", "c", P, 3.0, id="a flip to prefill, rolled back to decode within the cooldown"),
        pytest.param("PPD", "a", D, 3.0, id="a flip to decode, rolled back to prefill"),
    ],
)
@pytest.mark.parametrize("by", Actor)
def test_the_operator_may_roll_a_flip_back_whatever_the_cooldown_and_the_pin(
    roles: str, name: str, to: Role, since_flip_s: float, by: Actor
) -> None:
    """Whichever actor had set the former role."""
    before = edit(name, by=by)(assignment(roles, last_prefill_to_decode=NOW_S - since_flip_s))
    flipped = build_flip(
        before, name, to, by=Actor.PERSON, reason="-", now_s=NOW_S, pinned_until_s=NOW_S + 60
    )
    refusal = Refusal(role=to, reason="did not verify", until=NOW_S + 30)
    back = edit(name, role=to.other, since=NOW_S - 1000, by=by, pinned_until=None, refused=refusal)(flipped)

    assert may_apply(flipped, back, frozenset("abc"), RULES, now_s=NOW_S) == ALLOWED


def test_unknown_instance_cannot_be_flipped() -> None:
    with pytest.raises(KeyError):
        flip("z", D)(assignment("PPD"))


@pytest.mark.parametrize(
    ("roles", "ready", "expected"),
    [
        pytest.param("PD", "ab", {"a": P, "b": D}, id="one instance of each role"),
        pytest.param("PD", "b", {"b": Role.BOTH}, id="the only ready instance serves both phases"),
        pytest.param("P", "a", {"a": Role.BOTH}, id="a single instance serves both phases"),
        pytest.param("PP", "ab", {"a": P, "b": P}, id="two instances of one role keep the role"),
        pytest.param("PD", "", {}, id="no instance is ready"),
        pytest.param("PD", "abz", {"a": P, "b": D}, id="an instance without an entry has no role"),
    ],
)
def test_effective_role_is_both_if_only_one_instance_is_ready(
    roles: str, ready: str, expected: dict[str, Role]
) -> None:
    assert resolve_effective_roles(assignment(roles).roles, frozenset(ready)) == expected


@pytest.mark.parametrize(
    ("roles", "ready", "groups", "expected"),
    [
        pytest.param("PD", "a", {}, {"a": P}, id="the only ready instance, a prefill engine, cannot decode"),
        pytest.param(
            "PD",
            "b",
            {},
            {"b": Role.BOTH},
            id="the only ready instance, a decode engine, also computes prompts",
        ),
        pytest.param(
            "PDP",
            "abc",
            {"c": 1},
            {"a": P, "b": D, "c": P},
            id="an instance alone in its group keeps its role",
        ),
    ],
)
def test_engine_started_with_the_prefill_role_never_serves_both(
    roles: str, ready: str, groups: dict[str, int], expected: dict[str, Role]
) -> None:
    effective = resolve_effective_roles(
        assignment(roles).roles, frozenset(ready), groups, restarted_by_flip=frozenset("abc")
    )
    assert effective == expected


def test_instances_assigned_to_a_role_are_ready_not_cordoned_and_sorted() -> None:
    roles = edit("b", cordoned=True)(assignment("PPPD")).roles
    assert list_assigned(dict(reversed(roles.items())), frozenset("abcd"), P) == ("a", "c")
    assert list_assigned(roles, frozenset("bcd"), P) == ("c",)


def test_the_floors_of_the_service_hold_in_an_assignment_that_says_less() -> None:
    current = assignment("PPD", floors=Floors(prefill=2, decode=1))
    lowered = flip("a", D, Actor.PERSON)(current).model_copy(update={"floors": Floors(prefill=0, decode=0)})
    rules = AssignmentRules(prefill_to_decode_cooldown_s=0.0, floors=Floors(prefill=2, decode=1))

    verdict = may_apply(current, lowered, frozenset("abc"), rules, now_s=NOW_S)

    assert verdict == Verdict(False, "1 instance would serve Prefill, the floor is 2; leaving: a")


@pytest.mark.parametrize(
    ("replicas", "floors", "expected"),
    [
        pytest.param((2,), (1, 1), (1, 1), id="two instances play a role each"),
        pytest.param((1,), (1, 1), (0, 1), id="a single instance plays both"),
        pytest.param((1, 1), (1, 1), (1, 1), id="one instance of each of two pools"),
        pytest.param((1,), (2, 1), (2, 1), id="higher floors stay"),
    ],
)
def test_a_single_desired_instance_meets_the_default_floors(
    replicas: tuple[int, ...], floors: tuple[int, int], expected: tuple[int, int]
) -> None:
    shape = {
        "service": "chat",
        "role": "Flexible",
        "model": "m",
        "engine": {},
        "instances": {"min": 1, "max": 8},
    }
    pools = [
        PDPool.model_validate({"metadata": {"name": f"chat-{n}"}, "spec": {**shape, "replicas": count}})
        for n, count in enumerate(replicas)
    ]
    roles = {"prefill": {"min": floors[0]}, "decode": {"min": floors[1]}}
    spec = PDServiceSpec.model_validate({"model": "m", "roles": roles, "instances": 8})
    rules = build_assignment_rules(spec, pools, [])
    assert rules.floors == Floors(prefill=expected[0], decode=expected[1])


def test_rules_come_from_service_pools_and_instances() -> None:
    base = "apiVersion: fulcrum.dev/v1alpha1, metadata: {name:"
    of = "service: chat, model: m, engine: {}"
    manifest = f"""
{{{base} chat}}, kind: PDService, spec: {{model: m, instances: 4, roles: {{prefill: {{min: 3}}}}}}}}
---
{{{base} chat-p}}, kind: PDPool, spec: {{{of}, role: Prefill, replicas: 1, instances: {{min: 1}}}}}}
---
{{{base} chat-0}}, kind: PDInstance, spec: {{{of}, pool: chat-p}}}}
---
{{{base} chat-1}}, kind: PDInstance, spec: {{{of}, pool: chat-flex}}}}
"""
    service, pool, *instances = load_manifest(manifest, source="test")
    assert isinstance(service, PDService)
    assert isinstance(pool, PDPool)

    rules = build_assignment_rules(service.spec, [pool], [i for i in instances if isinstance(i, PDInstance)])

    assert rules == AssignmentRules(
        10.0, {"chat-0": P}, Floors(prefill=3, decode=1), {"chat-0": 0, "chat-1": 0}
    )


@pytest.mark.parametrize(
    ("phase", "deleted", "serving"),
    [
        pytest.param("Serving", False, {"chat-0"}, id="serving"),
        pytest.param("Serving", True, set(), id="serving but being deleted"),
        pytest.param("Draining", False, set(), id="draining"),
    ],
)
def test_instance_serves_until_it_drains_or_its_deletion_is_requested(
    phase: str, deleted: bool, serving: set[str]
) -> None:
    metadata = {"name": "chat-0"} | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})
    instance = PDInstance.model_validate(
        {
            "apiVersion": "fulcrum.dev/v1alpha1",
            "kind": "PDInstance",
            "metadata": metadata,
            "spec": {"service": "chat", "pool": "flex", "model": "m", "engine": {"type": "Simulated"}},
            "status": {"phase": phase},
        }
    )
    assert list_serving_instances([instance]) == serving
