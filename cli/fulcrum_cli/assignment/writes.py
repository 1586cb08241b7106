"""Writes a flip or a cordon of one instance: one conditional write of the PDAssignment, checked first.

Used by `fulcrum flip` and `drain`, and by the flips of `fulcrum play`. The checks are
`fulcrum_core.assignment`'s, and `polling` waits for the effect.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fulcrum_cluster.assignment_write import CheckedChange, update_assignment
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api.pdassignment import Floors, PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.assignment import build_flip, list_assigned, may_apply
from fulcrum_core.errors import InvalidInput
from fulcrum_core.ports import Store
from fulcrum_core.values import Actor, Role

WRITE_ATTEMPTS_MAX = 10
"""Attempts of one write while others change the same object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentWrite:
    """Result of a write: the assignment after it, and the instance's entry before it.

    `changed` is False if the entry already was as desired, so that nothing was written.
    """

    assignment: PDAssignment
    instance: str
    entry_before: RoleAssignment
    changed: bool

    @property
    def generation(self) -> int:
        """Generation of the assignment that a router acknowledges."""
        return self.assignment.metadata.generation

    @property
    def entry(self) -> RoleAssignment:
        """The instance's entry after the write."""
        return self.assignment.spec.roles[self.instance]


async def flip_instance(
    store: Store,
    service: str,
    instance: str,
    to: Role,
    *,
    namespace: str,
    reason: str,
    pin_s: float | None = None,
) -> AssignmentWrite:
    """Assign the role to the instance, pinned for `pin_s` seconds or not at all.

    An instance that already has the role is written only if its pin changes.

    Raises:
        InvalidInput: if the service has no such instance, or a rule forbids the flip.
        Conflict: if others changed the object before each of `WRITE_ATTEMPTS_MAX` writes.
    """

    def propose(current: PDAssignmentSpec, now_s: float) -> PDAssignmentSpec:
        entry = current.roles[instance]
        pinned = entry.pinned_until is not None and entry.pinned_until > now_s
        if entry.role is to and pin_s is None and not pinned:
            return current
        until_s = None if pin_s is None else now_s + pin_s
        return build_flip(
            current, instance, to, by=Actor.PERSON, reason=reason, now_s=now_s, pinned_until_s=until_s
        )

    return await _write_assignment(
        store, service, instance, propose, namespace=namespace, action=f"flip to {to}"
    )


async def set_cordon(
    store: Store, service: str, instance: str, *, namespace: str, reason: str, cordoned: bool
) -> AssignmentWrite:
    """Cordon the instance, so that it gets no new requests, or remove its cordon.

    Raises:
        InvalidInput: if the service has no such instance, or a floor or the operator forbids the change.
        Conflict: if others changed the object before each of `WRITE_ATTEMPTS_MAX` writes.
    """

    def propose(current: PDAssignmentSpec, _now_s: float) -> PDAssignmentSpec:
        entry = current.roles[instance]
        if entry.cordoned is cordoned:
            return current
        if entry.effective_cordoned_by is Actor.OPERATOR:
            rule = f"was cordoned by the operator to remove it: {entry.effective_cordon_reason}"
            raise InvalidInput("instance", instance, rule)
        by, why = (Actor.PERSON, reason) if cordoned else (None, "")
        update = {"cordoned": cordoned, "cordoned_by": by, "cordon_reason": why}
        roles = {**current.roles, instance: entry.model_copy(update=update)}
        return current.model_copy(update={"roles": roles})

    action = "be drained" if cordoned else "be uncordoned"
    return await _write_assignment(store, service, instance, propose, namespace=namespace, action=action)


async def _write_assignment(
    store: Store,
    service: str,
    instance: str,
    change: Callable[[PDAssignmentSpec, float], PDAssignmentSpec],
    *,
    namespace: str,
    action: str,
) -> AssignmentWrite:
    clock = SystemClock()

    async def propose(current: PDAssignment) -> PDAssignmentSpec | None:
        if instance not in current.spec.roles:
            known = ", ".join(sorted(current.spec.roles)) or "none"
            raise InvalidInput(
                "instance", instance, f"is not an instance of service {service}; it has {known}"
            )
        proposed = change(current.spec, clock.now_s())
        return None if proposed is current.spec else proposed

    update = await update_assignment(
        store, service, propose, namespace=namespace, clock=clock, attempts_max=WRITE_ATTEMPTS_MAX
    )
    entry_before = update.before.spec.roles[instance]
    if update.refusal and update.checked:
        advice = _suggest_alternative(update.checked, entry_before.role)
        raise InvalidInput("instance", instance, f"may not {action}: {update.refusal}{advice}")
    return AssignmentWrite(
        assignment=update.after, instance=instance, entry_before=entry_before, changed=update.changed
    )


def _suggest_alternative(checked: CheckedChange, role: Role) -> str:
    """Return advice if only the floors forbid the change; otherwise an empty string."""
    no_floors = Floors(prefill=0, decode=0)
    without_floors = checked.proposed.model_copy(update={"floors": no_floors})
    rules = replace(checked.rules, floors=no_floors)
    verdict = may_apply(checked.current, without_floors, checked.serving, rules, now_s=checked.now_s)
    if not verdict.allowed:
        return ""
    floor = max(checked.rules.floors.for_role(role.other), checked.current.floors.for_role(role.other))
    if len(list_assigned(checked.current.roles, checked.serving, role.other)) > floor:
        return f"; flip another instance to {role} first"
    return "; no instance is left to flip: raise spec.instances, or the instances of a pool"
