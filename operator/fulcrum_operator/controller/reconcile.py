"""One pass over one service: read everything, plan, write the difference.

Whatever woke the key, a pass looks at all of the service's state; a pass that finds everything as planned
writes nothing. The same code runs over memory and over Kubernetes: what differs stands in `ReconcileContext`.
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
from fulcrum_operator.plan.observed import EngineFacts, ModelReadAttempt, mark_reachable_engines_running
from fulcrum_operator.plan.status.slo_met import SloWindow, update_window

STATUS_INTERVAL_S = 10.0
"""A service's status is written at most once in so long, unless a condition changes."""
STATE_WAIT_S = 0.05
"""How long a pass waits for what the router says of hand-offs."""
RECHECK_S = 1.0
"""When the next pass asks for it."""

R = TypeVar("R", bound=Resource)

_log = structlog.get_logger()


class ServiceKey(NamedTuple):
    """What a pass is about."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RouterView(Protocol):
    """The routers of the services, as the operator sees them."""

    def endpoint(self, key: ServiceKey) -> str | None:
        """Where clients reach it; None until it serves."""
        ...

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """What it says of its instances; None if it does not answer."""
        ...


class ModelReader(Protocol):
    """Who reads the models of real engines, where the operator cannot."""

    def reading(self, key: ServiceKey) -> ModelReadAttempt | None:
        """What came of it so far; None if nobody was told to."""
        ...


@dataclass(slots=True)
class ReconcileMemory:
    """What a pass leaves for the next one. Lost with the process, and rebuilt from the objects."""

    accepted: PDAssignmentSpec | None = None
    status_written_s: float | None = None
    router_polled_s: float = -math.inf
    """When the router was last asked what it counts."""
    state_request: asyncio.Task[RouterState | None] | None = None
    """Its answer, if that takes longer than a pass waits."""
    window: SloWindow = field(default_factory=SloWindow)
    """What the router has counted of late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileContext:
    """All that a pass reaches: objects, engines, the router, the clock, and its memory of each service."""

    store: Store
    runtime: EngineRuntime
    clock: Clock
    engine_facts: Callable[[PDInstance], EngineFacts]
    """What the instance's engine is known to be."""
    router: RouterView | None = None
    models: ModelReader | None = None
    after_apply: Callable[[Observed, Plan], Awaitable[None]] | None = None
    """Looks after what stands around the engines, once a plan is carried out."""
    status_interval_s: float = STATUS_INTERVAL_S
    memory: MutableMapping[ServiceKey, ReconcileMemory] = field(default_factory=dict)


async def reconcile(key: ServiceKey, context: ReconcileContext) -> float | None:
    """Bring the service one step closer to what it asks for; returns when to look again, in seconds.

    None is: not before something happens; infinity: never, for the service is gone.

    Raises:
        Conflict: if an object changed meanwhile: look again.
        StoreUnavailable: if the store does not answer.
    """
    memory = context.memory.setdefault(key, ReconcileMemory())
    observed = await _observe(key, context, memory)
    if observed is None:
        await _apply(plan_removal(key.name, _observe_engines(key, context)), {}, context, key)
        del context.memory[key]
        return math.inf
    plan = plan_service(observed)
    status_due_s = await _apply(plan, _stored_objects(observed), context, key)
    memory.accepted = plan.accepted_assignment
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


async def _observe(key: ServiceKey, context: ReconcileContext, memory: ReconcileMemory) -> Observed | None:
    """The picture that the plan is made from; None if there is no such service, or not for long."""
    service = await _find(context.store, PDService, key)
    if service is None or service.metadata.deletion_timestamp is not None:
        return None
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
        return observed
    observed = await _with_router_state(key, observed, context.router, memory)
    memory.window = update_window(memory.window, observed.router, service, now_s=observed.now_s)
    return replace(observed, slo_report=memory.window.report)


async def _with_router_state(
    key: ServiceKey, observed: Observed, router: RouterView, memory: ReconcileMemory
) -> Observed:
    """The picture with the router's word, where something waits for that or it is time to look."""
    if needs_router_state(observed):
        return mark_reachable_engines_running(replace(observed, router=await router.read_state(key)))
    if _polls_router(observed) and (
        memory.state_request or observed.now_s >= memory.router_polled_s + router_poll_interval_s(observed)
    ):
        memory.router_polled_s = observed.now_s
        return replace(observed, router=await _poll_router(key, router, memory))
    return observed


async def _poll_router(key: ServiceKey, router: RouterView, memory: ReconcileMemory) -> RouterState | None:
    """What the router says. Nothing hurries: one that takes its time is heard by a later pass."""
    request = memory.state_request = memory.state_request or asyncio.ensure_future(router.read_state(key))
    await asyncio.wait((request,), timeout=STATE_WAIT_S)
    if not request.done():
        return None
    memory.state_request = None
    return request.result()


def _polls_router(observed: Observed) -> bool:
    """Whether the router is asked now and then what it counts: hand-offs, and requests."""
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
    """Write what differs, then start and end engines. Returns in how many seconds a put-off status is due."""
    status_due_s: float | None = None
    created: dict[str, Resource] = {}
    for obj in plan.objects:
        before = stored.get((obj.kind, obj.metadata.name))
        if isinstance(obj, PDService) and isinstance(before, PDService):
            status_due_s = await _write_service(obj, before, context, context.memory[key])
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
    """The object as it is stored now: with an identity, by which others can be owned by it."""
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
    service: PDService, before: PDService, context: ReconcileContext, memory: ReconcileMemory
) -> float | None:
    """Write the status, or say when that is due: counts alone may wait, a verdict may not."""
    status = create_merge_patch(_dump_part(before, "status"), _dump_part(service, "status"))
    if not status:
        return None
    now_s, last_s = context.clock.now_s(), memory.status_written_s
    due_s = now_s if last_s is None else last_s + context.status_interval_s
    same = (
        _condition_states(service) == _condition_states(before)
        and service.status.model == before.status.model
    )
    if due_s > now_s and same:
        return due_s - now_s
    name, namespace = service.metadata.name, service.metadata.namespace
    await context.store.patch_status(PDService, name, status, namespace=namespace)
    memory.status_written_s = now_s
    return None


def _condition_states(service: PDService) -> set[tuple[str, str, str]]:
    return {(c.type, c.status, c.reason) for c in service.status.conditions}


def _dump_part(obj: Resource, name: str) -> dict[str, Any]:
    part = getattr(obj, name, None)
    return {} if part is None else part.dump()


async def _delete(obj: Resource, store: Store) -> None:
    try:
        meta = obj.metadata  # what was made anew under its name is not what this pass has judged
        await store.delete(type(obj), meta.name, namespace=meta.namespace, uid=meta.uid or None)
    except NotFound:
        return
    _log.info("object deleted", kind=obj.kind, name=obj.metadata.name)
