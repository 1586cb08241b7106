"""The PDAssignment: who plays which role, kept in step with the instances that exist.

The operator makes the first split, gives new instances the role that is further below its share, takes
entries of gone instances out and cordons who shall leave. Wishes of others are judged here once more; one
that may not be applied is written back with `refused`, so that nobody retries it for ever.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fulcrum_core.api import Floors, PDAssignmentSpec, PDService, Refusal, RoleAssignment
from fulcrum_core.assignment import CLOCK_SKEW_S, AssignmentRules, apply_flip, list_serving, may_apply
from fulcrum_core.values import Actor, FlipStrategy, Role
from fulcrum_operator.plan.instance_state import current_role, flip_strategy, instance_order, ready_instances
from fulcrum_operator.plan.instances import Removal
from fulcrum_operator.plan.observed import Observed

REFUSED_FOR_S = 30.0
"""How long a refused wish is refused without a second look."""

Roles = dict[str, RoleAssignment]


@dataclass(frozen=True, slots=True)
class AssignableInstance:
    """An instance that shall have an entry, and the role it can never leave, if there is one."""

    name: str
    fixed_role: Role | None
    revision: str = ""
    """Instances of one revision can always exchange KV."""


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The assignment as it shall stand, who leaves by it, and which departures the floors hold up."""

    spec: PDAssignmentSpec
    leaving: frozenset[str]
    blocked_removals: Mapping[str, str]
    """By pool: why fewer go than shall."""


def plan_first_split(
    members: Collection[AssignableInstance], *, prefill_floor: int, decode_floor: int
) -> dict[str, Role]:
    """Half of the instances prefill, the first ones by number; fixed roles as they are, floors before halves.

    An odd one decodes: an instance that decodes can prefill for itself without a hand-off. With too few
    instances for both floors prefill's gives way.
    """
    roles = {member.name: member.fixed_role for member in members if member.fixed_role}
    flexible = sorted((member.name for member in members if not member.fixed_role), key=instance_order)
    fixed = Counter(roles.values())
    wanted = max(len(members) // 2, prefill_floor) - fixed[Role.PREFILL]
    spare = len(flexible) - max(0, decode_floor - fixed[Role.DECODE])
    prefill = max(0, min(wanted, spare))
    split = {name: Role.PREFILL if index < prefill else Role.DECODE for index, name in enumerate(flexible)}
    return {**roles, **split}


def choose_role_for_new_instance(roles: Iterable[Role], *, prefill_floor: int, decode_floor: int) -> Role:
    """The role of one more instance: the one below its floor, else the one that fewer have; on a tie Decode.

    Its share is half: a ratio that somebody chose would drift if it were carried on instance by instance,
    and a flip to Prefill costs nothing.
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
    """The assignment as it shall stand: the wish as far as `rules` allow, in step with `members`.

    Instances on their way out keep their entries until they are gone: a reader that still sees them serve
    would refuse to drop them.
    """
    existing_names = frozenset(instance.metadata.name for instance in observed.instances)
    spec = _match_instances(
        _accept_or_refuse(observed, rules), observed.service, members, existing_names, now_s=observed.now_s
    )
    return _cordon_leaving(spec, removals, observed, members, rules)


def rebuild_accepted_assignment(observed: Observed) -> PDAssignmentSpec | None:
    """The last wish that was applied, read off the instances: what an operator knows after a restart.

    Under Relabel the wish itself is what is applied; an engine that must be started anew for a role plays
    the role in its status.
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
    """The wish, or the last good one with the refusal written into it."""
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
    """`last` again, each entry that was to change saying why it was not.

    What the wish says of instances that `last` does not know stays, and so does its start of the cooldown:
    a reader that took the wish for good, because it saw more instances ready, would refuse to set it back.
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
    """What of an entry is a wish; the rest says whose and why."""
    return entry.role, entry.cordoned, entry.pinned_until


def _cooldown_start(last_s: float | None, desired_s: float | None, *, now_s: float) -> float | None:
    """The later of both, unless it is one that nobody can have taken for good."""
    if desired_s is None or desired_s > now_s + CLOCK_SKEW_S:
        return last_s
    return desired_s if last_s is None else max(last_s, desired_s)


def _match_instances(
    spec: PDAssignmentSpec | None,
    service: PDService,
    members: tuple[AssignableInstance, ...],
    existing_names: Collection[str],
    *,
    now_s: float,
) -> PDAssignmentSpec:
    floors = service.spec.roles.to_floors()
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
    """The role of a new instance among those of its revision.

    While another revision is there, the first two of a new one can serve without it: they may not be able
    to exchange KV with it.
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
    """Cordon who shall leave, as far as the floors allow, and lift the operator's other cordons."""
    leaving: set[str] = set()
    blocked_removals: dict[str, str] = {}
    for removal in removals:
        left, refusal = removal.count, ""
        for name in removal.candidates:
            proposed = _set_cordon(spec, name, removal.reason)
            verdict = (
                may_apply(spec, proposed, ready_instances(observed), rules, now_s=observed.now_s)
                if left
                else None
            )
            if verdict and verdict.allowed:
                spec, left = proposed, left - 1
                leaving.add(name)
            elif verdict:
                refusal = verdict.reason
        if left and refusal and removal.may_flip_another:
            spec = _flip_to_make_room(spec, removal, leaving, observed, rules)
        elif left and refusal:
            blocked_removals[removal.pool] = refusal
    for name in sorted({member.name for member in members} - leaving):
        if spec.roles[name].effective_cordoned_by not in (None, Actor.PERSON):
            spec = _set_cordon(spec, name, None)
    return AssignmentPlan(spec, frozenset(leaving), blocked_removals)


def _flip_to_make_room(
    spec: PDAssignmentSpec,
    removal: Removal,
    leaving: Collection[str],
    observed: Observed,
    rules: AssignmentRules,
) -> PDAssignmentSpec:
    """One of those that stay given the role of one that cannot leave: it goes once the other has it."""
    unremovable = [
        name for name in removal.candidates if name not in leaving and name in ready_instances(observed)
    ]
    for name in unremovable[:1]:
        role = Role(spec.roles[name].role)
        others = list_serving(spec.roles, ready_instances(observed) - set(removal.candidates), role.other)
        for other in others:
            proposed = apply_flip(
                spec, other, role, by=Actor.OPERATOR, reason=f"{name} leaves", now_s=observed.now_s
            )
            if may_apply(spec, proposed, ready_instances(observed), rules, now_s=observed.now_s).allowed:
                return proposed
    return spec


def _set_cordon(spec: PDAssignmentSpec, name: str, reason: str | None) -> PDAssignmentSpec:
    """The instance cordoned by the operator, or its cordon lifted; a cordon that stands stays as it is."""
    before = spec.roles[name]
    if before.cordoned is (reason is not None):
        return spec
    cordon = (reason is not None, Actor.OPERATOR if reason else None, reason or "")
    update = dict(zip(("cordoned", "cordoned_by", "cordon_reason"), cordon, strict=True))
    return spec.model_copy(update={"roles": {**spec.roles, name: before.model_copy(update=update)}})
