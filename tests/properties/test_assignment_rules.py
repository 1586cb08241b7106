"""Properties of `may_apply` under any sequence of allowed changes, by any writer, with crashes in between."""

from collections.abc import Iterable
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, Refusal, RoleAssignment
from fulcrum_core.assignment import (
    AssignmentRules,
    build_flip,
    list_assigned,
    may_apply,
    resolve_effective_roles,
)
from fulcrum_core.merge_patch import apply_merge_patch, create_merge_patch
from fulcrum_core.values import Actor, Role

NAMES = [f"chat-{n}" for n in range(6)]
ROLES = st.sampled_from([Role.PREFILL, Role.DECODE])
TIMES = st.integers(0, 60).map(float)
COOLDOWN_S = 10.0


def count(spec: PDAssignmentSpec, names: Iterable[str], role: Role) -> int:
    """Count the instances of a role that are not cordoned, independently of the code under test."""
    return sum(
        1
        for name in names
        if name in spec.roles and spec.roles[name].role == role and not spec.roles[name].cordoned
    )


class ManyWriters(RuleBasedStateMachine):
    """Autoscalers, operators and persons write what is allowed; instances crash and recover."""

    @initialize(
        roles=st.lists(ROLES, min_size=2, max_size=6),
        floors=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        cooldown_s=st.sampled_from([0.0, COOLDOWN_S]),
    )
    def begin(self, roles: list[Role], floors: tuple[int, int], cooldown_s: float) -> None:
        self.now_s = 1000.0
        entries = {
            name: RoleAssignment.model_validate({"role": role, "since": 0.0, "by": Actor.OPERATOR})
            for name, role in zip(NAMES, roles, strict=False)
        }
        self.spec = PDAssignmentSpec(
            service="chat", roles=entries, floors=Floors(prefill=floors[0], decode=floors[1])
        )
        self.ready = set(entries)
        self.assignment_rules = AssignmentRules(cooldown_s)
        self.assigned_min = {
            role: min(self._floor(role), self._assigned(role)) for role in (Role.PREFILL, Role.DECODE)
        }
        self.to_decode: list[tuple[float, Actor]] = []

    def _floor(self, role: Role) -> int:
        return self.spec.floors.for_role(role)

    def _assigned(self, role: Role) -> int:
        return count(self.spec, self.spec.roles, role)

    def _write(self, proposed: PDAssignmentSpec) -> None:
        """Write the assignment if allowed, and check a writer's guarantees."""
        verdict = may_apply(self.spec, proposed, self.ready, self.assignment_rules, now_s=self.now_s)
        assert verdict.reason
        if not verdict.allowed:
            return
        for role in (Role.PREFILL, Role.DECODE):
            had, has = count(self.spec, self.ready, role), count(proposed, self.ready, role)
            assert has >= min(had, self._floor(role))
        for name, after in proposed.roles.items():
            before = self.spec.roles.get(name)
            if before is not None and before.role is not after.role:
                self._check_flip(before, after)
        self.spec = proposed

    def _check_flip(self, before: RoleAssignment, after: RoleAssignment) -> None:
        if after.by is not Actor.PERSON:
            assert before.pinned_until is None or before.pinned_until <= after.since
        if after.role is not Role.DECODE:
            return
        if after.by is Actor.AUTOSCALER:
            cooldown_s = self.assignment_rules.prefill_to_decode_cooldown_s
            assert all(after.since - since_s >= cooldown_s for since_s, _ in self.to_decode)
        self.to_decode.append((after.since, after.by))

    @rule(
        name=st.sampled_from(NAMES),
        to=ROLES,
        by=st.sampled_from(Actor),
        lag_s=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def flip(self, name: str, to: Role, by: Actor, lag_s: float) -> None:
        """Flip by a writer whose clock may be late."""
        if name in self.spec.roles:
            self._write(build_flip(self.spec, name, to, by=by, reason="because", now_s=self.now_s - lag_s))

    @rule(name=st.sampled_from(NAMES), to=ROLES, by=st.sampled_from(Actor))
    def patch_the_role_alone(self, name: str, to: Role, by: Actor) -> None:
        """Patch the role without the time of the last flip, like a careless user."""
        if name in self.spec.roles:
            fields = {"role": to, "by": by, "since": self.now_s}
            entry = self.spec.roles[name].model_copy(update=fields)
            if to is Role.DECODE and by is not Actor.AUTOSCALER:
                return  # without a record of the flip, no later writer could keep the cooldown
            self._write(self.spec.model_copy(update={"roles": {**self.spec.roles, name: entry}}))

    @rule(name=st.sampled_from(NAMES), lasts_s=st.sampled_from([5.0, 30.0]))
    def pin(self, name: str, lasts_s: float) -> None:
        if name in self.spec.roles:
            role = Role(self.spec.roles[name].role)
            until_s = self.now_s + lasts_s
            self._write(
                build_flip(
                    self.spec,
                    name,
                    role,
                    by=Actor.PERSON,
                    reason="stay",
                    now_s=self.now_s,
                    pinned_until_s=until_s,
                )
            )

    @rule(name=st.sampled_from(NAMES), cordoned=st.booleans())
    def cordon(self, name: str, cordoned: bool) -> None:
        if name in self.spec.roles:
            entry = self.spec.roles[name].model_copy(update={"cordoned": cordoned})
            self._write(self.spec.model_copy(update={"roles": {**self.spec.roles, name: entry}}))

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=3, unique=True), to=ROLES)
    def flip_several_at_once(self, names: list[str], to: Role) -> None:
        proposed = self.spec
        for name in names:
            if name in proposed.roles:
                proposed = build_flip(
                    proposed, name, to, by=Actor.OPERATOR, reason="together", now_s=self.now_s
                )
        self._write(proposed)

    @rule(name=st.sampled_from(NAMES))
    def crash(self, name: str) -> None:
        self.ready.discard(name)

    @rule(name=st.sampled_from(NAMES))
    def recover(self, name: str) -> None:
        if name in self.spec.roles:
            self.ready.add(name)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    @precondition(lambda self: hasattr(self, "spec"))
    def both_floors_stay_assigned(self) -> None:
        for role, assigned_min in self.assigned_min.items():
            assert self._assigned(role) >= assigned_min

    @invariant()
    @precondition(lambda self: hasattr(self, "spec"))
    def with_all_recovered_both_floors_are_served(self) -> None:
        for role, assigned_min in self.assigned_min.items():
            assert len(list_assigned(self.spec.roles, self.spec.roles, role)) >= assigned_min


TestManyWriters = ManyWriters.TestCase


@st.composite
def specs(draw: st.DrawFn) -> PDAssignmentSpec:
    roles = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        role = draw(ROLES)
        refused = Refusal.model_validate({"role": role.other, "reason": "-", "until": draw(TIMES)})
        roles[name] = RoleAssignment.model_validate(
            {
                "role": role,
                "since": draw(TIMES),
                "by": draw(st.sampled_from(Actor)),
                "reason": draw(st.sampled_from(["", "busy"])),
                "pinned_until": draw(st.one_of(st.none(), TIMES)),
                "cordoned": draw(st.booleans()),
                "refused": draw(st.sampled_from([None, refused])),
            }
        )
    return PDAssignmentSpec(
        service="chat",
        roles=roles,
        floors=Floors(prefill=draw(st.integers(0, 3)), decode=draw(st.integers(0, 3))),
        last_prefill_to_decode=draw(st.one_of(st.none(), TIMES)),
        flips=draw(st.integers(0, 3)),
    )


READY = st.sets(st.sampled_from(NAMES))


def shuffled(spec: PDAssignmentSpec, rng: Random) -> PDAssignmentSpec:
    names = list(spec.roles)
    rng.shuffle(names)
    return spec.model_copy(update={"roles": {name: spec.roles[name] for name in names}})


@given(specs(), specs(), READY, TIMES, st.randoms(use_true_random=False))
def test_a_verdict_does_not_depend_on_the_order_of_keys(
    current: PDAssignmentSpec, proposed: PDAssignmentSpec, ready: set[str], now_s: float, rng: Random
) -> None:
    rules = AssignmentRules(COOLDOWN_S)
    verdict = may_apply(current, proposed, ready, rules, now_s=now_s)
    again = may_apply(
        shuffled(current, rng), shuffled(proposed, rng), sorted(ready, reverse=True), rules, now_s=now_s
    )
    assert again == verdict


@given(specs(), specs(), READY, TIMES, TIMES)
def test_a_verdict_does_not_depend_on_the_time_of_the_reader(
    current: PDAssignmentSpec, proposed: PDAssignmentSpec, ready: set[str], now_s: float, later_s: float
) -> None:
    """Apart from the check for future times, a verdict depends only on times in the objects."""
    rules, latest_s = AssignmentRules(COOLDOWN_S), 100.0  # after every time in the objects
    first = may_apply(current, proposed, ready, rules, now_s=latest_s + now_s)
    assert may_apply(current, proposed, ready, rules, now_s=latest_s + later_s) == first


@given(specs(), READY, TIMES)
def test_no_change_is_always_allowed(spec: PDAssignmentSpec, ready: set[str], now_s: float) -> None:
    assert may_apply(spec, spec, ready, AssignmentRules(COOLDOWN_S), now_s=now_s).allowed


@given(specs(), st.sampled_from(NAMES), ROLES, READY, TIMES)
def test_a_person_may_make_every_flip_that_any_actor_may(
    spec: PDAssignmentSpec, name: str, to: Role, ready: set[str], now_s: float
) -> None:
    if name not in spec.roles:
        return
    rules = AssignmentRules(COOLDOWN_S)

    def allowed(by: Actor) -> bool:
        proposed = build_flip(spec, name, to, by=by, reason="-", now_s=now_s)
        return may_apply(spec, proposed, ready, rules, now_s=now_s).allowed

    assert allowed(Actor.PERSON) >= max(allowed(Actor.AUTOSCALER), allowed(Actor.OPERATOR))


@given(specs(), specs(), READY, TIMES, st.sampled_from(NAMES))
def test_a_longer_cooldown_never_allows_more(
    current: PDAssignmentSpec, proposed: PDAssignmentSpec, ready: set[str], now_s: float, name: str
) -> None:
    del name
    short = may_apply(current, proposed, ready, AssignmentRules(5.0), now_s=now_s).allowed
    long = may_apply(current, proposed, ready, AssignmentRules(50.0), now_s=now_s).allowed
    assert short >= long


@given(specs(), specs())
def test_the_merge_patch_reproduces_the_proposed_assignment(
    current: PDAssignmentSpec, proposed: PDAssignmentSpec
) -> None:
    """A merge patch that a store applies and returns equals the assignment that the writer proposed."""
    patch = create_merge_patch(current.dump(), proposed.dump())
    assert PDAssignmentSpec.model_validate(apply_merge_patch(current.dump(), patch)) == proposed


@given(specs(), st.sampled_from(NAMES), ROLES, TIMES)
def test_a_flip_and_its_reverse_restore_the_roles(
    spec: PDAssignmentSpec, name: str, to: Role, now_s: float
) -> None:
    if name not in spec.roles:
        return
    home = Role(spec.roles[name].role)
    away = build_flip(spec, name, to, by=Actor.PERSON, reason="-", now_s=now_s)
    back = build_flip(away, name, home, by=Actor.PERSON, reason="-", now_s=now_s)
    assert {n: e.role for n, e in back.roles.items()} == {n: e.role for n, e in spec.roles.items()}
    assert back.flips - spec.flips == (2 if to is not home else 0)


@given(specs(), READY)
def test_effective_roles_are_the_assigned_ones_or_both_for_a_single_instance(
    spec: PDAssignmentSpec, ready: set[str]
) -> None:
    there = ready & spec.roles.keys()
    effective = resolve_effective_roles(spec.roles, ready)
    assert effective.keys() == there
    working = [name for name in there if not spec.roles[name].cordoned] or list(there)
    assert (len(working) == 1) == (Role.BOTH in effective.values())
    for name, role in effective.items():
        assert role in (spec.roles[name].role, Role.BOTH)
