"""Store of the reconcile loop: reads come from the object cache, writes go to the API server."""

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
    """This process must not write: another process is, or may be by now, the leader."""

    def __init__(self) -> None:
        super().__init__("this operator is not the leader")


def check_is_leader(is_leader: Callable[[], bool]) -> None:
    """Raise `NotLeader` unless this process is the leader."""
    if not is_leader():
        raise NotLeader


class CachedStore:
    """`fulcrum_core.ports.Store` of the leader.

    The result of a write is in the cache before the call returns. If a write fails because the cache is
    stale, the object is read again and `Conflict` is raised: reconcile again.

    Args:
        store: The API server.
        cache: Source of all reads.
        is_leader: Returns whether this process may write now.
    """

    def __init__(self, store: Store, cache: ObjectCache, is_leader: Callable[[], bool]) -> None:
        self._store, self._cache, self._is_leader = store, cache, is_leader

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        """See `Store`; from the cache."""
        found = self._cache.get_resource(kind, namespace, name)
        if found is None:
            raise NotFound(f'{kind.plural} "{name}" not found')
        return found

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """See `Store`; from the cache, so the list has no resource version."""
        return Listing(self._cache.list_resources(kind, namespace), "")

    def watch(self, kind: type[R], *, namespace: str, since: str) -> AsyncIterator[WatchEvent[R]]:
        """See `Store`; from the API server."""
        return self._store.watch(kind, namespace=namespace, since=since)

    async def create(self, obj: R) -> R:
        """See `Store`; raises `Conflict` if the object exists and was not in the cache."""
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
        """Read the object into the cache; an object that waits for its finalizers still exists."""
        try:
            self._cache.put_resource(await self._store.get(kind, name, namespace=namespace))
        except NotFound:
            self._cache.remove(kind_of_resource(kind), namespace, name)
