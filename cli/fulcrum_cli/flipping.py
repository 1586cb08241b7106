"""A person's flip: one conditional write of the PDAssignment, judged before it is written.

`fulcrum flip`, the live view's key and a forced series of flips all take this way, which is the
autoscaler's, too.
"""

import time

from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import AssignmentRules, may_apply, rules_of, with_flip
from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.merge import merge_diff
from fulcrum_core.ports import Store
from fulcrum_core.values import Actor, Phase, Role

TRIES = 10
"""Writes attempted while others write the same object."""


async def flip(
    store: Store,
    service: str,
    instance: str,
    to: Role,
    *,
    namespace: str,
    reason: str,
    pin_s: float | None = None,
) -> PDAssignment:
    """The assignment after the flip; its generation is what a router acknowledges.

    Raises:
        InvalidInput: if the service has no such instance, or the flip may not be made.
        Conflict: if others were quicker `TRIES` times in a row.
    """
    rules, ready = await _rules(store, service, namespace)
    for _ in range(TRIES):
        current = await store.get(PDAssignment, service, namespace=namespace)
        if instance not in current.spec.roles:
            known = ", ".join(sorted(current.spec.roles)) or "none"
            raise InvalidInput("instance", instance, f"is not of service {service}; it has {known}")
        now_s = time.time()
        pinned_until_s = None if pin_s is None else now_s + pin_s
        proposed = with_flip(
            current.spec,
            instance,
            to,
            by=Actor.PERSON,
            reason=reason,
            now_s=now_s,
            pinned_until_s=pinned_until_s,
        )
        verdict = may_apply(current.spec, proposed, ready, rules, now_s=now_s)
        if not verdict.allowed:
            raise InvalidInput("instance", instance, f"may not flip to {to}: {verdict.reason}")
        try:
            return await store.patch(
                PDAssignment,
                service,
                {"spec": merge_diff(current.spec.dump(), proposed.dump())},
                namespace=namespace,
                resource_version=current.metadata.resource_version,
            )
        except Conflict:
            continue
    raise Conflict(f"others wrote the assignment of {service} first, {TRIES} times")


async def _rules(store: Store, service: str, namespace: str) -> tuple[AssignmentRules, frozenset[str]]:
    """What judges a flip, and the instances that serve."""
    wanted = await store.get(PDService, service, namespace=namespace)
    pools = await store.list(PDPool, namespace=namespace)
    listed = await store.list(PDInstance, namespace=namespace)
    instances = [instance for instance in listed.items if instance.spec.service == service]
    rules = rules_of(wanted.spec, pools.items, instances)
    return rules, frozenset(i.metadata.name for i in instances if i.status.phase is Phase.SERVING)
