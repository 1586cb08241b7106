"""The store as a pass sees it: read from the cache, written through to the API server."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fulcrum_cluster.objects import kind_of_resource
from fulcrum_core.api import Resource
from fulcrum_core.errors import AlreadyExists, Conflict, NotFound, StoreUnavailable
from fulcrum_core.ports import Listing, Store, WatchEvent
from fulcrum_operator.controller.cache import ObjectCache

R = TypeVar("R", bound=Resource)


class NotLeader(StoreUnavailable):
    """This process may not write: another one leads, or may do so by now."""

    def __init__(self) -> None:
        super().__init__("this operator does not lead")


def check_is_leader(is_leader: Callable[[], bool]) -> None:
    """Raise `NotLeader` unless this process leads now."""
    if not is_leader():
        raise NotLeader


class CachedStore:
    """`fulcrum_core.ports.Store` for one pass after the other.

    The answers to its own writes are in the cache before a write returns. A write that is refused because
    the cache is behind has it catch up with that object and raises `Conflict`: look again.

    Args:
        store: Where writes go.
        cache: What is read.
        is_leader: Whether this process may write now.
    """

    def __init__(self, store: Store, cache: ObjectCache, is_leader: Callable[[], bool]) -> None:
        self._store, self._cache, self._is_leader = store, cache, is_leader

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        """The object as last heard of, or `NotFound`."""
        found = self._cache.get_resource(kind, namespace, name)
        if found is None:
            raise NotFound(f'{kind.plural} "{name}" not found')
        return found

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """All objects as last heard of; there is no one version of them."""
        return Listing(self._cache.list_resources(kind, namespace), "")

    def watch(self, kind: type[R], *, namespace: str, since: str) -> AsyncIterator[WatchEvent[R]]:
        """Straight from the store."""
        return self._store.watch(kind, namespace=namespace, since=since)

    async def create(self, obj: R) -> R:
        """See `Store`; `Conflict` if there is one that was not known."""
        check_is_leader(self._is_leader)
        try:
            return self._cache_result(await self._store.create(obj))
        except AlreadyExists as error:
            await self._refresh(type(obj), obj.metadata.namespace, obj.metadata.name)
            raise Conflict(str(error)) from error

    async def apply(self, obj: R, *, manager: str) -> R:
        """See `Store`."""
        check_is_leader(self._is_leader)
        return self._cache_result(await self._store.apply(obj, manager=manager))

    async def patch(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """See `Store`."""
        change = partial(self._store.patch, kind, name, patch, resource_version=resource_version)
        return await self._write_through(kind, namespace, name, change)

    async def patch_status(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """See `Store`."""
        change = partial(self._store.patch_status, kind, name, patch, resource_version=resource_version)
        return await self._write_through(kind, namespace, name, change)

    async def delete(self, kind: type[R], name: str, *, namespace: str, uid: str | None = None) -> None:
        """See `Store`."""
        check_is_leader(self._is_leader)
        try:
            await self._store.delete(kind, name, namespace=namespace, uid=uid)
        except (Conflict, NotFound):
            await self._refresh(kind, namespace, name)
            raise
        await self._refresh(kind, namespace, name)

    async def _write_through(
        self, kind: type[R], namespace: str, name: str, change: Callable[..., Awaitable[R]]
    ) -> R:
        check_is_leader(self._is_leader)
        try:
            return self._cache_result(await change(namespace=namespace))
        except (Conflict, NotFound) as error:
            await self._refresh(kind, namespace, name)
            raise Conflict(str(error)) from error

    def _cache_result(self, obj: R) -> R:
        self._cache.put_resource(obj)
        return obj

    async def _refresh(self, kind: type[R], namespace: str, name: str) -> None:
        """Have the cache know how the object stands now; one that ends in the foreground is still there."""
        try:
            self._cache.put_resource(await self._store.get(kind, name, namespace=namespace))
        except NotFound:
            self._cache.remove(kind_of_resource(kind), namespace, name)
