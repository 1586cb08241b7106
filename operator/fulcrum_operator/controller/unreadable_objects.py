"""Services with objects that this version cannot parse are reported and not reconciled.

An object that was stored before an upgrade can break the rules of the new version. Reconciling without it
would stop engines whose PDInstance, or whose whole PDService, only seems to be deleted.
"""

from collections.abc import Awaitable, Callable, Sequence

from fulcrum_core.api import ObjectMeta, PDService
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.events import Event, object_unreadable


class UnreadableObjects:
    """Unreadable objects of each service, reported once as Events.

    Args:
        cache: Knows the unreadable objects.
        record: Writes Events about a PDService.
    """

    def __init__(
        self, cache: ObjectCache, record: Callable[[ObjectMeta, Sequence[Event]], Awaitable[None]]
    ) -> None:
        self._cache, self._record = cache, record
        self._reported: dict[ServiceKey, tuple[str, ...]] = {}

    async def blocks_reconcile(self, key: ServiceKey) -> bool:
        """Whether an object of the service was never readable, so that the service must not be reconciled.

        An object that was readable before does not block: its last readable version is used. Neither does a
        QoSTier: a missing tier has a condition of its own. New unreadable objects are reported as Events.
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
        if new and meta is not None:
            await self._record(meta, new)
        return any(
            self._cache.get_resource(each.kind, each.namespace, each.name) is None
            for each in found
            if each.service is not None
        )
