"""The PDAssignment: who plays which role, kept in step with the instances that exist.

The operator makes the first split, gives new instances the role that is further below its share, takes
entries of gone instances out and cordons who shall leave. Wishes of others are judged here once more; one
that may not be applied is written back with `refused`, so that nobody retries it for ever.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fulcrum_core.api import PDAssignmentSpec, PDService, Refusal, RoleAssignment
from fulcrum_core.assignment import CLOCK_SKEW_S, AssignmentRules, may_apply
from fulcrum_core.values import Actor, FlipStrategy, Role
from fulcrum_operator.plan.observed import Observed, by_number

REFUSED_FOR_S = 30.0
"""How long a refused wish is refused without a second look."""

Roles = dict[str, RoleAssignment]
Surplus = tuple[tuple[tuple[str, ...], int], ...]
"""Of each pool with too many instances: their names, cheapest to reclaim first, and how many must go."""


@dataclass(frozen=True, slots=True)
class Member:
    """An instance that shall have an entry, and the role it can never leave, if there is one."""

    name: str
    fixed: Role | None


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
    seen: Observed, members: tuple[Member, ...], surplus: Surplus, rules: AssignmentRules
) -> PDAssignmentSpec:
    """The assignment as it shall stand: the wish as far as `rules` allow, in step with `members`."""
    spec = _followed(_judged(seen, rules), seen.service, members, now_s=seen.now_s)
    return _cordoned(spec, surplus, seen.serving, rules, now_s=seen.now_s)


def rebuilt(seen: Observed) -> PDAssignmentSpec | None:
    """The last wish that was applied, read off the instances: what an operator knows after a restart.

    Under Relabel the wish itself is what is applied; an engine that must be started anew for a role plays
    the role in its status.
    """
    if seen.assignment is None:
        return None
    spec = seen.assignment.spec
    played = {
        instance.metadata.name: instance.status.role
        for instance in seen.instances
        if instance.status.strategy is FlipStrategy.RESTART
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
    """`last` again, each entry whose role was to change saying why it was not.

    What the wish says of instances that `last` does not know stays, and so does its start of the cooldown:
    a reader that took the wish for good, because it saw more instances ready, would refuse to set it back.
    """
    roles = dict(last.roles)
    for name, entry in wish.roles.items():
        before = last.roles.get(name)
        if before is None:
            roles[name] = entry
        elif before.role is not entry.role:
            turned_down = Refusal(role=entry.role, reason=reason[:1024], until=now_s + REFUSED_FOR_S)
            roles[name] = before.model_copy(update={"refused": turned_down})
    began_s = _cooldown_start(last.last_prefill_to_decode, wish.last_prefill_to_decode, now_s=now_s)
    return last.model_copy(update={"roles": roles, "last_prefill_to_decode": began_s})


def _cooldown_start(last_s: float | None, wish_s: float | None, *, now_s: float) -> float | None:
    """The later of both, unless it is one that nobody can have taken for good."""
    if wish_s is None or wish_s > now_s + CLOCK_SKEW_S:
        return last_s
    return wish_s if last_s is None else max(last_s, wish_s)


def _followed(
    spec: PDAssignmentSpec | None, service: PDService, members: tuple[Member, ...], *, now_s: float
) -> PDAssignmentSpec:
    floors = service.spec.roles.floors()
    if spec is None:
        split = first_split(members, prefill_floor=floors.prefill, decode_floor=floors.decode)
        roles = {name: _entry(role, "first split", now_s) for name, role in split.items()}
        return PDAssignmentSpec(service=service.metadata.name, roles=_ordered(roles), floors=floors)
    names = {member.name for member in members}
    roles = {name: entry for name, entry in spec.roles.items() if name in names}
    for member in members:
        if member.name not in roles:
            had = [Role(entry.role) for entry in roles.values()]
            role = member.fixed or role_for_new(had, prefill_floor=floors.prefill, decode_floor=floors.decode)
            roles[member.name] = _entry(role, "new instance", now_s)
    return spec.model_copy(update={"roles": _ordered(roles), "floors": floors})


def _entry(role: Role, reason: str, now_s: float) -> RoleAssignment:
    return RoleAssignment.model_validate(
        {"role": role, "since": now_s, "by": Actor.OPERATOR, "reason": reason}
    )


def _ordered(roles: Mapping[str, RoleAssignment]) -> Roles:
    return {name: roles[name] for name in sorted(roles, key=by_number)}


def _cordoned(
    spec: PDAssignmentSpec,
    surplus: Surplus,
    serving: Collection[str],
    rules: AssignmentRules,
    *,
    now_s: float,
) -> PDAssignmentSpec:
    """Cordon who shall leave, as far as the floors allow, and lift the operator's other cordons."""
    chosen: set[str] = set()
    for candidates, excess in surplus:
        left = excess
        for name in candidates:
            proposed = _with_cordon(spec, name, cordoned=True)
            if left and may_apply(spec, proposed, serving, rules, now_s=now_s).allowed:
                spec, left = proposed, left - 1
                chosen.add(name)
    for name, entry in spec.roles.items():
        if entry.cordoned and name not in chosen and (entry.cordoned_by or entry.by) is not Actor.PERSON:
            spec = _with_cordon(spec, name, cordoned=False)
    return spec


def _with_cordon(spec: PDAssignmentSpec, name: str, *, cordoned: bool) -> PDAssignmentSpec:
    before = spec.roles[name]
    if before.cordoned is cordoned:
        return spec
    reason = "more instances than wanted" if cordoned else "wanted after all"
    update = {"cordoned": cordoned, "by": Actor.OPERATOR, "reason": reason}
    return spec.model_copy(update={"roles": {**spec.roles, name: before.model_copy(update=update)}})


def leaving(spec: PDAssignmentSpec, surplus: Surplus) -> frozenset[str]:
    """Who shall go for good: of each pool's surplus those that are cordoned, cheapest first."""
    return frozenset(
        name
        for candidates, excess in surplus
        for name in [name for name in candidates if spec.roles[name].cordoned][:excess]
    )
