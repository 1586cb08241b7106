"""The PDAssignment: who plays which role, kept in step with the instances that exist.

The operator makes the first split, gives new instances the role that is further below its share, takes
entries of gone instances out and cordons who shall leave. Wishes of others are judged here once more; one
that may not be applied is written back with `refused`, so that nobody retries it for ever.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fulcrum_core.api import Floors, PDAssignmentSpec, PDService, Refusal, RoleAssignment
from fulcrum_core.assignment import CLOCK_SKEW_S, AssignmentRules, may_apply, serving, with_flip
from fulcrum_core.values import Actor, FlipStrategy, Role
from fulcrum_operator.plan.instances import Departure
from fulcrum_operator.plan.observed import Observed, by_number, played_role

REFUSED_FOR_S = 30.0
"""How long a refused wish is refused without a second look."""

Roles = dict[str, RoleAssignment]


@dataclass(frozen=True, slots=True)
class Member:
    """An instance that shall have an entry, and the role it can never leave, if there is one."""

    name: str
    fixed: Role | None
    revision: str = ""
    """Instances of one revision can always exchange KV."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The assignment as it shall stand, who leaves by it, and which departures the floors hold up."""

    spec: PDAssignmentSpec
    leaving: frozenset[str]
    held: Mapping[str, str]
    """By pool: why fewer go than shall."""


def first_split(members: Collection[Member], *, prefill_floor: int, decode_floor: int) -> dict[str, Role]:
    """Half of the instances prefill, the first ones by number; fixed roles as they are, floors before halves.

    An odd one decodes: an instance that decodes can prefill for itself without a hand-off. With too few
    instances for both floors prefill's gives way.
    """
    roles = {member.name: member.fixed for member in members if member.fixed}
    flexible = sorted((member.name for member in members if not member.fixed), key=by_number)
    fixed = Counter(roles.values())
    wanted = max(len(members) // 2, prefill_floor) - fixed[Role.PREFILL]
    spare = len(flexible) - max(0, decode_floor - fixed[Role.DECODE])
    prefill = max(0, min(wanted, spare))
    split = {name: Role.PREFILL if index < prefill else Role.DECODE for index, name in enumerate(flexible)}
    return {**roles, **split}


def role_for_new(roles: Iterable[Role], *, prefill_floor: int, decode_floor: int) -> Role:
    """The role of one more instance: the one below its floor, else the one that fewer have; on a tie Decode.

    Its share is half: a ratio that somebody chose would drift if it were carried on instance by instance,
    and a flip to Prefill costs nothing.
    """
    had = Counter(roles)
    if had[Role.DECODE] < decode_floor:
        return Role.DECODE
    if had[Role.PREFILL] < prefill_floor:
        return Role.PREFILL
    return Role.PREFILL if had[Role.PREFILL] < had[Role.DECODE] else Role.DECODE


def plan_assignment(
    seen: Observed,
    members: tuple[Member, ...],
    departures: tuple[Departure, ...],
    rules: AssignmentRules,
) -> Assigned:
    """The assignment as it shall stand: the wish as far as `rules` allow, in step with `members`.

    Instances on their way out keep their entries until they are gone: a reader that still sees them serve
    would refuse to drop them.
    """
    kept = frozenset(instance.metadata.name for instance in seen.instances)
    spec = _followed(_judged(seen, rules), seen.service, members, kept, now_s=seen.now_s)
    return _cordoned(spec, departures, seen, members, rules)


def rebuilt(seen: Observed) -> PDAssignmentSpec | None:
    """The last wish that was applied, read off the instances: what an operator knows after a restart.

    Under Relabel the wish itself is what is applied; an engine that must be started anew for a role plays
    the role in its status.
    """
    if seen.assignment is None:
        return None
    spec = seen.assignment.spec
    played = {
        instance.metadata.name: played_role(instance)
        for instance in seen.instances
        if seen.strategy(instance) is FlipStrategy.RESTART
    }
    roles = {name: _with_role(entry, played.get(name)) for name, entry in spec.roles.items()}
    return spec.model_copy(update={"roles": roles})


def _with_role(entry: RoleAssignment, role: Role | None) -> RoleAssignment:
    return entry.model_copy(update={"role": role}) if role in (Role.PREFILL, Role.DECODE) else entry


def _judged(seen: Observed, rules: AssignmentRules) -> PDAssignmentSpec | None:
    """The wish, or the last good one with the refusal written into it."""
    if seen.assignment is None:
        return None
    wish, last = seen.assignment.spec, seen.accepted or rebuilt(seen) or seen.assignment.spec
    verdict = may_apply(last, wish, seen.serving, rules, now_s=seen.now_s)
    if verdict.allowed:
        return wish
    return refused(last, wish, verdict.reason, now_s=seen.now_s)


def refused(last: PDAssignmentSpec, wish: PDAssignmentSpec, reason: str, *, now_s: float) -> PDAssignmentSpec:
    """`last` again, each entry that was to change saying why it was not.

    What the wish says of instances that `last` does not know stays, and so does its start of the cooldown:
    a reader that took the wish for good, because it saw more instances ready, would refuse to set it back.
    """
    roles = dict(last.roles)
    for name, entry in wish.roles.items():
        before = last.roles.get(name)
        if before is None:
            roles[name] = entry
        elif _asks(before) != _asks(entry):
            role = entry.role if entry.role is not before.role else None
            turned_down = Refusal(role=role, reason=reason[:1024], until=now_s + REFUSED_FOR_S)
            roles[name] = before.model_copy(update={"refused": turned_down})
    began_s = _cooldown_start(last.last_prefill_to_decode, wish.last_prefill_to_decode, now_s=now_s)
    return last.model_copy(update={"roles": roles, "last_prefill_to_decode": began_s})


def _asks(entry: RoleAssignment) -> tuple[Role, bool, float | None]:
    """What of an entry is a wish; the rest says whose and why."""
    return entry.role, entry.cordoned, entry.pinned_until


def _cooldown_start(last_s: float | None, wish_s: float | None, *, now_s: float) -> float | None:
    """The later of both, unless it is one that nobody can have taken for good."""
    if wish_s is None or wish_s > now_s + CLOCK_SKEW_S:
        return last_s
    return wish_s if last_s is None else max(last_s, wish_s)


def _followed(
    spec: PDAssignmentSpec | None,
    service: PDService,
    members: tuple[Member, ...],
    kept: Collection[str],
    *,
    now_s: float,
) -> PDAssignmentSpec:
    floors = service.spec.roles.floors()
    if spec is None:
        split = first_split(members, prefill_floor=floors.prefill, decode_floor=floors.decode)
        roles = {name: _entry(role, "first split", now_s) for name, role in split.items()}
        return PDAssignmentSpec(service=service.metadata.name, roles=_ordered(roles), floors=floors)
    names = {member.name for member in members} | set(kept)
    roles = {name: entry for name, entry in spec.roles.items() if name in names}
    for member in members:
        if member.name not in roles:
            role = member.fixed or _role_beside(member, members, roles, floors)
            roles[member.name] = _entry(role, "new instance", now_s)
    return spec.model_copy(update={"roles": _ordered(roles), "floors": floors})


def _role_beside(
    member: Member, members: tuple[Member, ...], roles: Mapping[str, RoleAssignment], floors: Floors
) -> Role:
    """The role of a new instance among those of its revision.

    While another revision is there, the first two of a new one can serve without it: they may not be able
    to exchange KV with it.
    """
    mates = [other.name for other in members if other.revision == member.revision]
    had = [Role(roles[name].role) for name in mates if name in roles]
    if len(mates) < len(members):
        for role in (Role.DECODE, Role.PREFILL):
            if role not in had:
                return role
    return role_for_new(had, prefill_floor=floors.prefill, decode_floor=floors.decode)


def _entry(role: Role, reason: str, now_s: float) -> RoleAssignment:
    return RoleAssignment.model_validate(
        {"role": role, "since": now_s, "by": Actor.OPERATOR, "reason": reason}
    )


def _ordered(roles: Mapping[str, RoleAssignment]) -> Roles:
    return {name: roles[name] for name in sorted(roles, key=by_number)}


def _cordoned(
    spec: PDAssignmentSpec,
    departures: tuple[Departure, ...],
    seen: Observed,
    members: tuple[Member, ...],
    rules: AssignmentRules,
) -> Assigned:
    """Cordon who shall leave, as far as the floors allow, and lift the operator's other cordons."""
    leaving: set[str] = set()
    held: dict[str, str] = {}
    for departure in departures:
        left, refusal = departure.count, ""
        for name in departure.candidates:
            proposed = _with_cordon(spec, name, departure.why)
            verdict = may_apply(spec, proposed, seen.serving, rules, now_s=seen.now_s) if left else None
            if verdict and verdict.allowed:
                spec, left = proposed, left - 1
                leaving.add(name)
            elif verdict:
                refusal = verdict.reason
        if left and refusal and departure.by_flip:
            spec = _made_way(spec, departure, leaving, seen, rules)
        elif left and refusal:
            held[departure.pool] = refusal
    for name in sorted({member.name for member in members} - leaving):
        if spec.roles[name].cordoner not in (None, Actor.PERSON):
            spec = _with_cordon(spec, name, None)
    return Assigned(spec, frozenset(leaving), held)


def _made_way(
    spec: PDAssignmentSpec,
    departure: Departure,
    leaving: Collection[str],
    seen: Observed,
    rules: AssignmentRules,
) -> PDAssignmentSpec:
    """One of those that stay given the role of one that cannot leave: it goes once the other has it."""
    stuck = [name for name in departure.candidates if name not in leaving and name in seen.serving]
    for name in stuck[:1]:
        role = Role(spec.roles[name].role)
        others = serving(spec.roles, seen.serving - set(departure.candidates), role.other)
        for other in others:
            proposed = with_flip(
                spec, other, role, by=Actor.OPERATOR, reason=f"{name} leaves", now_s=seen.now_s
            )
            if may_apply(spec, proposed, seen.serving, rules, now_s=seen.now_s).allowed:
                return proposed
    return spec


def _with_cordon(spec: PDAssignmentSpec, name: str, why: str | None) -> PDAssignmentSpec:
    """The instance cordoned by the operator, or its cordon lifted; a cordon that stands stays as it is."""
    before = spec.roles[name]
    if before.cordoned is (why is not None):
        return spec
    cordon = (why is not None, Actor.OPERATOR if why else None, why or "")
    update = dict(zip(("cordoned", "cordoned_by", "cordon_reason"), cordon, strict=True))
    return spec.model_copy(update={"roles": {**spec.roles, name: before.model_copy(update=update)}})
