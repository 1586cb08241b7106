"""Reconcile one service: read all of its state, plan, and write the difference.

Whatever caused the reconcile, all of the service's state is read; a settled service is not written. A cluster
and a local run share this code; `ReconcileContext` holds what differs. What to change is decided in `plan/`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog

from fulcrum_core.api import PDAssignment, PDAssignmentSpec, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_core.errors import NotFound
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.ports import Clock, EngineObservation, EngineRuntime, InstanceKey, Store
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.bounded_concurrency import run_bounded
from fulcrum_operator.plan import (
    Observed,
    Plan,
    needs_router_state,
    plan_removal,
    plan_service,
    router_poll_interval_s,
)
from fulcrum_operator.plan.instance_state import mark_reachable_engines_running
from fulcrum_operator.plan.observed import EngineFacts, ModelReadAttempt
from fulcrum_operator.plan.slo_window import SloWindow, update_window

STATUS_INTERVAL_S = 10.0
"""Shortest time between two writes of a service's status in which no condition changed, in seconds."""
STATE_WAIT_S = 0.05
"""Longest wait of one reconcile for the router's state, in seconds; the request itself goes on."""
RECHECK_S = 1.0
"""Seconds until the next reconcile while a router request is open or the loss of a node is disputed."""

R = TypeVar("R", bound=Resource)

_log = structlog.get_logger()


class ServiceKey(NamedTuple):
    """Namespace and name of a PDService: the key of the work queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RouterView(Protocol):
    """Port to the active router of each service."""

    def endpoint(self, key: ServiceKey) -> str | None:
        """URL for the service's clients; None while no router is active."""
        ...

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """Instances and counters as the router reports them; None if it does not respond."""
        ...


class ModelReader(Protocol):
    """Port to what reads a model's config.json where the operator has no access to the file."""

    def reading(self, key: ServiceKey) -> ModelReadAttempt | None:
        """The latest attempt to read the service's model; None if none was started."""
        ...


@dataclass(frozen=True, slots=True)
class ReconcileMemory:
    """What one reconcile leaves for the next. A restart loses it; the stored objects suffice."""

    accepted: PDAssignmentSpec | None = None
    """Last accepted assignment."""
    status_written_s: float | None = None
    """Time of the last write of the service's status, unix seconds."""
    router_polled_s: float = -math.inf
    """Time of the last poll of the router, unix seconds."""
    state_request: asyncio.Task[RouterState | None] | None = None
    """Open request to the router that took longer than `STATE_WAIT_S`."""
    window: SloWindow = field(default_factory=SloWindow)
    """Recent counters of the router, for SLO attainment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileContext:
    """The ports and the memory that a reconcile uses, in a cluster or in a local run."""

    store: Store
    runtime: EngineRuntime
    clock: Clock
    engine_facts: Callable[[PDInstance], EngineFacts]
    """Identity, start-up time and fit of an instance's engine."""
    router: RouterView | None = None
    models: ModelReader | None = None
    after_apply: Callable[[Observed, Plan], Awaitable[None]] | None = None
    """Runs after a plan was applied: children, role labels, model reader pod, Events."""
    status_interval_s: float = STATUS_INTERVAL_S
    memory: MutableMapping[ServiceKey, ReconcileMemory] = field(default_factory=dict)
    """Memory by service. The work queue runs a key at most once at a time, so no lock guards an entry."""


async def reconcile(key: ServiceKey, context: ReconcileContext) -> float | None:
    """Bring the service one step closer to its spec.

    Returns:
        Seconds until the next reconcile; None: not before an event; infinity: never, the service was deleted.

    Raises:
        Conflict: if an object changed meanwhile; reconcile again.
        StoreUnavailable: if the store does not respond.
    """
    observed, memory = await _observe(key, context, context.memory.get(key, ReconcileMemory()))
    context.memory[key] = memory  # before applying: an open router request must survive a failed write
    if observed is None:
        await _apply(plan_removal(key.name, _observe_engines(key, context)), {}, context, key)
        del context.memory[key]
        return math.inf
    plan = plan_service(observed)
    status_due_s = await _apply(plan, _stored_objects(observed), context, key)
    context.memory[key] = replace(context.memory[key], accepted=plan.accepted_assignment)
    if context.after_apply:
        await context.after_apply(observed, plan)
    next_poll_s = _next_poll_s(observed, memory)
    recheck_s = RECHECK_S if observed.node_loss_disputed else None
    delays_s = [
        delay_s
        for delay_s in (plan.requeue_after_s, status_due_s, next_poll_s, recheck_s)
        if delay_s is not None
    ]
    return min(delays_s, default=None)


async def _observe(
    key: ServiceKey, context: ReconcileContext, memory: ReconcileMemory
) -> tuple[Observed | None, ReconcileMemory]:
    """The state that the plan is made from, None if the service is deleted or terminating; and the memory."""
    service = await _find(context.store, PDService, key)
    if service is None or service.metadata.deletion_timestamp is not None:
        return None, memory
    pools = tuple(p for p in await _list(context.store, PDPool, key) if p.spec.service == key.name)
    instances = tuple(i for i in await _list(context.store, PDInstance, key) if i.spec.service == key.name)
    engines = _observe_engines(key, context)
    observed = Observed(
        service=service,
        pools=pools,
        instances=instances,
        assignment=await _find(context.store, PDAssignment, key),
        tiers=frozenset(tier.metadata.name for tier in await _list(context.store, QoSTier, key)),
        engines=engines,
        engine_facts={i.metadata.name: context.engine_facts(i) for i in instances},
        endpoint=context.router.endpoint(key) if context.router else None,
        can_read_models=context.models is not None,
        model_read_attempt=context.models.reading(key) if context.models else None,
        accepted_assignment=memory.accepted,
        now_s=context.clock.now_s(),
    )
    if context.router is None:
        return observed, memory
    observed, memory = await _with_router_state(key, observed, context.router, memory)
    window = update_window(memory.window, observed.router, service, now_s=observed.now_s)
    return replace(observed, slo_report=window.report), replace(memory, window=window)


async def _with_router_state(
    key: ServiceKey, observed: Observed, router: RouterView, memory: ReconcileMemory
) -> tuple[Observed, ReconcileMemory]:
    """Add the router's state if a decision needs it now, or if the next poll is due."""
    if needs_router_state(observed):
        return mark_reachable_engines_running(replace(observed, router=await router.read_state(key))), memory
    if _polls_router(observed) and (
        memory.state_request or observed.now_s >= memory.router_polled_s + router_poll_interval_s(observed)
    ):
        state, memory = await _poll_router(key, router, replace(memory, router_polled_s=observed.now_s))
        return replace(observed, router=state), memory
    return observed, memory


async def _poll_router(
    key: ServiceKey, router: RouterView, memory: ReconcileMemory
) -> tuple[RouterState | None, ReconcileMemory]:
    """Wait at most `STATE_WAIT_S` for the router; a later reconcile uses a slower response."""
    request = memory.state_request
    if request is None or _failed(request):
        request = asyncio.ensure_future(router.read_state(key))
    await asyncio.wait((request,), timeout=STATE_WAIT_S)
    if not request.done():
        return None, replace(memory, state_request=request)
    return request.result(), replace(memory, state_request=None)


def _failed(request: asyncio.Task[RouterState | None]) -> bool:
    """Whether the request ended without a result. Its error was raised once; the next poll tries again."""
    return request.done() and (request.cancelled() or request.exception() is not None)


def _polls_router(observed: Observed) -> bool:
    """Whether the router's counters are read from time to time: KV transfers and requests."""
    return observed.endpoint is not None


def _next_poll_s(observed: Observed, memory: ReconcileMemory) -> float | None:
    if not _polls_router(observed):
        return None
    return (
        RECHECK_S
        if memory.state_request
        else max(0.0, memory.router_polled_s + router_poll_interval_s(observed) - observed.now_s)
    )


def _observe_engines(key: ServiceKey, context: ReconcileContext) -> dict[str, EngineObservation]:
    return {engine.name: engine for engine in context.runtime.observe(key.namespace)}


async def _find(store: Store, kind: type[R], key: ServiceKey) -> R | None:
    try:
        return await store.get(kind, key.name, namespace=key.namespace)
    except NotFound:
        return None


async def _list(store: Store, kind: type[R], key: ServiceKey) -> tuple[R, ...]:
    return (await store.list(kind, namespace=key.namespace)).items


def _stored_objects(observed: Observed) -> dict[tuple[str, str], Resource]:
    existing: tuple[Resource | None, ...] = (
        observed.service,
        observed.assignment,
        *observed.pools,
        *observed.instances,
    )
    return {(obj.kind, obj.metadata.name): obj for obj in existing if obj}


async def _apply(
    plan: Plan, stored: dict[tuple[str, str], Resource], context: ReconcileContext, key: ServiceKey
) -> float | None:
    """Write what differs, then start and stop engines; returns the seconds until a delayed status is due."""
    status_due_s: float | None = None
    created: dict[str, Resource] = {}
    for obj in plan.objects:
        before = stored.get((obj.kind, obj.metadata.name))
        if isinstance(obj, PDService) and isinstance(before, PDService):
            status_due_s = await _write_service(obj, before, context, key)
        elif before is None:
            created[obj.metadata.name] = await _create(obj, context.store)
        else:
            await _write(obj, before, context.store)
    for obj in plan.delete:
        await _delete(obj, context.store)
    started = (created.get(instance.metadata.name, instance) for instance in plan.start)
    await run_bounded(_start(obj, context) for obj in started if isinstance(obj, PDInstance))
    await run_bounded(
        context.runtime.stop(InstanceKey(key.namespace, name), drained=name in plan.drained)
        for name in plan.stop
    )
    return status_due_s


async def _start(instance: PDInstance, context: ReconcileContext) -> None:
    startup_s = context.engine_facts(instance).startup_s
    await context.runtime.start(instance, startup_s=startup_s)


async def _create(obj: Resource, store: Store) -> Resource:
    """Create the object; returns it with its uid, which owner references of other objects need."""
    created = await store.create(obj)
    _log.info("object created", kind=obj.kind, name=obj.metadata.name)
    await _write_status(obj, created, store)
    return created


async def _write(obj: Resource, before: Resource, store: Store) -> None:
    kind, name, namespace = type(obj), obj.metadata.name, obj.metadata.namespace
    if spec := create_merge_patch(_dump_part(before, "spec"), _dump_part(obj, "spec")):
        version = before.metadata.resource_version
        await store.patch(kind, name, {"spec": spec}, namespace=namespace, resource_version=version)
    await _write_status(obj, before, store)


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
    """Write the status now if a condition or the model changed, else at most every `status_interval_s`.

    Returns the seconds until a delayed write is due, None if nothing is left to write.
    """
    status = create_merge_patch(_dump_part(before, "status"), _dump_part(service, "status"))
    if not status:
        return None
    now_s, last_s = context.clock.now_s(), context.memory[key].status_written_s
    due_s = now_s if last_s is None else last_s + context.status_interval_s
    same = (
        _condition_states(service) == _condition_states(before)
        and service.status.model == before.status.model
    )
    if due_s > now_s and same:
        return due_s - now_s
    await context.store.patch_status(PDService, key.name, status, namespace=key.namespace)
    # At once: the interval also holds if one of the writes that follow fails.
    context.memory[key] = replace(context.memory[key], status_written_s=now_s)
    return None


def _condition_states(service: PDService) -> set[tuple[str, str, str]]:
    return {(c.type, c.status, c.reason) for c in service.status.conditions}


def _dump_part(obj: Resource, name: str) -> dict[str, Any]:
    part = getattr(obj, name, None)
    return {} if part is None else part.dump()


async def _delete(obj: Resource, store: Store) -> None:
    try:
        meta = obj.metadata  # by uid: an object recreated under this name is not what was judged
        await store.delete(type(obj), meta.name, namespace=meta.namespace, uid=meta.uid or None)
    except NotFound:
        return
    _log.info("object deleted", kind=obj.kind, name=obj.metadata.name)
