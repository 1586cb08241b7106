"""A person's word about one instance: one conditional write of the PDAssignment, judged before it is written.

`fulcrum flip` and `drain`, the live view's key and a forced series of flips all take this way, which is the
autoscaler's, too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fulcrum_core.api.pdassignment import Floors, PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import (
    AssignmentRules,
    apply_flip,
    build_assignment_rules,
    list_serving,
    may_apply,
)
from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.ports import Store
from fulcrum_core.values import Actor, Phase, Role

WRITE_ATTEMPTS_MAX = 10
"""Writes attempted while others write the same object."""

ProposeChange = Callable[[PDAssignmentSpec, float], PDAssignmentSpec]
"""From what stands and the time to what shall stand; the very same object if nothing is to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentWrite:
    """A word that was written, or that needed no writing. `entry_before` is the instance's entry as it
    was."""

    assignment: PDAssignment
    instance: str
    entry_before: RoleAssignment
    changed: bool

    @property
    def generation(self) -> int:
        """What a router acknowledges."""
        return self.assignment.metadata.generation

    @property
    def entry(self) -> RoleAssignment:
        """The instance's entry as it stands."""
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
    """The instance given the role. One that has it already is written only if its pin is to change.

    Raises:
        InvalidInput: if the service has no such instance, or the flip may not be made.
        Conflict: if others were quicker `WRITE_ATTEMPTS_MAX` times in a row.
    """

    def propose(current: PDAssignmentSpec, now_s: float) -> PDAssignmentSpec:
        entry = current.roles[instance]
        pinned = entry.pinned_until is not None and entry.pinned_until > now_s
        if entry.role is to and pin_s is None and not pinned:
            return current
        until_s = None if pin_s is None else now_s + pin_s
        return apply_flip(
            current, instance, to, by=Actor.PERSON, reason=reason, now_s=now_s, pinned_until_s=until_s
        )

    return await _write_assignment(
        store, service, instance, propose, namespace=namespace, action=f"flip to {to}"
    )


async def set_cordon(
    store: Store, service: str, instance: str, *, namespace: str, reason: str, cordoned: bool
) -> AssignmentWrite:
    """The instance gets no new work any more, or gets it again.

    Raises:
        InvalidInput: if the service has no such instance, or the floors or the operator stand against it.
        Conflict: if others were quicker `WRITE_ATTEMPTS_MAX` times in a row.
    """

    def propose(current: PDAssignmentSpec, _now_s: float) -> PDAssignmentSpec:
        entry = current.roles[instance]
        if entry.cordoned is cordoned:
            return current
        if entry.effective_cordoned_by is Actor.OPERATOR:
            rule = f"was cordoned by the operator, who wants it gone: {entry.effective_cordon_reason}"
            raise InvalidInput("instance", instance, rule)
        by, why = (Actor.PERSON, reason) if cordoned else (None, "")
        update = {"cordoned": cordoned, "cordoned_by": by, "cordon_reason": why}
        roles = {**current.roles, instance: entry.model_copy(update=update)}
        return current.model_copy(update={"roles": roles})

    action = "be drained" if cordoned else "be taken back"
    return await _write_assignment(store, service, instance, propose, namespace=namespace, action=action)


async def _write_assignment(
    store: Store, service: str, instance: str, propose: ProposeChange, *, namespace: str, action: str
) -> AssignmentWrite:
    for _ in range(WRITE_ATTEMPTS_MAX):
        # Instances are read last: whatever leaves after that is cordoned first, and the write then fails.
        current = await store.get(PDAssignment, service, namespace=namespace)
        rules, ready = await _read_rules(store, service, namespace)
        before = current.spec.roles.get(instance)
        if before is None:
            known = ", ".join(sorted(current.spec.roles)) or "none"
            raise InvalidInput("instance", instance, f"is not of service {service}; it has {known}")
        now_s = time.time()
        proposed = propose(current.spec, now_s)
        if proposed is current.spec:
            return AssignmentWrite(assignment=current, instance=instance, entry_before=before, changed=False)
        verdict = may_apply(current.spec, proposed, ready, rules, now_s=now_s)
        if not verdict.allowed:
            advice = _suggest_alternative(current.spec, proposed, before.role, ready, rules, now_s=now_s)
            raise InvalidInput("instance", instance, f"may not {action}: {verdict.reason}{advice}")
        try:
            changed = await store.patch(
                PDAssignment,
                service,
                {"spec": create_merge_patch(current.spec.dump(), proposed.dump())},
                namespace=namespace,
                resource_version=current.metadata.resource_version,
            )
        except Conflict:
            continue
        return AssignmentWrite(assignment=changed, instance=instance, entry_before=before, changed=True)
    raise Conflict(f"others wrote the assignment of {service} first, {WRITE_ATTEMPTS_MAX} times")


def _suggest_alternative(
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    role: Role,
    ready: frozenset[str],
    rules: AssignmentRules,
    *,
    now_s: float,
) -> str:
    """What to do where nothing but the floors keeps an instance of the role where it is; else nothing."""
    no_floors = Floors(prefill=0, decode=0)
    without_floors = proposed.model_copy(update={"floors": no_floors})
    if not may_apply(current, without_floors, ready, replace(rules, floors=no_floors), now_s=now_s).allowed:
        return ""
    floor = max(rules.floors.for_role(role.other), current.floors.for_role(role.other))
    if len(list_serving(current.roles, ready, role.other)) > floor:
        return f"; flip another one to {role} first"
    return "; there is none to spare: it takes more instances (spec.instances, or those of a pool)"


async def _read_rules(store: Store, service: str, namespace: str) -> tuple[AssignmentRules, frozenset[str]]:
    """What judges a word, and the instances that serve."""
    pdservice = await store.get(PDService, service, namespace=namespace)
    pools = await store.list(PDPool, namespace=namespace)
    listed = await store.list(PDInstance, namespace=namespace)
    instances = [instance for instance in listed.items if instance.spec.service == service]
    rules = build_assignment_rules(pdservice.spec, pools.items, instances)
    return rules, frozenset(i.metadata.name for i in instances if i.status.phase is Phase.SERVING)
