"""The one assignment write: a conditional write of the PDAssignment, used by the autoscaler and the CLI.

A change is written only if `fulcrum_core.assignment.may_apply` allows it and no other writer wrote meanwhile.
The caller decides what to change, and what to do about a refusal.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import (
    AssignmentRules,
    build_assignment_rules,
    list_serving_instances,
    may_apply,
)
from fulcrum_core.errors import Conflict
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.ports import Clock, Store
from fulcrum_core.verdict import Verdict

ProposeChange = Callable[[PDAssignment], Awaitable[PDAssignmentSpec | None]]
"""Returns the desired spec for the current assignment; None if nothing is to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedChange:
    """A proposed change, and everything that it was checked against."""

    current: PDAssignmentSpec
    proposed: PDAssignmentSpec
    serving: frozenset[str]
    rules: AssignmentRules
    now_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentUpdate:
    """Result of `update_assignment`.

    Attributes:
        before: Assignment that the last proposal was made from.
        after: Assignment in the store now; the same as `before` if nothing was written.
        checked: The last proposal; None if nothing was proposed.
    """

    before: PDAssignment
    after: PDAssignment
    checked: CheckedChange | None

    @property
    def refusal(self) -> str | None:
        """Why the change was refused; None if it was written or if there was nothing to write."""
        refused = self.checked is not None and not self.checked.verdict.allowed
        return self.checked.verdict.reason if self.checked and refused else None

    @property
    def changed(self) -> bool:
        """Whether the change was written."""
        return self.after is not self.before


async def update_assignment(
    store: Store,
    name: str,
    propose: ProposeChange,
    *,
    namespace: str,
    clock: Clock,
    attempts_max: int,
    current: PDAssignment | None = None,
    configuration: tuple[PDService, Iterable[PDPool]] | None = None,
    on_conflict: Callable[[], None] = lambda: None,
) -> AssignmentUpdate:
    """Propose a change of the assignment, check it, write it; after a conflicting write, start again.

    Args:
        store: Store of all objects.
        name: Name of the service and its assignment.
        propose: Called with the current assignment at each attempt.
        namespace: Namespace of the service.
        clock: Time that the change is checked at.
        attempts_max: Writes attempted while others write the same object.
        current: Assignment for the first attempt; by default it is read from the store.
        configuration: The service and its pools; by default they are read from the store at each attempt.
        on_conflict: Called after each conflicting write.

    Raises:
        Conflict: if others wrote first at every attempt.
        StoreError: if the store fails.
    """
    for _ in range(attempts_max):
        current = current or await store.get(PDAssignment, name, namespace=namespace)
        proposed = await propose(current)
        if proposed is None:
            return AssignmentUpdate(before=current, after=current, checked=None)
        service, pools = configuration or await _read_configuration(store, name, namespace=namespace)
        checked = await _check_change(
            store, current, proposed, service=service, pools=pools, now_s=clock.now_s
        )
        if not checked.verdict.allowed:
            return AssignmentUpdate(before=current, after=current, checked=checked)
        try:
            written = await _write_change(store, current, proposed)
        except Conflict:
            on_conflict()
            current = None
            continue
        return AssignmentUpdate(before=current, after=written, checked=checked)
    raise Conflict(f"other writers changed the assignment of {name} first, {attempts_max} times")


async def _check_change(
    store: Store,
    current: PDAssignment,
    proposed: PDAssignmentSpec,
    *,
    service: PDService,
    pools: Iterable[PDPool],
    now_s: Callable[[], float],
) -> CheckedChange:
    # Instances are read after the assignment. The operator cordons an instance before it stops it, so if one
    # of the instances read here has begun to stop since, the assignment has changed too and the conditional
    # write fails. Cached instances would not do: an instance that was replaced under its name can look as if
    # it still served.
    listed = await store.list(PDInstance, namespace=current.metadata.namespace)
    instances = [instance for instance in listed.items if instance.spec.service == current.metadata.name]
    rules = build_assignment_rules(service.spec, pools, instances)
    serving, checked_at_s = list_serving_instances(instances), now_s()
    return CheckedChange(
        current=current.spec,
        proposed=proposed,
        serving=serving,
        rules=rules,
        now_s=checked_at_s,
        verdict=may_apply(current.spec, proposed, serving, rules, now_s=checked_at_s),
    )


async def _write_change(store: Store, current: PDAssignment, proposed: PDAssignmentSpec) -> PDAssignment:
    return await store.patch(
        PDAssignment,
        current.metadata.name,
        {"spec": create_merge_patch(current.spec.dump(), proposed.dump())},
        namespace=current.metadata.namespace,
        resource_version=current.metadata.resource_version,
    )


async def _read_configuration(
    store: Store, name: str, *, namespace: str
) -> tuple[PDService, Iterable[PDPool]]:
    service = await store.get(PDService, name, namespace=namespace)
    return service, (await store.list(PDPool, namespace=namespace)).items
