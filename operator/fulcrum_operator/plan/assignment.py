"""The PDAssignment that a service should have, given its instances.

The operator makes the first split, gives new instances the role with fewer instances, removes entries of
deleted instances and cordons those to be removed. If a floor blocks a removal, it may flip a remaining
instance first. It checks every change by others again; a refused change is written back with `refused`, so
that the writer does not retry it for ever.

`service` calls `plan_assignment`. The autoscaler and people write theirs with
`fulcrum_cluster.assignment_write`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fulcrum_core.api import Floors, PDAssignmentSpec, PDService, Refusal, RoleAssignment
from fulcrum_core.assignment import CLOCK_SKEW_S, AssignmentRules, build_flip, list_assigned, may_apply
from fulcrum_core.values import Actor, FlipStrategy, Role
from fulcrum_operator.plan.instance_state import current_role, flip_strategy, instance_order, ready_instances
from fulcrum_operator.plan.instances import Removal
from fulcrum_operator.plan.observed import Observed

REFUSED_FOR_S = 30.0
"""Seconds for which a refused change stays refused without a new check."""

Roles = dict[str, RoleAssignment]


@dataclass(frozen=True, slots=True)
class AssignableInstance:
    """An instance that needs an entry, with its role if its pool fixes it."""

    name: str
    fixed_role: Role | None
    revision: str = ""
    """Revision of the instance. Instances of one revision can always exchange KV."""


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The assignment to write, the instances to drain and then remove, and why floors keep others."""

    spec: PDAssignmentSpec
    leaving: frozenset[str]
    blocked_removals: Mapping[str, str]
    """Why a pool removes fewer instances than planned, by the name of the pool."""


def plan_first_split(
    members: Collection[AssignableInstance], *, prefill_floor: int, decode_floor: int
) -> dict[str, Role]:
    """Roles of the first assignment: half of the instances prefill, those with the lowest numbers.

    Fixed roles stay, and floors have precedence over halves. With an odd number the extra instance decodes:
    it can also prefill for itself, without a KV transfer. With too few instances for both floors the floor
    of Prefill is missed.
    """
    roles = {member.name: member.fixed_role for member in members if member.fixed_role}
    flexible = sorted((member.name for member in members if not member.fixed_role), key=instance_order)
    fixed = Counter(roles.values())
    desired = max(len(members) // 2, prefill_floor) - fixed[Role.PREFILL]
    spare = len(flexible) - max(0, decode_floor - fixed[Role.DECODE])
    prefill = max(0, min(desired, spare))
    split = {name: Role.PREFILL if index < prefill else Role.DECODE for index, name in enumerate(flexible)}
    return {**roles, **split}


def choose_role_for_new_instance(roles: Iterable[Role], *, prefill_floor: int, decode_floor: int) -> Role:
    """Role of one more instance: the role below its floor, else the role with fewer instances, else Decode.

    The target is one half for each role. A chosen ratio is not continued: it would drift with every new
    instance, and a flip to Prefill is cheap.
    """
    existing = Counter(roles)
    if existing[Role.DECODE] < decode_floor:
        return Role.DECODE
    if existing[Role.PREFILL] < prefill_floor:
        return Role.PREFILL
    return Role.PREFILL if existing[Role.PREFILL] < existing[Role.DECODE] else Role.DECODE


def plan_assignment(
    observed: Observed,
    members: tuple[AssignableInstance, ...],
    removals: tuple[Removal, ...],
    rules: AssignmentRules,
) -> AssignmentPlan:
    """The assignment to write, with an entry for each of `members`.

    It starts from the desired one if `rules` allow all its changes, else from the last accepted one.
    Terminating instances keep their entries until they are deleted: a reader that still observes them
    serving would refuse an assignment without them.
    """
    existing_names = frozenset(instance.metadata.name for instance in observed.instances)
    spec = _match_instances(
        _accept_or_refuse(observed, rules),
        observed.service,
        members,
        existing_names,
        floors=rules.floors,
        now_s=observed.now_s,
    )
    return _cordon_leaving(spec, removals, observed, members, rules)


def rebuild_accepted_assignment(observed: Observed) -> PDAssignmentSpec | None:
    """The last accepted assignment, rebuilt from the instances after a restart; None without an assignment.

    Under Relabel the desired role is applied at once. An instance that restarts to flip still plays the role
    in its status.
    """
    if observed.assignment is None:
        return None
    spec = observed.assignment.spec
    current_roles = {
        instance.metadata.name: current_role(instance)
        for instance in observed.instances
        if flip_strategy(observed, instance) is FlipStrategy.RESTART
    }
    roles = {name: _entry_with_role(entry, current_roles.get(name)) for name, entry in spec.roles.items()}
    return spec.model_copy(update={"roles": roles})


def _entry_with_role(entry: RoleAssignment, role: Role | None) -> RoleAssignment:
    return entry.model_copy(update={"role": role}) if role in (Role.PREFILL, Role.DECODE) else entry


def _accept_or_refuse(observed: Observed, rules: AssignmentRules) -> PDAssignmentSpec | None:
    """The desired assignment if allowed; else the last accepted one with the refusal in its entries."""
    if observed.assignment is None:
        return None
    desired, last = (
        observed.assignment.spec,
        observed.accepted_assignment or rebuild_accepted_assignment(observed) or observed.assignment.spec,
    )
    verdict = may_apply(last, desired, ready_instances(observed), rules, now_s=observed.now_s)
    if verdict.allowed:
        return desired
    return refuse_changes(last, desired, verdict.reason, now_s=observed.now_s)


def refuse_changes(
    last: PDAssignmentSpec, desired: PDAssignmentSpec, reason: str, *, now_s: float
) -> PDAssignmentSpec:
    """`last` with a refusal in each entry that `desired` changes.

    Entries of instances that only `desired` contains are kept. The later start of the cooldown is kept too:
    a reader that observed more ready instances may have applied `desired` and would reject an earlier start.
    """
    roles = dict(last.roles)
    for name, entry in desired.roles.items():
        before = last.roles.get(name)
        if before is None:
            roles[name] = entry
        elif _requested_fields(before) != _requested_fields(entry):
            role = entry.role if entry.role is not before.role else None
            refusal = Refusal(role=role, reason=reason[:1024], until=now_s + REFUSED_FOR_S)
            roles[name] = before.model_copy(update={"refused": refusal})
    began_s = _cooldown_start(last.last_prefill_to_decode, desired.last_prefill_to_decode, now_s=now_s)
    return last.model_copy(update={"roles": roles, "last_prefill_to_decode": began_s})


def _requested_fields(entry: RoleAssignment) -> tuple[Role, bool, float | None]:
    """Fields of an entry that request a change; the other fields describe who made it and why."""
    return entry.role, entry.cordoned, entry.pinned_until


def _cooldown_start(last_s: float | None, desired_s: float | None, *, now_s: float) -> float | None:
    """The later of both times, ignoring a desired time too far in the future for any reader to accept."""
    if desired_s is None or desired_s > now_s + CLOCK_SKEW_S:
        return last_s
    return desired_s if last_s is None else max(last_s, desired_s)


def _match_instances(
    spec: PDAssignmentSpec | None,
    service: PDService,
    members: tuple[AssignableInstance, ...],
    existing_names: Collection[str],
    *,
    floors: Floors,
    now_s: float,
) -> PDAssignmentSpec:
    if spec is None:
        split = plan_first_split(members, prefill_floor=floors.prefill, decode_floor=floors.decode)
        roles = {name: _new_entry(role, "first split", now_s) for name, role in split.items()}
        return PDAssignmentSpec(service=service.metadata.name, roles=_sort_roles(roles), floors=floors)
    names = {member.name for member in members} | set(existing_names)
    roles = {name: entry for name, entry in spec.roles.items() if name in names}
    for member in members:
        if member.name not in roles:
            role = member.fixed_role or _role_within_revision(member, members, roles, floors)
            roles[member.name] = _new_entry(role, "new instance", now_s)
    return spec.model_copy(update={"roles": _sort_roles(roles), "floors": floors})


def _role_within_revision(
    member: AssignableInstance,
    members: tuple[AssignableInstance, ...],
    roles: Mapping[str, RoleAssignment],
    floors: Floors,
) -> Role:
    """Role of a new instance, chosen among the instances of its revision.

    During a roll-out the first two instances of a new revision get different roles: they may not be able to
    exchange KV with the old revision.
    """
    same_revision = [other.name for other in members if other.revision == member.revision]
    existing = [Role(roles[name].role) for name in same_revision if name in roles]
    if len(same_revision) < len(members):
        for role in (Role.DECODE, Role.PREFILL):
            if role not in existing:
                return role
    return choose_role_for_new_instance(existing, prefill_floor=floors.prefill, decode_floor=floors.decode)


def _new_entry(role: Role, reason: str, now_s: float) -> RoleAssignment:
    return RoleAssignment.model_validate(
        {"role": role, "since": now_s, "by": Actor.OPERATOR, "reason": reason}
    )


def _sort_roles(roles: Mapping[str, RoleAssignment]) -> Roles:
    return {name: roles[name] for name in sorted(roles, key=instance_order)}


def _cordon_leaving(
    spec: PDAssignmentSpec,
    removals: tuple[Removal, ...],
    observed: Observed,
    members: tuple[AssignableInstance, ...],
    rules: AssignmentRules,
) -> AssignmentPlan:
    """Cordon instances to be removed, as far as the floors allow; remove other cordons that no person set."""
    leaving: set[str] = set()
    blocked_removals: dict[str, str] = {}
    for removal in removals:
        serving = _list_serving_their_roles(observed, spec, rules)
        left, refusal = removal.count, ""
        for name in removal.candidates:
            proposed = _set_cordon(spec, name, removal.reason)
            verdict = may_apply(spec, proposed, serving, rules, now_s=observed.now_s) if left else None
            if verdict and verdict.allowed:
                spec, left = proposed, left - 1
                leaving.add(name)
            elif verdict:
                refusal = verdict.reason
        if left and refusal and removal.may_flip_another:
            spec = _flip_to_make_room(spec, removal, leaving, serving, observed, rules)
        elif left and refusal:
            blocked_removals[removal.pool] = refusal
    for name in sorted({member.name for member in members} - leaving):
        if spec.roles[name].effective_cordoned_by not in (None, Actor.PERSON):
            spec = _set_cordon(spec, name, None)
    return AssignmentPlan(spec, frozenset(leaving), blocked_removals)


def _list_serving_their_roles(
    observed: Observed, spec: PDAssignmentSpec, rules: AssignmentRules
) -> frozenset[str]:
    """The ready instances, without those whose engines restart first to take their roles in `spec`."""
    restarting = {
        name
        for instance in observed.instances
        if (name := instance.metadata.name) in rules.restarted_by_flip and name in spec.roles
        if current_role(instance) not in (None, spec.roles[name].role)
    }
    return ready_instances(observed) - restarting


def _flip_to_make_room(
    spec: PDAssignmentSpec,
    removal: Removal,
    leaving: Collection[str],
    serving: frozenset[str],
    observed: Observed,
    rules: AssignmentRules,
) -> PDAssignmentSpec:
    """Give a remaining instance the role of one that a floor keeps, so that it can be removed later."""
    unremovable = [name for name in removal.candidates if name not in leaving]
    for name in unremovable[:1]:
        role = Role(spec.roles[name].role)
        others = list_assigned(spec.roles, serving - set(removal.candidates), role.other)
        for other in others:
            proposed = build_flip(
                spec,
                other,
                role,
                by=Actor.OPERATOR,
                reason=f"replaces {name}, which is to be removed",
                now_s=observed.now_s,
            )
            if may_apply(spec, proposed, serving, rules, now_s=observed.now_s).allowed:
                return proposed
    return spec


def _set_cordon(spec: PDAssignmentSpec, name: str, reason: str | None) -> PDAssignmentSpec:
    """`spec` with the instance cordoned for `reason`, or its cordon removed; unchanged if it already is."""
    before = spec.roles[name]
    if before.cordoned is (reason is not None):
        return spec
    cordon = (reason is not None, Actor.OPERATOR if reason else None, reason or "")
    update = dict(zip(("cordoned", "cordoned_by", "cordon_reason"), cordon, strict=True))
    return spec.model_copy(update={"roles": {**spec.roles, name: before.model_copy(update=update)}})
