"""Writes the difference between a plan and the stored objects, then starts and stops engines.

If one object or engine is refused, the others are still handled. The service's status is written at most once
per interval while no condition changes. `plan/` decides what to change; `reconcile` decides when to apply the
next plan.

`reconcile` calls it with every plan.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import structlog

from fulcrum_core.api import PDAssignment, PDInstance, PDService, Resource, conditions
from fulcrum_core.errors import Forbidden, InvalidInput, NotFound
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.ports import InstanceKey, Store
from fulcrum_operator.controller.bounded_concurrency import run_bounded
from fulcrum_operator.controller.context import ReconcileContext, ServiceKey
from fulcrum_operator.plan import Plan
from fulcrum_operator.plan.observed import FailureCause

MESSAGE_LENGTH_MAX = 1024
"""Longest message about a refused object or a failed reconcile, in characters; longer ones are cut."""

_log = structlog.get_logger()


async def apply_plan(
    plan: Plan, stored: dict[tuple[str, str], Resource], context: ReconcileContext, key: ServiceKey
) -> tuple[float | None, tuple[FailureCause, ...]]:
    """Write what differs, delete objects, then start and stop engines.

    If the write of an instance's object is refused, the object is not deleted and its engine is neither
    started nor stopped. No engine is started before the service has its own ServiceAccount for engines.

    Returns:
        Seconds until a delayed write of the service's status is due, or None; and the causes of refusals.

    Raises:
        Forbidden, InvalidInput: if the assignment is refused, because all roles depend on it. Refusals of
            its status and of other objects are returned.
        StoreError: any other one, such as Conflict, AlreadyExists or StoreUnavailable. The rest of the plan
            is not applied.
    """
    status_due_s: float | None = None
    created: dict[str, Resource] = {}
    refused: dict[str, FailureCause] = {}
    for obj in plan.objects:
        before, name = stored.get((obj.kind, obj.metadata.name)), obj.metadata.name
        try:
            if isinstance(obj, PDService) and isinstance(before, PDService):
                status_due_s = await _write_service(obj, before, context, key)
                continue
            if before is None:
                before = created[name] = await _create(obj, context.store)
            else:
                await _write_spec(obj, before, context.store)
        except (Forbidden, InvalidInput) as error:
            if isinstance(obj, PDAssignment):
                raise
            refused[name] = _build_failure_cause(obj.kind, name, error)
            continue
        try:
            await _write_status(obj, before, context.store)
        except (Forbidden, InvalidInput) as error:
            refused[name] = _build_failure_cause(obj.kind, name, error)
    rest = _without_instances(plan, refused)
    started = (created.get(instance.metadata.name, instance) for instance in rest.start)
    failed = [
        *refused.values(),
        *await _delete_all(rest.delete, context.store),
        *(await _start_all(started, context) if context.has_engine_account(key) else ()),
        *await stop_engines(rest, context, key),
    ]
    return status_due_s, tuple(failed)


def _without_instances(plan: Plan, names: Collection[str]) -> Plan:
    """Return the plan without deletions, starts and stops of these names; their objects were refused."""
    return replace(
        plan,
        delete=tuple(obj for obj in plan.delete if obj.metadata.name not in names),
        start=tuple(instance for instance in plan.start if instance.metadata.name not in names),
        stop=tuple(name for name in plan.stop if name not in names),
    )


def _build_failure_cause(kind: str, name: str, error: Exception) -> FailureCause:
    return FailureCause(conditions.CHILD_REFUSED, f"{kind} {name}: {error}"[:MESSAGE_LENGTH_MAX])


async def _delete_all(objects: Iterable[Resource], store: Store) -> list[FailureCause]:
    refused = []
    for obj in objects:
        try:
            await _delete(obj, store)
        except (Forbidden, InvalidInput) as error:
            refused.append(_build_failure_cause(obj.kind, obj.metadata.name, error))
    return refused


async def _start_all(instances: Iterable[Resource], context: ReconcileContext) -> list[FailureCause]:
    failed: list[FailureCause] = []

    async def start(instance: PDInstance) -> None:
        try:
            startup_s = context.engine_facts(instance).startup_s
            await context.runtime.start(instance, startup_s=startup_s)
        except (Forbidden, InvalidInput) as error:
            failed.append(FailureCause(conditions.ENGINE_START_FAILED, f"{instance.metadata.name}: {error}"))

    await run_bounded(start(instance) for instance in instances if isinstance(instance, PDInstance))
    return sorted(failed)


async def stop_engines(plan: Plan, context: ReconcileContext, key: ServiceKey) -> list[FailureCause]:
    """Stop the engines in `plan.stop`; return the causes of refusals. Also for a deleted service."""
    failed: list[FailureCause] = []

    async def stop(name: str) -> None:
        try:
            await context.runtime.stop(InstanceKey(key.namespace, name), drained=name in plan.drained)
        except (Forbidden, InvalidInput) as error:
            failed.append(_build_failure_cause("pod", name, error))

    await run_bounded(stop(name) for name in plan.stop)
    return sorted(failed)


async def _create(obj: Resource, store: Store) -> Resource:
    """Create the object; return it with its uid, which owner references of other objects need."""
    created = await store.create(obj)
    _log.info("object created", kind=obj.kind, name=obj.metadata.name)
    return created


async def _write_spec(obj: Resource, before: Resource, store: Store) -> None:
    kind, name, namespace = type(obj), obj.metadata.name, obj.metadata.namespace
    if spec := create_merge_patch(_dump_part(before, "spec"), _dump_part(obj, "spec")):
        version = before.metadata.resource_version
        await store.patch(kind, name, {"spec": spec}, namespace=namespace, resource_version=version)


async def _write_status(obj: Resource, before: Resource, store: Store) -> None:
    if status := create_merge_patch(_dump_part(before, "status"), _dump_part(obj, "status")):
        await store.patch_status(type(obj), obj.metadata.name, status, namespace=obj.metadata.namespace)
        _log_phase_change(obj, before)


def _log_phase_change(obj: Resource, before: Resource) -> None:
    if (
        isinstance(obj, PDInstance)
        and isinstance(before, PDInstance)
        and obj.status.phase != before.status.phase
    ):
        status = obj.status
        _log.info(
            "phase changed", instance=obj.metadata.name, phase=str(status.phase), message=status.message
        )


async def _write_service(
    service: PDService, before: PDService, context: ReconcileContext, key: ServiceKey
) -> float | None:
    """Write the service's status: at once if a condition or the model changed, else once per interval.

    The interval is `status_interval_s`. Returns the seconds until a delayed write is due, or None.
    """
    status = create_merge_patch(_dump_part(before, "status"), _dump_part(service, "status"))
    if not status:
        return None
    now_s, last_s = context.clock.now_s(), context.memory[key].status_written_s
    due_s = now_s if last_s is None else last_s + context.status_interval_s
    same = (
        _list_condition_states(service) == _list_condition_states(before)
        and service.status.model == before.status.model
    )
    if due_s > now_s and same:
        return due_s - now_s
    await context.store.patch_status(PDService, key.name, status, namespace=key.namespace)
    # Recorded now, so that the interval also applies if a later write of this reconcile fails.
    context.memory[key] = replace(context.memory[key], status_written_s=now_s)
    return None


def _list_condition_states(service: PDService) -> set[tuple[str, str, str]]:
    return {(c.type, c.status, c.reason) for c in service.status.conditions}


def _dump_part(obj: Resource, name: str) -> dict[str, Any]:
    part = getattr(obj, name, None)
    return {} if part is None else part.dump()


async def _delete(obj: Resource, store: Store) -> None:
    try:
        meta = obj.metadata  # by uid: a new object with this name must not be deleted
        await store.delete(type(obj), meta.name, namespace=meta.namespace, uid=meta.uid or None)
    except NotFound:
        return
    _log.info("object deleted", kind=obj.kind, name=obj.metadata.name)
