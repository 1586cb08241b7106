"""Kubernetes Events on the PDService, for `kubectl describe` and `fulcrum status`; some on a PDInstance, too.

`derive_events` is pure: Events follow from the state before a reconcile and its plan, and unchanged state
causes none. `EventRecorder` writes them; a repeated Event increments a count. `leader` calls both after each
reconcile.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import structlog

from fulcrum_cluster.objects import EVENT, Object, ObjectApi
from fulcrum_core.api import Condition, ObjectMeta, PDInstance, PDPool, PDService, conditions, event_reasons
from fulcrum_core.api.meta import API_VERSION, format_time
from fulcrum_core.errors import AlreadyExists, FulcrumError, NotFound
from fulcrum_core.formatting import format_count
from fulcrum_core.models import MODEL_UNKNOWN
from fulcrum_core.ports import Clock, EngineObservation, EngineState
from fulcrum_core.values import Actor, Phase
from fulcrum_operator.controller.cached_store import check_is_leader
from fulcrum_operator.controller.field_ownership import FIELD_MANAGER
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.observed import FailureCause
from fulcrum_operator.plan.pools import desired_replicas
from fulcrum_operator.plan.status.degraded import find_problems

NORMAL, WARNING = "Normal", "Warning"

_MESSAGE_LENGTH_MAX = 1000
_REMEMBERED_MAX = 1000
_BURST = 25
_REFILL_S = 5.0
_COMPLETED = (event_reasons.ROLLOUT_COMPLETED, NORMAL)
_ROLLING_OUT = (conditions.ROLLOUT_PROGRESSING, conditions.ROLLING_OUT_IN_PLACE)
_EVENT_BY_REASON = {
    conditions.TIER_NOT_FOUND: (event_reasons.TIER_MISSING, WARNING),
    conditions.TENANT_MATCHED_TWICE: (event_reasons.TENANT_MATCHED_TWICE, WARNING),
    conditions.RESERVES_TOO_LARGE: (event_reasons.RESERVES_TOO_LARGE, WARNING),
    conditions.INVALID_ACCESS: (event_reasons.INVALID_ACCESS, WARNING),
    conditions.ROLLOUT_PROGRESSING: (event_reasons.ROLLOUT_STARTED, NORMAL),
    conditions.ROLLING_OUT_IN_PLACE: (event_reasons.ROLLING_OUT_IN_PLACE, WARNING),
    conditions.MOVING_INSTANCES: (event_reasons.MOVING_INSTANCES, NORMAL),
    conditions.EVICTION_ALLOWED: (event_reasons.EVICTION_ALLOWED, WARNING),
    conditions.ROLLED_BACK: (event_reasons.ROLLED_BACK, WARNING),
    conditions.FLOORS_TOO_HIGH: (event_reasons.FLOORS_TOO_HIGH, WARNING),
    MODEL_UNKNOWN: (event_reasons.MODEL_NOT_READ, WARNING),
    **dict.fromkeys(
        (conditions.LIMITED_BY_FLOORS, conditions.TOO_MANY_REPLICAS, conditions.TOO_FEW_REPLICAS),
        (event_reasons.SCALING_LIMITED, WARNING),
    ),
}
"""Event reason and type when a condition of the service changes to one of these reasons."""
_RETRIED = (conditions.CHILD_REFUSED, conditions.NAME_TAKEN, conditions.RECONCILE_FAILED)
"""Causes that may end without a change by a person."""
_REASON_WHEN_FALSE = {
    conditions.KV_TRANSFER_VERIFIED: event_reasons.KV_TRANSFER_NOT_VERIFIED,
    conditions.MODEL_FITS: event_reasons.MODEL_DOES_NOT_FIT,
}
"""Event reason for a condition that becomes False, or stays False for another reason."""
_REASON_WHEN_TRUE_AGAIN = {conditions.KV_TRANSFER_VERIFIED: "KVTransferVerified"}
"""Event reason for a condition that is True again after it was False."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a service. An Event with the reason and key of an earlier one repeats it."""

    reason: str
    type: str
    message: str
    key: str
    instance: str = ""
    """Name of the PDInstance that gets the Event, too; empty if the Event is of the service only."""


def role_flipped(instance: str, role: str, by: str, cause: str) -> Event:
    """An instance's role was changed by an assignment."""
    suffix = f" ({cause})" if cause else ""
    return Event(
        event_reasons.ROLE_FLIPPED,
        NORMAL,
        f"{instance} flipped to {role} by {by}{suffix}",
        f"{instance}/{role}",
        instance,
    )


def assignment_refused(instance: str, role: str | None, cause: str) -> Event:
    """A requested role, cordon or pin was refused."""
    subject = f"{instance} to {role}" if role else instance
    key = f"{instance}/{role}"
    return Event(event_reasons.ASSIGNMENT_REFUSED, WARNING, f"{subject}: {cause}", key, instance)


def instance_failed(instance: str, cause: str) -> Event:
    """An instance failed and does not serve."""
    return Event(event_reasons.INSTANCE_FAILED, WARNING, f"{instance}: {cause}", instance, instance)


def instance_replaced(instance: str) -> Event:
    """An instance whose engine was lost was deleted; its pool creates a new one."""
    return Event(
        event_reasons.INSTANCE_REPLACED, NORMAL, f"{instance} was lost; a new instance replaces it", instance
    )


def pod_deleted_externally(instance: str) -> Event:
    """Somebody else deleted an instance's pod, for example to drain a node."""
    message = f"the pod of {instance} is being deleted by somebody else; a new instance replaces {instance}"
    return Event(event_reasons.POD_DELETED_EXTERNALLY, NORMAL, message, instance, instance)


def scaled(pool: str, before: int, after: int) -> Event:
    """A pool's desired number of instances changed."""
    reason = event_reasons.SCALED_UP if after > before else event_reasons.SCALED_DOWN
    message = f"pool {pool} scaled from {before} to {format_count(after, 'instance')}"
    return Event(reason, NORMAL, message, f"{pool}/{before}/{after}")


def engine_cannot_start(instance: str, reason: str, cause: str) -> Event:
    """An instance's engine cannot start."""
    return Event(reason, WARNING, f"{instance}: {cause}", instance, instance)


def reconcile_failed(cause: FailureCause) -> Event:
    """A reconcile of the service failed and is repeated; `cause` is that of the condition Degraded."""
    return Event(cause.reason, WARNING, f"{cause.message}; retrying", cause.message)


def router_cannot_start(cause: FailureCause) -> Event:
    """A router cannot start."""
    return Event(cause.reason, WARNING, cause.message, cause.identity)


def problem_found(cause: FailureCause) -> Event:
    """An object of the service cannot be made, or a person has to change something."""
    reason = event_reasons.CHILD_APPLY_FAILED if cause.reason == conditions.CHILD_REFUSED else cause.reason
    text = f"{cause.message}; retrying" if cause.reason in _RETRIED else cause.message
    return Event(reason, WARNING, text, cause.message)


def object_unreadable(description: str) -> Event:
    """An object of the service cannot be parsed by this version; `description` names object and field."""
    return Event(event_reasons.OBJECT_UNREADABLE, WARNING, description, description)


@dataclass(frozen=True, slots=True)
class Reported:
    """What the last reconcile of a service observed that has no trace in the stored objects."""

    engines: Mapping[str, EngineObservation] = field(default_factory=dict)
    """Engines by instance."""
    causes: frozenset[str] = frozenset()
    """Identities of the failure causes."""


def remember_reported(observed: Observed) -> Reported:
    """What the next reconcile does not report again."""
    causes = (*find_problems(observed), *observed.router_failures)
    return Reported(dict(observed.engines), frozenset(cause.identity for cause in causes))


def derive_events(before: Observed, plan: Plan, last: Reported) -> tuple[Event, ...]:
    """Derive the Events of one reconcile.

    Args:
        before: State that the plan was made from.
        plan: Plan that was applied.
        last: What the previous reconcile observed.
    """
    return (
        *_role_events(before, plan),
        *_instance_events(before, plan),
        *_pool_events(before, plan),
        *_engine_events(before, last.engines),
        *_condition_events(before, plan),
        *_problem_events(before, last.causes),
    )


def _role_events(before: Observed, plan: Plan) -> Iterator[Event]:
    if plan.accepted_assignment is None or before.assignment is None:
        return
    known = before.accepted_assignment.roles if before.accepted_assignment else {}
    for name, entry in plan.accepted_assignment.roles.items():
        if name in known and known[name].role is not entry.role and entry.by is not Actor.OPERATOR:
            yield role_flipped(name, entry.role, entry.by, entry.reason)
        written = before.assignment.spec.roles.get(name)
        if entry.refused is not None and (written is None or written.refused != entry.refused):
            yield assignment_refused(name, entry.refused.role, entry.refused.reason)


def _instance_events(before: Observed, plan: Plan) -> Iterator[Event]:
    statuses = {instance.metadata.name: instance.status for instance in before.instances}
    for obj in plan.objects:
        if isinstance(obj, PDInstance) and obj.status.phase is Phase.FAILED:
            was = statuses.get(obj.metadata.name)
            if was is not None and was.phase is not Phase.FAILED:
                yield instance_failed(obj.metadata.name, obj.status.message)
    for obj in plan.delete:
        engine = before.engines.get(obj.metadata.name)
        if isinstance(obj, PDInstance) and engine is not None and engine.state is EngineState.LOST:
            yield instance_replaced(obj.metadata.name)


def _pool_events(before: Observed, plan: Plan) -> Iterator[Event]:
    """A pool's spec changed to another number of instances than it has; reported once for each spec."""
    known = {pool.metadata.name: pool for pool in before.pools}
    for pool in plan.objects:
        was = known.get(pool.metadata.name) if isinstance(pool, PDPool) else None
        if was is None or was.status.observed_generation == was.metadata.generation:
            continue
        if was.status.replicas != desired_replicas(was):
            yield scaled(was.metadata.name, was.status.replicas, desired_replicas(was))


def _engine_events(before: Observed, last: Mapping[str, EngineObservation]) -> Iterator[Event]:
    ours = {instance.metadata.name: instance.status.phase for instance in before.instances}
    for name, engine in before.engines.items():
        was = last.get(name)
        if name not in ours:
            continue
        if engine.terminating and engine.state is EngineState.RUNNING and ours[name] is Phase.SERVING:
            if was is not None and not was.terminating:
                yield pod_deleted_externally(name)
        elif engine.reason and (was is None or _start_failure(engine) != _start_failure(was)):
            yield engine_cannot_start(name, engine.reason, engine.message)


def _start_failure(engine: EngineObservation) -> tuple[str, str]:
    """Identity of a start failure; a failure with another identity is reported again.

    It includes the message: the kubelet first reports a timeout, and only then what is missing. Messages of
    image pulls are left out, because two of them alternate.
    """
    return engine.reason, "" if engine.reason == conditions.IMAGE_PULL_FAILED else engine.message


def _problem_events(before: Observed, reported: frozenset[str]) -> Iterator[Event]:
    """Events for the failure causes that the last reconcile did not have."""
    yield from (problem_found(cause) for cause in find_problems(before) if cause.identity not in reported)
    failures = before.router_failures
    yield from (router_cannot_start(cause) for cause in failures if cause.identity not in reported)


def _condition_events(before: Observed, plan: Plan) -> Iterator[Event]:
    previous = {condition.type: condition for condition in before.service.status.conditions}
    for service in plan.objects:
        if isinstance(service, PDService):
            rolled_back = any(c.reason == conditions.ROLLED_BACK for c in service.status.conditions)
            for condition in service.status.conditions:
                known = previous.get(condition.type)
                if condition.type in _REASON_WHEN_FALSE:
                    yield from _status_change_events(known, condition)
                event = _event_for_reasons(known.reason if known else "", condition.reason)
                if event is not None and not (rolled_back and event == _COMPLETED):
                    yield Event(event[0], event[1], condition.message, condition.type)


def _status_change_events(before: Condition | None, now: Condition) -> Iterator[Event]:
    """Events for a condition that became False or, for some types, True again."""
    if now.status == "False" and (before is None or before.reason != now.reason):
        yield Event(_REASON_WHEN_FALSE[now.type], WARNING, now.message, now.type)
    again = now.status == "True" and before is not None and before.status == "False"
    if again and now.type in _REASON_WHEN_TRUE_AGAIN:
        yield Event(_REASON_WHEN_TRUE_AGAIN[now.type], NORMAL, now.message, now.type)


def _event_for_reasons(before: str, now: str) -> tuple[str, str] | None:
    """Event reason and type for a condition's change of reason; None if the change has no Event."""
    paused = conditions.ROLLOUT_PAUSED in (before, now)
    resumed = (before, now) == (conditions.ROLLING_OUT_IN_PLACE, conditions.ROLLOUT_PROGRESSING)
    if before == now or resumed or (paused and (before in _ROLLING_OUT or now in _ROLLING_OUT)):
        return None
    return _EVENT_BY_REASON.get(now) or (_COMPLETED if before in _ROLLING_OUT else None)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The object that an Event is about."""

    kind: str
    meta: ObjectMeta

    @classmethod
    def of(cls, instance: PDInstance) -> Self:
        """The instance as a subject."""
        return cls(PDInstance.kind_name(), instance.metadata)


class EventRecorder:
    """Writes Events: one object for each reason and key, with a count; each service has a budget.

    Args:
        objects: API to write them with.
        clock: Source of their timestamps.
        is_leader: Returns whether this process may write now.
    """

    def __init__(self, objects: ObjectApi, clock: Clock, *, is_leader: Callable[[], bool]) -> None:
        self._objects, self._clock, self._is_leader = objects, clock, is_leader
        self._counts: dict[str, int] = {}
        self._budgets: dict[str, tuple[float, float]] = {}

    async def record(
        self, service: ObjectMeta, events: Iterable[Event], instances: Iterable[PDInstance] = ()
    ) -> None:
        """Write Events about a PDService; an Event that cannot be written is logged and dropped.

        An Event of one of the instances is written about that instance, too.
        """
        subjects = {instance.metadata.name: _Subject.of(instance) for instance in instances}
        about_service = _Subject(PDService.kind_name(), service)
        for event in events:
            _log.info("event", service=service.name, reason=event.reason, message=event.message)
            if not self._spend_budget(service.uid):
                continue
            try:
                check_is_leader(self._is_leader)
                await self._write(about_service, event)
                if event.instance in subjects:
                    await self._write(subjects[event.instance], event)
            except FulcrumError as error:
                _log.warning("event not written", reason=event.reason, error=str(error))

    def _spend_budget(self, service: str) -> bool:
        """Spend one Event of the service's budget: `_BURST` at first, one more each `_REFILL_S` seconds."""
        now_s = self._clock.monotonic_s()
        left, at_s = self._budgets.pop(service, (float(_BURST), now_s))
        if len(self._budgets) >= _REMEMBERED_MAX:
            del self._budgets[next(iter(self._budgets))]
        left = min(_BURST, left + (now_s - at_s) / _REFILL_S)
        self._budgets[service] = (left - 1 if left >= 1 else left, now_s)
        return left >= 1

    async def _write(self, subject: _Subject, event: Event) -> None:
        name = event_name(subject.meta, event)
        now = format_time(self._clock.now_s())
        count = self._counts.get(name)
        if count is None:
            count = await self._create(subject, name, event, now)
        else:
            count = await self._increment_count(subject, name, event, now, count)
        if len(self._counts) >= _REMEMBERED_MAX:
            self._counts.pop(next(iter(self._counts)))
        self._counts[name] = count

    async def _create(self, subject: _Subject, name: str, event: Event, now: str) -> int:
        namespace = subject.meta.namespace
        try:
            await self._objects.create(EVENT, _body(subject, name, event, now), namespace=namespace)
        except AlreadyExists:
            existing = await self._objects.get(EVENT, name, namespace=namespace)
            return await self._increment_count(subject, name, event, now, existing.get("count", 1))
        return 1

    async def _increment_count(self, subject: _Subject, name: str, event: Event, now: str, count: int) -> int:
        patch = {
            "count": count + 1,
            "lastTimestamp": _seconds(now),
            "message": event.message[:_MESSAGE_LENGTH_MAX],
        }
        try:
            await self._objects.patch(EVENT, name, patch, namespace=subject.meta.namespace)
        except NotFound:  # the API server deletes Events after an hour
            await self._objects.create(
                EVENT, _body(subject, name, event, now), namespace=subject.meta.namespace
            )
            return 1
        return count + 1


def event_name(about: ObjectMeta, event: Event) -> str:
    """Name of the Event's object: equal for a repeated Event, also after a change of leader."""
    text = f"{about.uid}/{event.reason}/{event.key}"
    return f"{about.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _body(subject: _Subject, name: str, event: Event, now: str) -> Object:
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": name, "namespace": subject.meta.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": subject.kind,
            "name": subject.meta.name,
            "namespace": subject.meta.namespace,
            "uid": subject.meta.uid,
        },
        "reason": event.reason,
        "type": event.type,
        "message": event.message[:_MESSAGE_LENGTH_MAX],
        "count": 1,
        "firstTimestamp": _seconds(now),
        "lastTimestamp": _seconds(now),
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
    }


def _seconds(at: str) -> str:
    """A timestamp without fraction, as `metav1.Time` requires."""
    return f"{at.partition('.')[0]}Z"
