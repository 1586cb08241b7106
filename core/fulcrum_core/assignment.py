"""Checks every voluntary change of a PDAssignment (`may_apply`), and builds flips (`build_flip`).

Writers check before they write. Routers check what they receive, because a person may have patched the
object. Both use the times in the object and not their clocks, so that they agree when they observe the same
serving instances. The reader's clock is used in two places: to refuse a date in the future, and to find out
whether a pin may be removed.

Nothing is written here: see `fulcrum_cluster.assignment_write`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fulcrum_core.api.meta import format_duration
from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool, fixed_role
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.formatting import format_count
from fulcrum_core.kv_compatibility import assign_compatibility_groups
from fulcrum_core.values import Actor, FlipStrategy, Role
from fulcrum_core.verdict import Verdict

CLOCK_SKEW_S = 5.0
"""Longest time that a change may be dated ahead of the reader's clock."""


@dataclass(frozen=True, slots=True)
class AssignmentRules:
    """Rules for a service's assignment, from the specs of service and pools and the engines' status."""

    prefill_to_decode_cooldown_s: float
    fixed_roles: Mapping[str, Role] = field(default_factory=dict)
    """Role of each instance whose pool has one role only; these instances never flip.

    An instance with `role_fixed_at_start` may flip: its engine restarts for it (`restarted_by_flip`).
    """
    floors: Floors = field(default_factory=lambda: Floors(prefill=0, decode=0))
    """The service's own floors: an assignment that was patched by hand cannot lower them."""
    compatibility_groups: Mapping[str, int] = field(default_factory=dict)
    """Compatibility group of each instance: instances of one group can exchange KV. Default: group 0."""
    restarted_by_flip: frozenset[str] = frozenset()
    """Instances whose engine restarts for a flip, during which they serve neither role."""


def build_assignment_rules(
    spec: PDServiceSpec, pools: Iterable[PDPool], instances: Iterable[PDInstance]
) -> AssignmentRules:
    """Collect the rules for the assignment of a service with these pools and instances."""
    pools = tuple(pools)
    by_pool = {pool.metadata.name: fixed_role(pool.spec.role) for pool in pools}
    instances = tuple(instances)
    fixed = {instance.metadata.name: by_pool.get(instance.spec.pool) for instance in instances}
    return AssignmentRules(
        prefill_to_decode_cooldown_s=spec.autoscaling.flip.prefill_to_decode_cooldown,
        fixed_roles={name: role for name, role in fixed.items() if role is not None},
        floors=_floors_of(spec, pools),
        compatibility_groups=group_by_compatibility(instances),
        restarted_by_flip=find_restarted_by_flip(instances),
    )


def _floors_of(spec: PDServiceSpec, pools: Iterable[PDPool]) -> Floors:
    """The floors of a service whose pools desire these replicas.

    A single instance plays Both, and so serves each role once. Only its Decode is kept then, since every
    engine that decodes can also compute prompts. Higher floors are never lowered.
    """
    floors = spec.roles.to_floors()
    desired = sum(pool.spec.instances.clamp(pool.spec.replicas) for pool in pools)
    served_by_one = floors.prefill <= 1 and floors.decode <= 1
    return Floors(prefill=0, decode=1) if desired == 1 and served_by_one else floors


def group_by_compatibility(instances: Iterable[PDInstance]) -> dict[str, int]:
    """The compatibility group of each instance, from the observed identities of the engines."""
    identities = {i.metadata.name: i.status.identity for i in instances}
    return assign_compatibility_groups(
        {name: known.to_identity() if known else None for name, known in identities.items()}
    )


def find_restarted_by_flip(instances: Iterable[PDInstance]) -> frozenset[str]:
    """Names of the instances whose engine takes its role only at start, so that a flip restarts it."""
    return frozenset(
        i.metadata.name
        for i in instances
        if i.spec.role or i.spec.role_fixed_at_start or i.status.flip_strategy is FlipStrategy.RESTART
    )


def awaits_restart(instance: PDInstance, entry: RoleAssignment) -> bool:
    """Whether the engine still runs in the old role of a flip and must restart to take the new one."""
    started = instance.spec.role or instance.status.role
    return (
        bool(find_restarted_by_flip([instance]))
        and started in (Role.PREFILL, Role.DECODE)
        and started is not entry.role
    )


def may_apply(
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    serving: Collection[str],
    rules: AssignmentRules,
    *,
    now_s: float,
) -> Verdict:
    """Whether `proposed` may follow `current`, given the names of the serving instances.

    The caller decides which instances count as serving: writers by the phase, the operator also by the state
    of the engines, a router also by their endpoints and pods.

    No voluntary change takes a role below its floor of serving instances. If a crash has done so already,
    changes that do not make it worse are allowed, but enough instances must stay assigned to the role to
    reach the floor when crashed instances recover. New instances may always be added.
    """
    for name in sorted(proposed.roles):
        reason = _refuse_entry(name, current, proposed, rules, now_s=now_s)
        if reason:
            return Verdict(False, reason)
    reason = _refuse_times(current, proposed, now_s=now_s)
    if reason:
        return Verdict(False, reason)
    for role in (Role.PREFILL, Role.DECODE):
        floor = max(rules.floors.for_role(role), proposed.floors.for_role(role))
        reason = _refuse_floor(role, floor, current, proposed, serving, rules)
        reason = reason or _refuse_last_assigned(role, floor, current, proposed)
        reason = reason or _refuse_group_without_role(role, current, proposed, serving, rules)
        if reason:
            return Verdict(False, reason)
    return Verdict(True, "within floors, cooldown and pins")


def list_serving_instances(instances: Iterable[PDInstance]) -> frozenset[str]:
    """Names of the serving instances (`PDInstance.is_serving`)."""
    return frozenset(instance.metadata.name for instance in instances if instance.is_serving)


def list_assigned(roles: Mapping[str, RoleAssignment], among: Collection[str], role: Role) -> tuple[str, ...]:
    """Names of those instances of `among` that are assigned to `role` and not cordoned, sorted."""
    chosen = (n for n, entry in roles.items() if n in among and entry.role is role and not entry.cordoned)
    return tuple(sorted(chosen))


def resolve_effective_roles(
    roles: Mapping[str, RoleAssignment],
    serving: Iterable[str],
    groups: Mapping[str, int] | None = None,
    *,
    restarted_by_flip: Collection[str] = (),
) -> dict[str, Role]:
    """The effective role of each serving instance: as assigned, or Both if no other can take the other role.

    Both is for the only instance that is not cordoned (or the only instance) and, while several compatibility
    groups serve, for every instance of a group in which all have the same role, because no KV is transferred
    between groups. Of `restarted_by_flip` only decode instances can play Both: a decode engine can compute a
    prompt itself, while an engine that was started for prefill refuses to decode.
    """
    names = sorted(name for name in serving if name in roles)
    available = [name for name in names if not roles[name].cordoned] or names
    effective = {name: Role(roles[name].role) for name in names}
    can_play_both = {
        name for name in names if name not in restarted_by_flip or effective[name] is Role.DECODE
    }
    group = dict.fromkeys(names, 0) | {name: groups[name] for name in names if groups and name in groups}
    if len(available) == 1:
        return effective | dict.fromkeys(can_play_both.intersection(available), Role.BOTH)
    if len({group[name] for name in available}) > 1:
        for number in {group[name] for name in available}:
            members = [name for name in available if group[name] == number]
            if len({roles[name].role for name in members}) == 1:
                effective |= dict.fromkeys(can_play_both.intersection(members), Role.BOTH)
    return effective


def build_flip(
    current: PDAssignmentSpec,
    instance: str,
    to: Role,
    *,
    by: Actor,
    reason: str,
    now_s: float,
    pinned_until_s: float | None = None,
) -> PDAssignmentSpec:
    """Return `current` with one instance assigned to a role. Its earlier pin and refusal are removed.

    Only a change from Prefill to Decode starts the cooldown. A writer whose clock is behind does not move
    the cooldown's start back.

    Raises:
        KeyError: if the instance has no entry.
    """
    before = current.roles[instance]
    entry = before.model_copy(
        update={
            "role": to,
            "since": now_s,
            "by": by,
            "reason": reason,
            "pinned_until": pinned_until_s,
            "refused": None,
        }
    )
    if before.cordoned:  # the cordon keeps its owner, although the flip changes `by`
        entry = entry.model_copy(update={"cordoned_by": before.effective_cordoned_by})
    changes = before.role is not to
    last = current.last_prefill_to_decode
    if changes and to is Role.DECODE:
        last = now_s if last is None else max(last, now_s)
    return current.model_copy(
        update={
            "roles": {**current.roles, instance: entry},
            "flips": current.flips + changes,
            "last_prefill_to_decode": last,
        }
    )


def _refuse_entry(
    name: str,
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    rules: AssignmentRules,
    *,
    now_s: float,
) -> str | None:
    before, after = current.roles.get(name), proposed.roles[name]
    fixed = rules.fixed_roles.get(name)
    if fixed is not None and after.role is not fixed:
        return f"instance {name!r} belongs to a pool that only serves {fixed}"
    if before is None or _is_rollback(before, after):
        return None
    if before.role is after.role:
        return _refuse_unpinning(name, before, after, now_s=now_s)
    if after.since > now_s + CLOCK_SKEW_S:
        return f"the flip of instance {name!r} is dated {after.since - now_s:.0f} s ahead"
    if before.effective_cordoned_by is Actor.OPERATOR and after.cordoned:
        return f"instance {name!r} is about to stop: {before.effective_cordon_reason}"
    if after.by is Actor.PERSON:
        return None  # a person overrides pins, refusals and the cooldown, but not the floors
    if before.pinned_until is not None and before.pinned_until > after.since:
        return _pinned_message(name, before.role, before.pinned_until - after.since)
    if before.refused and before.refused.role is after.role and before.refused.until > after.since:
        return f"the flip of instance {name!r} to {after.role} was refused: {before.refused.reason}"
    return _refuse_cooldown(name, current, proposed, rules)


def _is_rollback(before: RoleAssignment, after: RoleAssignment) -> bool:
    """Whether the entry goes back to its old role, with the current one marked as refused.

    The operator writes such an entry. A router may already have applied the refused flip, and must follow the
    rollback whatever the cooldown and pins. The author is not checked: `by` is the actor of the restored
    entry, and any writer may name any actor there. Somebody else's rollback can do no more than a write by a
    person that flips the instance and removes its cordon: fixed roles and floors are checked for both.
    """
    return after.refused is not None and after.refused.role is before.role and before.role is not after.role


def _refuse_unpinning(
    name: str, before: RoleAssignment, after: RoleAssignment, *, now_s: float
) -> str | None:
    """Why this writer may not shorten the instance's pin; None if it is a person or does not shorten it."""
    until_s = before.pinned_until
    if after.by is Actor.PERSON or until_s is None or until_s <= now_s:
        return None
    if after.pinned_until is not None and after.pinned_until >= until_s:
        return None
    return _pinned_message(name, before.role, until_s - now_s)


def _pinned_message(name: str, role: Role, left_s: float) -> str:
    return f"instance {name!r} is pinned to {role} for {format_duration(round(left_s, 1))} more"


def _refuse_cooldown(
    name: str, current: PDAssignmentSpec, proposed: PDAssignmentSpec, rules: AssignmentRules
) -> str | None:
    """The autoscaler's flip to Decode must wait for the cooldown, and restart it in the same write."""
    after, last = proposed.roles[name], current.last_prefill_to_decode
    if after.by is not Actor.AUTOSCALER or after.role is not Role.DECODE:
        return None
    if last is not None and after.since - last < rules.prefill_to_decode_cooldown_s:
        return (
            f"instance {name!r} may not flip to Decode {after.since - last:.1f} s after the last such flip; "
            f"the cooldown is {format_duration(rules.prefill_to_decode_cooldown_s)}"
        )
    recorded = proposed.last_prefill_to_decode
    if recorded is None or recorded < after.since:
        return f"the flip of instance {name!r} to Decode is not recorded in lastPrefillToDecode"
    return None


def _refuse_times(current: PDAssignmentSpec, proposed: PDAssignmentSpec, *, now_s: float) -> str | None:
    """The cooldown's start may only move forward, and not beyond the reader's clock."""
    before, after = current.last_prefill_to_decode, proposed.last_prefill_to_decode
    if before == after:
        return None
    if before is not None and (after is None or after < before):
        return "lastPrefillToDecode may not be cleared or set back"
    if after is not None and after > now_s + CLOCK_SKEW_S:
        return f"lastPrefillToDecode is dated {after - now_s:.0f} s ahead"
    return None


def _refuse_floor(
    role: Role,
    floor: int,
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    serving: Collection[str],
    rules: AssignmentRules,
) -> str | None:
    restarting = {name for name in rules.restarted_by_flip if _is_flipped(name, current, proposed)}
    before = list_assigned(current.roles, serving, role)
    after = list_assigned(proposed.roles, frozenset(serving) - restarting, role)
    if len(after) >= floor or len(after) >= len(before):
        return None
    lost = ", ".join(sorted(set(before) - set(after)))
    left = format_count(len(after), "instance")
    return f"{left} would serve {role}, the floor is {floor}; leaving: {lost}"


def _is_flipped(name: str, current: PDAssignmentSpec, proposed: PDAssignmentSpec) -> bool:
    before, after = current.roles.get(name), proposed.roles.get(name)
    return before is not None and after is not None and before.role is not after.role


def _refuse_group_without_role(
    role: Role,
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    serving: Collection[str],
    rules: AssignmentRules,
) -> str | None:
    """While several compatibility groups serve, no flip takes a role's last instance from one of them."""
    if len({rules.compatibility_groups.get(name, 0) for name in serving}) < 2:
        return None
    stays = {name for name in list_assigned(proposed.roles, serving, role.other) if name in current.roles}
    for name in sorted(stays & set(list_assigned(current.roles, serving, role))):
        group = rules.compatibility_groups.get(name, 0)
        members = [
            member
            for member in serving
            if rules.compatibility_groups.get(member, 0) == group and member != name
        ]
        had = list_assigned(current.roles, members, role.other)
        if had and not list_assigned(proposed.roles, members, role):
            return f"instance {name!r} is the last to serve {role} among those that can exchange KV with it"
    return None


def _refuse_last_assigned(
    role: Role, floor: int, current: PDAssignmentSpec, proposed: PDAssignmentSpec
) -> str | None:
    """Of the remaining instances, serving or not, at least the floor must stay assigned to the role.

    Instances that are removed from the assignment do not count: removing a lost instance is always allowed.
    """
    kept = [name for name in current.roles if name in proposed.roles]
    before = list_assigned(current.roles, kept, role)
    after = list_assigned(proposed.roles, proposed.roles, role)
    if len(after) >= floor or len(after) >= len(before):
        return None
    lost = ", ".join(sorted(set(before) - set(after)))
    left = format_count(len(after), "instance")
    return f"{left} would be assigned to {role}, the floor is {floor}; leaving: {lost}"
