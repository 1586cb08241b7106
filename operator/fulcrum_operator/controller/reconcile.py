"""Reconcile one service: read all of its state, plan, and write the difference.

Whatever caused the reconcile, all of the service's state is read; a settled service is not written. What to
change is decided in `plan/`, and written by `apply`. `leader` and a local run call it for each key of their
work queue.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import structlog

from fulcrum_core.api import (
    Condition,
    PDAssignment,
    PDInstance,
    PDPool,
    PDService,
    QoSTier,
    Resource,
    conditions,
)
from fulcrum_core.errors import (
    Conflict,
    FulcrumError,
    InvalidInput,
    NameTaken,
    NotFound,
    StoreUnavailable,
)
from fulcrum_core.ports import EngineObservation, Store
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.apply import MESSAGE_LENGTH_MAX, apply_plan, stop_engines
from fulcrum_operator.controller.context import (
    Problems,
    ReconcileContext,
    ReconcileMemory,
    RouterView,
    ServiceKey,
)
from fulcrum_operator.controller.work_queue import backoff_s
from fulcrum_operator.plan import (
    Observed,
    needs_router_state,
    plan_removal,
    plan_service,
    router_poll_interval_s,
)
from fulcrum_operator.plan.instance_state import mark_invalid_engines, mark_reachable_engines_running
from fulcrum_operator.plan.observed import EngineFacts, FailureCause
from fulcrum_operator.plan.ownership import (
    Ownership,
    describe_taken,
    find_owned_objects,
    judge_ownership,
)
from fulcrum_operator.plan.slo_window import update_window
from fulcrum_operator.plan.status.degraded import with_failed_reconcile

STATE_WAIT_S = 0.05
"""Longest wait of one reconcile for the router's state, in seconds; the request itself goes on."""
RECHECK_S = 1.0
"""Seconds until the next reconcile while a router request is open or the loss of a node is disputed."""

UNAVAILABLE_REPORTED_AFTER = 3
"""Number of reconciles in which the store did not respond before that is reported."""

R = TypeVar("R", bound=Resource)

_log = structlog.get_logger()


async def reconcile(key: ServiceKey, context: ReconcileContext) -> float | None:
    """Bring the service one step closer to its spec.

    An object that cannot be written does not stop the others, and is reported in the condition Degraded. Any
    error except a conflict is reported there, too, before it is raised.

    Returns:
        Seconds until the next reconcile; None: not before an event; infinity: never, the service was deleted.

    Raises:
        Conflict: if an object changed meanwhile; reconcile again.
        StoreUnavailable: if the store does not respond.
        NameTaken: if somebody else's object has the name of the assignment.
    """
    try:
        return await _reconcile_once(key, context)
    except Conflict:
        raise
    except Exception as error:
        await _report_failure(key, context, error)
        raise


async def _reconcile_once(key: ServiceKey, context: ReconcileContext) -> float | None:
    observed, memory = await _observe(key, context, context.memory.get(key, ReconcileMemory()))
    context.memory[key] = memory  # before applying: an open router request must survive a failed write
    if observed is None:
        await _remove(key, context)
        return math.inf
    plan = plan_service(observed)
    status_due_s, refused = await apply_plan(plan, _stored_objects(observed), context, key)
    context.memory[key] = replace(context.memory[key], accepted=plan.accepted_assignment)
    later = await context.after_apply(observed, plan) if context.after_apply else Problems()
    retry_s = _remember_problems(key, context, refused, later)
    next_poll_s = _next_poll_s(observed, memory)
    recheck_s = RECHECK_S if observed.node_loss_disputed else None
    routers_s = context.router_failures(key).retry_after_s
    delays_s = [
        delay_s
        for delay_s in (plan.requeue_after_s, status_due_s, next_poll_s, recheck_s, retry_s, routers_s)
        if delay_s is not None
    ]
    return min(delays_s, default=None)


def _remember_problems(
    key: ServiceKey, context: ReconcileContext, refused: tuple[FailureCause, ...], later: Problems
) -> float | None:
    """Keep the problems for the status; return the seconds until the next reconcile is due, None: never."""
    memory, causes = context.memory[key], (*refused, *later.causes, *context.installation_problems())
    failures = memory.failures + 1 if refused else 0
    context.memory[key] = replace(memory, problems=causes, failures=failures)
    if refused:  # also if the text of a refusal differs each time: it must not be tried without a pause
        return (
            backoff_s(failures)
            if later.retry_after_s is None
            else min(backoff_s(failures), later.retry_after_s)
        )
    return 0.0 if causes != memory.problems else later.retry_after_s


async def _report_failure(key: ServiceKey, context: ReconcileContext, error: Exception) -> None:
    """Write a failed reconcile into the condition Degraded, unless the store does not respond."""
    memory, cause = context.memory.get(key, ReconcileMemory()), _describe_failure(error)
    failures = memory.failures + 1
    if isinstance(error, StoreUnavailable) and failures < UNAVAILABLE_REPORTED_AFTER:
        context.memory[key] = replace(memory, failures=failures)
        return
    context.memory[key] = replace(memory, failures=failures, problems=(cause,))
    try:
        service = await context.store.get(PDService, key.name, namespace=key.namespace)
        conditions_now = with_failed_reconcile(
            service.status.conditions,
            cause,
            generation=service.metadata.generation,
            now_s=context.clock.now_s(),
        )
        if _degraded_text(conditions_now) == _degraded_text(service.status.conditions):
            return
        patch = {"conditions": [condition.dump() for condition in conditions_now], "reason": cause.reason}
        await context.store.patch_status(PDService, key.name, patch, namespace=key.namespace)
        if context.on_failure:
            await context.on_failure(service, cause)
    except NotFound:  # the service was deleted meanwhile
        return
    except FulcrumError as second:
        _log.warning("failure not reported", service=str(key), error=str(second))


def _describe_failure(error: Exception) -> FailureCause:
    if isinstance(error, NameTaken):
        return FailureCause(conditions.NAME_TAKEN, str(error))
    text = str(error) if isinstance(error, FulcrumError) else f"internal error, please report it: {error!r}"
    return FailureCause(conditions.RECONCILE_FAILED, text[:MESSAGE_LENGTH_MAX])


def _degraded_text(found: Iterable[Condition]) -> tuple[str, str, str] | None:
    texts = ((c.status, c.reason, c.message) for c in found if c.type == conditions.DEGRADED)
    return next(texts, None)


async def _remove(key: ServiceKey, context: ReconcileContext) -> None:
    """Stop what is left of a deleted service."""
    instances = await _list(context.store, PDInstance, key)
    names = {i.metadata.name for i in instances if i.spec.service == key.name}
    problems = await stop_engines(plan_removal(key.name, _observe_engines(key, context), names), context, key)
    if problems:
        _log.warning("engine not stopped", service=str(key), error=problems[0].message)
    del context.memory[key]


async def _observe(
    key: ServiceKey, context: ReconcileContext, memory: ReconcileMemory
) -> tuple[Observed | None, ReconcileMemory]:
    """The state that the plan is made from, None if the service is deleted or terminating; and the memory."""
    service = await _find(context.store, PDService, key)
    if service is None or service.metadata.deletion_timestamp is not None:
        return None, memory
    owned = find_owned_objects(
        service, await _list(context.store, PDPool, key), await _list(context.store, PDInstance, key)
    )
    pools = [
        await _adopt(pool, service, context) if pool.metadata.name in owned.orphaned_pools else pool
        for pool in owned.pools
    ]
    facts, invalid = _derive_engine_facts(owned.instances, context)
    observed = Observed(
        service=service,
        pools=tuple(pools),
        instances=owned.instances,
        assignment=await _find_assignment(service, context, key),
        tiers=tuple(await _list(context.store, QoSTier, key)),
        engines=_observe_engines(key, context),
        engine_facts=facts,
        endpoint=context.router.endpoint(key) if context.router else None,
        state_tls=context.state_tls(key),
        engine_images=context.engine_images(),
        sees_nodes=context.sees_nodes(),
        can_read_models=context.models is not None,
        model_read_attempt=context.models.reading(key) if context.models else None,
        accepted_assignment=memory.accepted,
        taken_pools=owned.taken_pools,
        taken_names=owned.taken_names,
        problems=memory.problems,
        router_failures=context.router_failures(key).causes,
        now_s=context.clock.now_s(),
    )
    observed = mark_invalid_engines(observed, invalid)
    if context.router is None:
        return observed, memory
    observed, memory = await _with_router_state(key, observed, context.router, memory)
    window = update_window(memory.window, observed.router, service, now_s=observed.now_s)
    return replace(observed, slo_report=window.report), replace(memory, window=window)


def _derive_engine_facts(
    instances: Iterable[PDInstance], context: ReconcileContext
) -> tuple[dict[str, EngineFacts], dict[str, str]]:
    """The facts of each instance's engine by name, or why its settings are invalid."""
    facts, invalid = dict[str, EngineFacts](), dict[str, str]()
    for instance in instances:
        try:
            facts[instance.metadata.name] = context.engine_facts(instance)
        except InvalidInput as error:
            invalid[instance.metadata.name] = str(error)
    return facts, invalid


async def _find_assignment(
    service: PDService, context: ReconcileContext, key: ServiceKey
) -> PDAssignment | None:
    found = await _find(context.store, PDAssignment, key)
    if found is None:
        return None
    ownership = judge_ownership(found.metadata, service, names_service=found.spec.service == key.name)
    if ownership is Ownership.FOREIGN:
        raise NameTaken(describe_taken(PDAssignment.kind_name(), found.metadata, service))
    return await _adopt(found, service, context) if ownership is Ownership.ORPHANED else found


async def _adopt(orphan: R, owner: PDService, context: ReconcileContext) -> R:
    """Make the service the controller of an object that a person orphaned."""
    if context.check_not_deleted:
        await context.check_not_deleted(owner)
    meta = orphan.metadata
    owners = [reference.dump() for reference in (*meta.owner_references, owner.owner_reference())]
    adopted = await context.store.patch(
        type(orphan),
        meta.name,
        {"metadata": {"ownerReferences": owners}},
        namespace=meta.namespace,
        resource_version=meta.resource_version,
    )
    _log.info("object adopted", kind=orphan.kind, name=meta.name)
    return adopted


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
