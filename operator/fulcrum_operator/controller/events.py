"""Kubernetes Events: what a pass changed, told once, in words, on the PDService.

What happened follows from the picture that a pass started from and the plan that it made: pure. Nothing is
told of what only goes on; a change that repeats is one Event whose count grows.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog

from fulcrum_cluster.objects import EVENT, Object, ObjectApi
from fulcrum_core.api import Condition, ObjectMeta, PDInstance, PDPool, PDService
from fulcrum_core.api import conditions as words
from fulcrum_core.api.meta import API_VERSION, format_time
from fulcrum_core.errors import AlreadyExists, FulcrumError, NotFound
from fulcrum_core.models import MODEL_UNKNOWN
from fulcrum_core.ports import Clock, EngineObservation, EngineState
from fulcrum_core.spelling import format_count
from fulcrum_core.values import Actor, Phase
from fulcrum_operator.controller.cached_store import check_leading
from fulcrum_operator.controller.ownership import MANAGER
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.pools import wanted_replicas
from fulcrum_operator.plan.status.degraded import hindrance_reason

NORMAL, WARNING = "Normal", "Warning"

_LONGEST = 1000
_REMEMBERED = 1000
_BURST = 25
_EVERY_S = 5.0
_COMPLETED = ("RolloutCompleted", NORMAL)
_REASONS = {
    words.TIER_NOT_FOUND: ("TierMissing", WARNING),
    words.ROLLOUT_PROGRESSING: ("RolloutStarted", NORMAL),
    words.ROLLED_BACK: ("RolledBack", WARNING),
    words.FLOORS_TOO_HIGH: ("FloorsTooHigh", WARNING),
    MODEL_UNKNOWN: ("ModelNotRead", WARNING),
    **dict.fromkeys(
        (words.FLOORS_HOLD, words.TOO_MANY_REPLICAS, words.TOO_FEW_REPLICAS), ("ScalingLimited", WARNING)
    ),
}
"""Reasons of a service's conditions that are worth an Event when they come."""
_WHEN_FALSE = {
    words.KV_TRANSFER_VERIFIED: "KVTransferNotVerified",
    words.MODEL_FITS: "ModelDoesNotFit",
}
"""Conditions that are told whenever they are False for another reason than before."""
_WHEN_TRUE_AGAIN = {words.KV_TRANSFER_VERIFIED: "KVTransferVerified"}
"""Those of them that are told, too, when they are True after they were False."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a service. Two of one `key` are the same thing again."""

    reason: str
    type: str
    message: str
    key: str


def role_flipped(instance: str, role: str, by: str, why: str) -> Event:
    """An instance's role was changed by somebody's wish."""
    said = f" ({why})" if why else ""
    return Event("RoleFlipped", NORMAL, f"{instance} to {role} by {by}{said}", f"{instance}/{role}")


def wish_refused(instance: str, role: str | None, why: str) -> Event:
    """A wished role was turned down, or another change, as a cordon or a pin."""
    said = f"{instance} to {role}" if role else instance
    return Event("WishRefused", WARNING, f"{said}: {why}", f"{instance}/{role}")


def instance_failed(instance: str, why: str) -> Event:
    """An instance does not serve any more."""
    return Event("InstanceFailed", WARNING, f"{instance}: {why}", instance)


def instance_replaced(instance: str) -> Event:
    """An instance whose engine will not come back was taken away; another one takes its place."""
    return Event("InstanceReplaced", NORMAL, f"{instance} is replaced by a new instance", instance)


def reclaimed_for_drain(instance: str) -> Event:
    """Somebody ends an instance's pod (a node is drained); another one takes its place."""
    message = f"the pod of {instance} is ended by somebody else; a new instance takes its place"
    return Event("ReclaimedForDrain", NORMAL, message, instance)


def scaled(pool: str, before: int, after: int) -> Event:
    """A pool has more or fewer instances."""
    reason = "ScaledUp" if after > before else "ScaledDown"
    message = f"pool {pool} from {before} to {format_count(after, 'instance')}"
    return Event(reason, NORMAL, message, f"{pool}/{before}/{after}")


def engine_hindered(instance: str, reason: str, why: str) -> Event:
    """Something keeps an instance's engine from starting."""
    return Event(reason, WARNING, f"{instance}: {why}", instance)


def child_refused(why: str) -> Event:
    """The API server refuses something that the service needs: by a quota, a webhook, for want of a right."""
    message = f"what stands around the engines cannot be made: {why}; tried again every few seconds"
    return Event("ChildRefused", WARNING, message, why)


def object_unreadable(words: str) -> Event:
    """An object of the service is not as this version knows it; the words name it and the field."""
    return Event("ObjectUnreadable", WARNING, words, words)


def events_of(before: Observed, plan: Plan, last: dict[str, EngineObservation]) -> tuple[Event, ...]:
    """What the pass from `before` by `plan` changed.

    Args:
        before: The picture that the plan was made from.
        plan: What shall be.
        last: The engines as the pass before saw them.
    """
    return (
        *_of_roles(before, plan),
        *_of_instances(before, plan),
        *_of_pools(before, plan),
        *_of_engines(before, last),
        *_of_conditions(before, plan),
    )


def _of_roles(before: Observed, plan: Plan) -> Iterator[Event]:
    if plan.accepted is None or before.assignment is None:
        return
    known = before.accepted.roles if before.accepted else {}
    for name, entry in plan.accepted.roles.items():
        if name in known and known[name].role is not entry.role and entry.by is not Actor.OPERATOR:
            yield role_flipped(name, entry.role, entry.by, entry.reason)
        told = before.assignment.spec.roles.get(name)
        if entry.refused is not None and (told is None or told.refused != entry.refused):
            yield wish_refused(name, entry.refused.role, entry.refused.reason)


def _of_instances(before: Observed, plan: Plan) -> Iterator[Event]:
    stood = {instance.metadata.name: instance.status for instance in before.instances}
    for obj in plan.objects:
        if isinstance(obj, PDInstance) and obj.status.phase is Phase.FAILED:
            was = stood.get(obj.metadata.name)
            if was is not None and was.phase is not Phase.FAILED:
                yield instance_failed(obj.metadata.name, obj.status.message)
    for obj in plan.delete:
        engine = before.engines.get(obj.metadata.name)
        if isinstance(obj, PDInstance) and engine is not None and engine.state is EngineState.LOST:
            yield instance_replaced(obj.metadata.name)


def _of_pools(before: Observed, plan: Plan) -> Iterator[Event]:
    """A pool was asked for another number than it has: told when that is first seen."""
    known = {pool.metadata.name: pool for pool in before.pools}
    for pool in plan.objects:
        was = known.get(pool.metadata.name) if isinstance(pool, PDPool) else None
        if was is None or was.status.observed_generation == was.metadata.generation:
            continue
        if was.status.replicas != wanted_replicas(was):
            yield scaled(was.metadata.name, was.status.replicas, wanted_replicas(was))


def _of_engines(before: Observed, last: dict[str, EngineObservation]) -> Iterator[Event]:
    ours = {instance.metadata.name: instance.status.phase for instance in before.instances}
    for name, engine in before.engines.items():
        was = last.get(name)
        if name not in ours:
            continue
        if engine.ending and engine.state is EngineState.RUNNING and ours[name] is Phase.SERVING:
            if was is not None and not was.ending:
                yield reclaimed_for_drain(name)
        elif (reason := hindrance_reason(engine)) and (was is None or _hindrance(engine) != _hindrance(was)):
            yield engine_hindered(name, reason, engine.message)


def _hindrance(engine: EngineObservation) -> tuple[str | None, str]:
    """What keeps an engine from starting; told again when this changes.

    The words belong to it: a kubelet says first what it waited for in vain, and only then what is missing.
    But an image that does not pull has two messages that take turns for ever; the first one says it all.
    """
    reason = hindrance_reason(engine)
    return reason, "" if reason == words.IMAGE_PULL_FAILED else engine.message


def _of_conditions(before: Observed, plan: Plan) -> Iterator[Event]:
    stood = {condition.type: condition for condition in before.service.status.conditions}
    for service in plan.objects:
        if isinstance(service, PDService):
            back = any(c.reason == words.ROLLED_BACK for c in service.status.conditions)
            for condition in service.status.conditions:
                known = stood.get(condition.type)
                if condition.type in _WHEN_FALSE:
                    yield from _of_finding(known, condition)
                told = _told(known.reason if known else "", condition.reason)
                if told is not None and not (back and told == _COMPLETED):
                    yield Event(told[0], told[1], condition.message, condition.type)


def _of_finding(before: Condition | None, now: Condition) -> Iterator[Event]:
    """What is wrong, and that it is right again."""
    if now.status == "False" and (before is None or before.reason != now.reason):
        yield Event(_WHEN_FALSE[now.type], WARNING, now.message, now.type)
    again = now.status == "True" and before is not None and before.status == "False"
    if again and now.type in _WHEN_TRUE_AGAIN:
        yield Event(_WHEN_TRUE_AGAIN[now.type], NORMAL, now.message, now.type)


def _told(before: str, now: str) -> tuple[str, str] | None:
    """What the change of a condition's reason is called; None if it is not told."""
    paused = words.ROLLOUT_PAUSED in (before, now)
    if before == now or (paused and words.ROLLOUT_PROGRESSING in (before, now)):
        return None
    return _REASONS.get(now) or (_COMPLETED if before == words.ROLLOUT_PROGRESSING else None)


class Recorder:
    """Writes Events: one object for each key, whose count grows; at most a few at a time for a service.

    Args:
        objects: Where they go.
        clock: When things happened.
        leads: Whether this process may write now.
    """

    def __init__(self, objects: ObjectApi, clock: Clock, *, leads: Callable[[], bool]) -> None:
        self._objects, self._clock, self._leads = objects, clock, leads
        self._counts: dict[str, int] = {}
        self._budgets: dict[str, tuple[float, float]] = {}

    async def tell(self, service: ObjectMeta, events: Iterable[Event]) -> None:
        """Write them about that PDService. What cannot be written is logged and lost: nobody needs it."""
        for event in events:
            _log.info("event", service=service.name, reason=event.reason, message=event.message)
            if not self._may(service.uid):
                continue
            try:
                check_leading(self._leads)
                await self._write(service, event)
            except FulcrumError as error:
                _log.warning("event not written", reason=event.reason, error=str(error))

    def _may(self, service: str) -> bool:
        """A budget of `_BURST` Events, and one more each `_EVERY_S`."""
        now_s = self._clock.monotonic_s()
        left, at_s = self._budgets.pop(service, (float(_BURST), now_s))
        if len(self._budgets) >= _REMEMBERED:
            del self._budgets[next(iter(self._budgets))]
        left = min(_BURST, left + (now_s - at_s) / _EVERY_S)
        self._budgets[service] = (left - 1 if left >= 1 else left, now_s)
        return left >= 1

    async def _write(self, service: ObjectMeta, event: Event) -> None:
        name = event_name(service, event)
        now = format_time(self._clock.now_s())
        count = self._counts.get(name)
        if count is None:
            count = await self._create(service, name, event, now)
        else:
            count = await self._again(service, name, event, now, count)
        if len(self._counts) >= _REMEMBERED:
            self._counts.pop(next(iter(self._counts)))
        self._counts[name] = count

    async def _create(self, service: ObjectMeta, name: str, event: Event, now: str) -> int:
        namespace = service.namespace
        try:
            await self._objects.create(EVENT, _body(service, name, event, now), namespace=namespace)
        except AlreadyExists:
            told = await self._objects.get(EVENT, name, namespace=namespace)
            return await self._again(service, name, event, now, told.get("count", 1))
        return 1

    async def _again(self, service: ObjectMeta, name: str, event: Event, now: str, count: int) -> int:
        patch = {"count": count + 1, "lastTimestamp": _seconds(now), "message": event.message[:_LONGEST]}
        try:
            await self._objects.patch(EVENT, name, patch, namespace=service.namespace)
        except NotFound:  # events live for an hour
            await self._objects.create(EVENT, _body(service, name, event, now), namespace=service.namespace)
            return 1
        return count + 1


def event_name(service: ObjectMeta, event: Event) -> str:
    """The same for the same thing, whichever operator tells it."""
    text = f"{service.uid}/{event.reason}/{event.key}"
    return f"{service.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _body(service: ObjectMeta, name: str, event: Event, now: str) -> Object:
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": name, "namespace": service.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": PDService.kind_name(),
            "name": service.name,
            "namespace": service.namespace,
            "uid": service.uid,
        },
        "reason": event.reason,
        "type": event.type,
        "message": event.message[:_LONGEST],
        "count": 1,
        "firstTimestamp": _seconds(now),
        "lastTimestamp": _seconds(now),
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
    }


def _seconds(at: str) -> str:
    """Without the fraction: `metav1.Time`."""
    return f"{at.partition('.')[0]}Z"
