"""May this wish be applied? The one judge of every voluntary change of a PDAssignment.

Writers ask it before they write and readers ask it on receipt, since a person may have patched the
object by hand. It is pure and does not depend on who asks: the cooldown counts between the times
written in the objects, so a late reader comes to the writer's verdict.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fulcrum_core.api.meta import format_duration
from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool, fixed_role
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.decisions import Verdict
from fulcrum_core.values import Actor, Role

CLOCK_SKEW_S = 5.0
"""How far ahead of the reader's clock a wish may be dated."""


@dataclass(frozen=True, slots=True)
class AssignmentRules:
    """What a service's spec says about its assignment."""

    prefill_to_decode_cooldown_s: float
    fixed_roles: Mapping[str, Role] = field(default_factory=dict)
    """Instances of pools that never flip."""
    floors: Floors = field(default_factory=lambda: Floors(prefill=0, decode=0))
    """The service's own floors: an assignment that was patched by hand may raise them, not lower them."""


def rules_of(
    spec: PDServiceSpec, pools: Iterable[PDPool], instances: Iterable[PDInstance]
) -> AssignmentRules:
    """What judges the assignment of a service with these pools and instances."""
    by_pool = {pool.metadata.name: fixed_role(pool.spec.role) for pool in pools}
    fixed = {instance.metadata.name: by_pool.get(instance.spec.pool) for instance in instances}
    return AssignmentRules(
        prefill_to_decode_cooldown_s=spec.autoscaling.flip.prefill_to_decode_cooldown,
        fixed_roles={name: role for name, role in fixed.items() if role is not None},
        floors=spec.roles.floors(),
    )


def may_apply(
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    ready: Collection[str],
    rules: AssignmentRules,
    *,
    now_s: float,
) -> Verdict:
    """Whether `proposed` may follow `current`, given the instances that are ready to serve.

    No voluntary change takes a role below its floor of serving instances. Where a crash has done so
    already, a change that does not make it worse is allowed; but neither may a flip or cordon of crashed
    instances leave fewer than the floor to come back to. New instances may always be added.
    """
    for name, after in sorted(proposed.roles.items()):
        before = current.roles.get(name)
        refusal = _refuse_entry(name, before, after, current, rules, now_s=now_s)
        refusal = refusal or _refuse_unrecorded(name, before, after, proposed)
        if refusal:
            return Verdict(False, refusal)
    if _lost_time(current, proposed):
        return Verdict(False, "lastPrefillToDecode may not be cleared or set back")
    for role in (Role.PREFILL, Role.DECODE):
        floor = max(rules.floors.of(role), proposed.floors.of(role))
        refusal = _refuse_floor(role, floor, current, proposed, ready)
        refusal = refusal or _refuse_last_assigned(role, floor, current, proposed)
        if refusal:
            return Verdict(False, refusal)
    return Verdict(True, "within floors, cooldown and pins")


def serving(roles: Mapping[str, RoleAssignment], ready: Collection[str], role: Role) -> tuple[str, ...]:
    """Names of the ready, not cordoned instances assigned to `role`, sorted."""
    chosen = (n for n, entry in roles.items() if n in ready and entry.role is role and not entry.cordoned)
    return tuple(sorted(chosen))


def effective_roles(roles: Mapping[str, RoleAssignment], ready: Iterable[str]) -> dict[str, Role]:
    """The role each ready instance plays: the one assigned, or Both where it is the only one."""
    names = sorted(name for name in ready if name in roles)
    if len(names) == 1:
        return {names[0]: Role.BOTH}
    return {name: Role(roles[name].role) for name in names}


def with_flip(
    current: PDAssignmentSpec,
    instance: str,
    to: Role,
    *,
    by: Actor,
    reason: str,
    now_s: float,
    pinned_until_s: float | None = None,
) -> PDAssignmentSpec:
    """`current` with one instance given a role. A pin of somebody else's past word is dropped with it.

    Only a real change from Prefill to Decode starts the cooldown, and a writer whose clock is behind never
    sets it back.

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
    before: RoleAssignment | None,
    after: RoleAssignment,
    current: PDAssignmentSpec,
    rules: AssignmentRules,
    *,
    now_s: float,
) -> str | None:
    fixed = rules.fixed_roles.get(name)
    if fixed is not None and after.role is not fixed:
        return f"instance {name!r} belongs to a pool that only serves {fixed}"
    if before is None or before.role is after.role:
        return None
    if after.since > now_s + CLOCK_SKEW_S:
        return f"the flip of instance {name!r} is dated {after.since - now_s:.0f} s ahead"
    if after.by is Actor.PERSON:
        return None  # a person's word beats pins, refusals and the cooldown; never the floors
    if before.pinned_until is not None and before.pinned_until > after.since:
        left = format_duration(round(before.pinned_until - after.since, 1))
        return f"instance {name!r} is pinned to {before.role} for {left} more"
    if before.refused and before.refused.role is after.role and before.refused.until > after.since:
        return f"the flip of instance {name!r} to {after.role} was refused: {before.refused.reason}"
    return _refuse_cooldown(name, after, current, rules)


def _refuse_cooldown(
    name: str, after: RoleAssignment, current: PDAssignmentSpec, rules: AssignmentRules
) -> str | None:
    last = current.last_prefill_to_decode
    if after.by is not Actor.AUTOSCALER or after.role is not Role.DECODE or last is None:
        return None
    waited = after.since - last
    if waited >= rules.prefill_to_decode_cooldown_s:
        return None
    return (
        f"instance {name!r} may not flip to Decode {waited:.1f} s after the last such flip; "
        f"the cooldown is {format_duration(rules.prefill_to_decode_cooldown_s)}"
    )


def _refuse_unrecorded(
    name: str, before: RoleAssignment | None, after: RoleAssignment, proposed: PDAssignmentSpec
) -> str | None:
    """The autoscaler's flip to Decode must start the cooldown in the same write; the next waits for it."""
    if before is None or before.role is after.role or after.role is not Role.DECODE:
        return None
    if after.by is not Actor.AUTOSCALER:
        return None
    last = proposed.last_prefill_to_decode
    if last is not None and last >= after.since:
        return None
    return f"the flip of instance {name!r} to Decode is not recorded in lastPrefillToDecode"


def _lost_time(current: PDAssignmentSpec, proposed: PDAssignmentSpec) -> bool:
    before, after = current.last_prefill_to_decode, proposed.last_prefill_to_decode
    return before is not None and (after is None or after < before)


def _refuse_floor(
    role: Role, floor: int, current: PDAssignmentSpec, proposed: PDAssignmentSpec, ready: Collection[str]
) -> str | None:
    before = serving(current.roles, ready, role)
    after = serving(proposed.roles, ready, role)
    if len(after) >= floor or len(after) >= len(before):
        return None
    lost = ", ".join(sorted(set(before) - set(after)))
    return f"{len(after)} instances would serve {role}, the floor is {floor}; leaving: {lost}"


def _refuse_last_assigned(
    role: Role, floor: int, current: PDAssignmentSpec, proposed: PDAssignmentSpec
) -> str | None:
    """Of the instances that stay, serving or not, the floor must stay assigned to the role.

    Instances that leave the map do not count: dropping one that is gone for good must always be possible.
    """
    staying = [name for name in current.roles if name in proposed.roles]
    before = serving(current.roles, staying, role)
    after = serving(proposed.roles, proposed.roles, role)
    if len(after) >= floor or len(after) >= len(before):
        return None
    lost = ", ".join(sorted(set(before) - set(after)))
    return f"{len(after)} instances would be assigned to {role}, the floor is {floor}; leaving: {lost}"
