"""One pass over one service: read everything, plan, write the difference.

Whatever woke the key, a pass looks at all of the service's state; a pass that finds everything as planned
writes nothing. The same code runs over memory and over Kubernetes: what differs stands in `Cluster`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog

from fulcrum_core.api import PDAssignment, PDAssignmentSpec, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_core.errors import NotFound
from fulcrum_core.merge import merge_diff
from fulcrum_core.ports import Clock, EngineObservation, EngineRuntime, InstanceKey, Store
from fulcrum_core.state import RouterState
from fulcrum_operator.controller.bounded_concurrency import side_by_side
from fulcrum_operator.plan import (
    Observed,
    Plan,
    asks_router,
    look_every_s,
    plan_removal,
    plan_service,
)
from fulcrum_operator.plan.observed import EngineFacts, Reading, believed
from fulcrum_operator.plan.status.slo_met import Window, seen_again

STATUS_INTERVAL_S = 10.0
"""A service's status is written at most once in so long, unless a condition changes."""
LOOK_PATIENCE_S = 0.05
"""How long a pass waits for what the router says of hand-offs."""
LOOK_AGAIN_S = 1.0
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

    async def ledger(self, key: ServiceKey) -> RouterState | None:
        """What it says of its instances; None if it does not answer."""
        ...


class ModelReader(Protocol):
    """Who reads the models of real engines, where the operator cannot."""

    def reading(self, key: ServiceKey) -> Reading | None:
        """What came of it so far; None if nobody was told to."""
        ...


@dataclass(slots=True)
class Memory:
    """What a pass leaves for the next one. Lost with the process, and rebuilt from the objects."""

    accepted: PDAssignmentSpec | None = None
    status_written_s: float | None = None
    looked_s: float = -math.inf
    """When the router was last asked what it counts."""
    look: asyncio.Task[RouterState | None] | None = None
    """Its answer, if that takes longer than a pass waits."""
    window: Window = field(default_factory=Window)
    """What the router has counted of late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All that a pass reaches: objects, engines, the router, the clock, and its memory of each service."""

    store: Store
    runtime: EngineRuntime
    clock: Clock
    engine_facts: Callable[[PDInstance], EngineFacts]
    """What the instance's engine is known to be."""
    router: RouterView | None = None
    models: ModelReader | None = None
    tend: Callable[[Observed, Plan], Awaitable[None]] | None = None
    """Looks after what stands around the engines, once a plan is carried out."""
    status_interval_s: float = STATUS_INTERVAL_S
    memory: MutableMapping[ServiceKey, Memory] = field(default_factory=dict)


async def reconcile(key: ServiceKey, cluster: Cluster) -> float | None:
    """Bring the service one step closer to what it asks for; returns when to look again, in seconds.

    None is: not before something happens; infinity: never, for the service is gone.

    Raises:
        Conflict: if an object changed meanwhile: look again.
        StoreUnavailable: if the store does not answer.
    """
    memory = cluster.memory.setdefault(key, Memory())
    seen = await _observe(key, cluster, memory)
    if seen is None:
        await _apply(plan_removal(key.name, _engines(key, cluster)), {}, cluster, key)
        del cluster.memory[key]
        return math.inf
    plan = plan_service(seen)
    late_s = await _apply(plan, _stored(seen), cluster, key)
    memory.accepted = plan.accepted
    if cluster.tend:
        await cluster.tend(seen, plan)
    looks_s = _looks_again_s(seen, memory)
    doubt_s = LOOK_AGAIN_S if seen.doubted else None
    waits = [wait_s for wait_s in (plan.wake_after_s, late_s, looks_s, doubt_s) if wait_s is not None]
    return min(waits, default=None)


async def _observe(key: ServiceKey, cluster: Cluster, memory: Memory) -> Observed | None:
    """The picture that the plan is made from; None if there is no such service, or not for long."""
    service = await _found(cluster.store, PDService, key)
    if service is None or service.metadata.deletion_timestamp is not None:
        return None
    pools = tuple(p for p in await _all(cluster.store, PDPool, key) if p.spec.service == key.name)
    instances = tuple(i for i in await _all(cluster.store, PDInstance, key) if i.spec.service == key.name)
    engines = _engines(key, cluster)
    seen = Observed(
        service=service,
        pools=pools,
        instances=instances,
        assignment=await _found(cluster.store, PDAssignment, key),
        tiers=frozenset(tier.metadata.name for tier in await _all(cluster.store, QoSTier, key)),
        engines=engines,
        facts={i.metadata.name: cluster.engine_facts(i) for i in instances},
        endpoint=cluster.router.endpoint(key) if cluster.router else None,
        reads_models=cluster.models is not None,
        reading=cluster.models.reading(key) if cluster.models else None,
        accepted=memory.accepted,
        now_s=cluster.clock.now_s(),
    )
    if cluster.router is None:
        return seen
    seen = await _with_router(key, seen, cluster.router, memory)
    memory.window = seen_again(memory.window, seen.router, service, now_s=seen.now_s)
    return replace(seen, slo=memory.window.told)


async def _with_router(key: ServiceKey, seen: Observed, router: RouterView, memory: Memory) -> Observed:
    """The picture with the router's word, where something waits for that or it is time to look."""
    if asks_router(seen):
        return believed(replace(seen, router=await router.ledger(key)))
    if _looks(seen) and (memory.look or seen.now_s >= memory.looked_s + look_every_s(seen)):
        memory.looked_s = seen.now_s
        return replace(seen, router=await _look(key, router, memory))
    return seen


async def _look(key: ServiceKey, router: RouterView, memory: Memory) -> RouterState | None:
    """What the router says. Nothing hurries: one that takes its time is heard by a later pass."""
    look = memory.look = memory.look or asyncio.ensure_future(router.ledger(key))
    await asyncio.wait((look,), timeout=LOOK_PATIENCE_S)
    if not look.done():
        return None
    memory.look = None
    return look.result()


def _looks(seen: Observed) -> bool:
    """Whether the router is asked now and then what it counts: hand-offs, and requests."""
    return seen.endpoint is not None


def _looks_again_s(seen: Observed, memory: Memory) -> float | None:
    if not _looks(seen):
        return None
    return LOOK_AGAIN_S if memory.look else max(0.0, memory.looked_s + look_every_s(seen) - seen.now_s)


def _engines(key: ServiceKey, cluster: Cluster) -> dict[str, EngineObservation]:
    return {engine.name: engine for engine in cluster.runtime.observe(key.namespace)}


async def _found(store: Store, kind: type[R], key: ServiceKey) -> R | None:
    try:
        return await store.get(kind, key.name, namespace=key.namespace)
    except NotFound:
        return None


async def _all(store: Store, kind: type[R], key: ServiceKey) -> tuple[R, ...]:
    return (await store.list(kind, namespace=key.namespace)).items


def _stored(seen: Observed) -> dict[tuple[str, str], Resource]:
    there: tuple[Resource | None, ...] = (seen.service, seen.assignment, *seen.pools, *seen.instances)
    return {(obj.kind, obj.metadata.name): obj for obj in there if obj}


async def _apply(
    plan: Plan, stored: dict[tuple[str, str], Resource], cluster: Cluster, key: ServiceKey
) -> float | None:
    """Write what differs, then start and end engines. Returns in how many seconds a put-off status is due."""
    late_s: float | None = None
    made: dict[str, Resource] = {}
    for obj in plan.objects:
        before = stored.get((obj.kind, obj.metadata.name))
        if isinstance(obj, PDService) and isinstance(before, PDService):
            late_s = await _write_service(obj, before, cluster, cluster.memory[key])
        elif before is None:
            made[obj.metadata.name] = await _create(obj, cluster.store)
        else:
            await _write(obj, before, cluster.store)
    for obj in plan.delete:
        await _delete(obj, cluster.store)
    started = (made.get(instance.metadata.name, instance) for instance in plan.start)
    await side_by_side(_start(obj, cluster) for obj in started if isinstance(obj, PDInstance))
    await side_by_side(
        cluster.runtime.stop(InstanceKey(key.namespace, name), drained=name in plan.drained)
        for name in plan.stop
    )
    return late_s


async def _start(instance: PDInstance, cluster: Cluster) -> None:
    startup_s = cluster.engine_facts(instance).startup_s
    await cluster.runtime.start(instance, startup_s=startup_s)


async def _create(obj: Resource, store: Store) -> Resource:
    """The object as it is stored now: with an identity, by which others can be owned by it."""
    made = await store.create(obj)
    _log.info("object made", kind=obj.kind, name=obj.metadata.name)
    await _write_status(obj, made, store)
    return made


async def _write(obj: Resource, before: Resource, store: Store) -> None:
    kind, name, namespace = type(obj), obj.metadata.name, obj.metadata.namespace
    if spec := merge_diff(_part(before, "spec"), _part(obj, "spec")):
        version = before.metadata.resource_version
        await store.patch(kind, name, {"spec": spec}, namespace=namespace, resource_version=version)
    await _write_status(obj, before, store)


async def _write_status(obj: Resource, before: Resource, store: Store) -> None:
    if status := merge_diff(_part(before, "status"), _part(obj, "status")):
        await store.patch_status(type(obj), obj.metadata.name, status, namespace=obj.metadata.namespace)
        _tell_phase(obj, before)


def _tell_phase(obj: Resource, before: Resource) -> None:
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
    service: PDService, before: PDService, cluster: Cluster, memory: Memory
) -> float | None:
    """Write the status, or say when that is due: counts alone may wait, a verdict may not."""
    status = merge_diff(_part(before, "status"), _part(service, "status"))
    if not status:
        return None
    now_s, last_s = cluster.clock.now_s(), memory.status_written_s
    due_s = now_s if last_s is None else last_s + cluster.status_interval_s
    same = _verdicts(service) == _verdicts(before) and service.status.model == before.status.model
    if due_s > now_s and same:
        return due_s - now_s
    name, namespace = service.metadata.name, service.metadata.namespace
    await cluster.store.patch_status(PDService, name, status, namespace=namespace)
    memory.status_written_s = now_s
    return None


def _verdicts(service: PDService) -> set[tuple[str, str, str]]:
    return {(c.type, c.status, c.reason) for c in service.status.conditions}


def _part(obj: Resource, name: str) -> dict[str, Any]:
    part = getattr(obj, name, None)
    return {} if part is None else part.dump()


async def _delete(obj: Resource, store: Store) -> None:
    try:
        meta = obj.metadata  # what was made anew under its name is not what this pass has judged
        await store.delete(type(obj), meta.name, namespace=meta.namespace, uid=meta.uid or None)
    except NotFound:
        return
    _log.info("object deleted", kind=obj.kind, name=obj.metadata.name)
