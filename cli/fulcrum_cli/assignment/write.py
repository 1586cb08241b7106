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
from fulcrum_core.assignment import AssignmentRules, may_apply, rules_of, serving, with_flip
from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.merge import merge_diff
from fulcrum_core.ports import Store
from fulcrum_core.values import Actor, Phase, Role

TRIES = 10
"""Writes attempted while others write the same object."""

Propose = Callable[[PDAssignmentSpec, float], PDAssignmentSpec]
"""From what stands and the time to what shall stand; the very same object if nothing is to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A word that was written, or that needed no writing. `before` is the instance's entry as it was."""

    assignment: PDAssignment
    instance: str
    before: RoleAssignment
    changed: bool

    @property
    def generation(self) -> int:
        """What a router acknowledges."""
        return self.assignment.metadata.generation

    @property
    def entry(self) -> RoleAssignment:
        """The instance's entry as it stands."""
        return self.assignment.spec.roles[self.instance]


async def flip(
    store: Store,
    service: str,
    instance: str,
    to: Role,
    *,
    namespace: str,
    reason: str,
    pin_s: float | None = None,
) -> Written:
    """The instance given the role. One that has it already is written only if its pin is to change.

    Raises:
        InvalidInput: if the service has no such instance, or the flip may not be made.
        Conflict: if others were quicker `TRIES` times in a row.
    """

    def propose(current: PDAssignmentSpec, now_s: float) -> PDAssignmentSpec:
        entry = current.roles[instance]
        pinned = entry.pinned_until is not None and entry.pinned_until > now_s
        if entry.role is to and pin_s is None and not pinned:
            return current
        until_s = None if pin_s is None else now_s + pin_s
        return with_flip(
            current, instance, to, by=Actor.PERSON, reason=reason, now_s=now_s, pinned_until_s=until_s
        )

    return await _write(store, service, instance, propose, namespace=namespace, what=f"flip to {to}")


async def cordon(
    store: Store, service: str, instance: str, *, namespace: str, reason: str, cordoned: bool
) -> Written:
    """The instance gets no new work any more, or gets it again.

    Raises:
        InvalidInput: if the service has no such instance, or the floors or the operator stand against it.
        Conflict: if others were quicker `TRIES` times in a row.
    """

    def propose(current: PDAssignmentSpec, _now_s: float) -> PDAssignmentSpec:
        entry = current.roles[instance]
        if entry.cordoned is cordoned:
            return current
        if entry.cordoner is Actor.OPERATOR:
            rule = f"was cordoned by the operator, who wants it gone: {entry.why_cordoned}"
            raise InvalidInput("instance", instance, rule)
        word = (Actor.PERSON, reason) if cordoned else (None, "")
        update = {"cordoned": cordoned, "cordoned_by": word[0], "cordon_reason": word[1]}
        roles = {**current.roles, instance: entry.model_copy(update=update)}
        return current.model_copy(update={"roles": roles})

    what = "be drained" if cordoned else "be taken back"
    return await _write(store, service, instance, propose, namespace=namespace, what=what)


async def _write(
    store: Store, service: str, instance: str, propose: Propose, *, namespace: str, what: str
) -> Written:
    for _ in range(TRIES):
        # Instances are read last: whatever leaves after that is cordoned first, and the write then fails.
        current = await store.get(PDAssignment, service, namespace=namespace)
        rules, ready = await _rules(store, service, namespace)
        before = current.spec.roles.get(instance)
        if before is None:
            known = ", ".join(sorted(current.spec.roles)) or "none"
            raise InvalidInput("instance", instance, f"is not of service {service}; it has {known}")
        now_s = time.time()
        proposed = propose(current.spec, now_s)
        if proposed is current.spec:
            return Written(assignment=current, instance=instance, before=before, changed=False)
        verdict = may_apply(current.spec, proposed, ready, rules, now_s=now_s)
        if not verdict.allowed:
            advice = _way_out(current.spec, proposed, before.role, ready, rules, now_s=now_s)
            raise InvalidInput("instance", instance, f"may not {what}: {verdict.reason}{advice}")
        try:
            changed = await store.patch(
                PDAssignment,
                service,
                {"spec": merge_diff(current.spec.dump(), proposed.dump())},
                namespace=namespace,
                resource_version=current.metadata.resource_version,
            )
        except Conflict:
            continue
        return Written(assignment=changed, instance=instance, before=before, changed=True)
    raise Conflict(f"others wrote the assignment of {service} first, {TRIES} times")


def _way_out(
    current: PDAssignmentSpec,
    proposed: PDAssignmentSpec,
    role: Role,
    ready: frozenset[str],
    rules: AssignmentRules,
    *,
    now_s: float,
) -> str:
    """What to do where nothing but the floors keeps an instance of the role where it is; else nothing."""
    none = Floors(prefill=0, decode=0)
    free = proposed.model_copy(update={"floors": none})
    if not may_apply(current, free, ready, replace(rules, floors=none), now_s=now_s).allowed:
        return ""
    floor = max(rules.floors.of(role.other), current.floors.of(role.other))
    if len(serving(current.roles, ready, role.other)) > floor:
        return f"; flip another one to {role} first"
    return "; there is none to spare: it takes more instances (spec.instances, or those of a pool)"


async def _rules(store: Store, service: str, namespace: str) -> tuple[AssignmentRules, frozenset[str]]:
    """What judges a word, and the instances that serve."""
    wanted = await store.get(PDService, service, namespace=namespace)
    pools = await store.list(PDPool, namespace=namespace)
    listed = await store.list(PDInstance, namespace=namespace)
    instances = [instance for instance in listed.items if instance.spec.service == service]
    rules = rules_of(wanted.spec, pools.items, instances)
    return rules, frozenset(i.metadata.name for i in instances if i.status.phase is Phase.SERVING)
