"""Services with objects that this version cannot parse are reported and not reconciled.

An object that was stored before an upgrade can break the rules of the new version. Reconciling without it
would stop engines whose PDInstance, or whose whole PDService, only seems to be deleted. `leader` asks before
it reconciles a service.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from fulcrum_cluster.objects import Object, ObjectApi, kind_of_resource
from fulcrum_core.api import Condition, ObjectMeta, PDService, conditions
from fulcrum_core.errors import FulcrumError
from fulcrum_core.ports import Clock
from fulcrum_operator.controller.apply import MESSAGE_LENGTH_MAX
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import check_is_leader
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.events import Event, object_unreadable
from fulcrum_operator.plan.observed import FailureCause
from fulcrum_operator.plan.status.degraded import with_failed_reconcile

_SERVICE = kind_of_resource(PDService)

_log = structlog.get_logger()


class UnreadableObjects:
    """Unreadable objects of each service, reported once.

    They are reported as Events, and in the condition Degraded if they stop the service's reconcile.

    Args:
        cache: Knows the unreadable objects.
        record: Writes Events about a PDService.
        objects: API to write the condition with, also into a PDService that cannot be parsed.
        clock: Source of the condition's time.
        is_leader: Returns whether this process may write now.
    """

    def __init__(
        self,
        cache: ObjectCache,
        record: Callable[[ObjectMeta, Sequence[Event]], Awaitable[None]],
        objects: ObjectApi,
        clock: Clock,
        *,
        is_leader: Callable[[], bool],
    ) -> None:
        self._cache, self._record, self._objects, self._clock = cache, record, objects, clock
        self._is_leader = is_leader
        self._reported: dict[ServiceKey, tuple[str, ...]] = {}

    async def blocks_reconcile(self, key: ServiceKey) -> bool:
        """Whether an object of the service was never readable, so that the service must not be reconciled.

        An object that was readable before does not block: its last readable version is used. Neither does a
        QoSTier: a missing tier has a condition of its own. New unreadable objects are reported.
        """
        found = self._cache.unreadable_objects(key)
        reported, descriptions = self._reported.pop(key, ()), tuple(each.description for each in found)
        if descriptions:
            self._reported[key] = descriptions
        about = self._cache.get_resource(PDService, *key)
        meta = (
            about.metadata if about else next((each.meta for each in found if each.kind is PDService), None)
        )
        new = [object_unreadable(each) for each in descriptions if each not in reported]
        blocking = [
            each.description
            for each in found
            if each.service is not None
            and self._cache.get_resource(each.kind, each.namespace, each.name) is None
        ]
        if new and meta is not None:
            if blocking:
                await self._report(key, blocking)
            await self._record(meta, new)
        return bool(blocking)

    async def _report(self, key: ServiceKey, descriptions: Sequence[str]) -> None:
        """Write the condition Degraded; the next reconcile replaces it."""
        text = f"{'; '.join(descriptions)}; the service is not changed until this is repaired"
        cause = FailureCause(conditions.RECONCILE_FAILED, text[:MESSAGE_LENGTH_MAX])
        try:
            check_is_leader(self._is_leader)
            body = await self._objects.get(_SERVICE, key.name, namespace=key.namespace)
            made = with_failed_reconcile(
                tuple(_parse_conditions(body)),
                cause,
                generation=body["metadata"].get("generation", 0),
                now_s=self._clock.now_s(),
            )
            patch = {"status": {"conditions": [condition.dump() for condition in made]}}
            await self._objects.patch(
                _SERVICE, key.name, patch, namespace=key.namespace, subresource="status"
            )
        except FulcrumError as error:
            _log.warning("unreadable object not reported", service=str(key), error=str(error))


def _parse_conditions(body: Object) -> Iterator[Condition]:
    """The readable conditions of a service that may be unreadable itself."""
    status = body.get("status")
    found: Iterable[Any] = (status.get("conditions") or ()) if isinstance(status, dict) else ()
    for condition in found:
        try:
            yield Condition.model_validate(condition, extra="ignore")
        except ValidationError:
            continue
