"""Objects that this version cannot read: told once, and never taken for objects that are not there.

An API server refuses what breaks the rules of its CRDs, but rules change with a version, and what was stored
before stays. To act on half a picture would end engines whose PDInstance, or whose whole service, seems to be
gone.
"""

from collections.abc import Awaitable, Callable, Sequence

from fulcrum_core.api import ObjectMeta, PDService
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.events import Event, object_unreadable
from fulcrum_operator.controller.reconcile import ServiceKey


class Unread:
    """What cannot be read of each service.

    Args:
        cache: Where that is known.
        tell: Writes Events about a PDService.
    """

    def __init__(self, cache: Cache, tell: Callable[[ObjectMeta, Sequence[Event]], Awaitable[None]]) -> None:
        self._cache, self._tell = cache, tell
        self._told: dict[ServiceKey, tuple[str, ...]] = {}

    async def hides(self, key: ServiceKey) -> bool:
        """Whether so much of a service is hidden that nothing may be done to it.

        What was read once stands as it was, and hides nothing; a tier is missed by its own condition.
        """
        found = self._cache.unreadable(key)
        told, words = self._told.pop(key, ()), tuple(each.words for each in found)
        if words:
            self._told[key] = words
        about = self._cache.resource(PDService, *key)
        meta = (
            about.metadata if about else next((each.meta for each in found if each.kind is PDService), None)
        )
        new = [object_unreadable(each) for each in words if each not in told]
        if new and meta is not None:
            await self._tell(meta, new)
        return any(
            self._cache.resource(each.kind, each.namespace, each.name) is None
            for each in found
            if each.service is not None
        )
