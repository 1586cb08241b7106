"""Objects that this version cannot read: told once, and never taken for objects that are not there.

An API server refuses what breaks the rules of its CRDs, but rules change with a version, and what was stored
before stays. To act on half a picture would end engines whose PDInstance, or whose whole service, seems to be
gone.
"""

from collections.abc import Awaitable, Callable, Sequence

from fulcrum_core.api import ObjectMeta, PDService
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.events import Event, object_unreadable
from fulcrum_operator.controller.reconcile import ServiceKey


class UnreadableObjects:
    """What cannot be read of each service.

    Args:
        cache: Where that is known.
        record: Writes Events about a PDService.
    """

    def __init__(
        self, cache: ObjectCache, record: Callable[[ObjectMeta, Sequence[Event]], Awaitable[None]]
    ) -> None:
        self._cache, self._record = cache, record
        self._reported: dict[ServiceKey, tuple[str, ...]] = {}

    async def blocks_reconcile(self, key: ServiceKey) -> bool:
        """Whether so much of a service is hidden that nothing may be done to it.

        What was read once stands as it was, and hides nothing; a tier is missed by its own condition.
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
