"""Store of the reconcile loop: reads come from the object cache, writes go to the API server.

Only the leader writes. `create` and the patches leave out fields that the API server's CRDs lack
(`missing_fields`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fulcrum_cluster.objects import ObjectApi, kind_of_resource
from fulcrum_core.api import PDPool, Resource
from fulcrum_core.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    NamespaceNotFound,
    NotFound,
    StoreUnavailable,
)
from fulcrum_core.ports import Listing, Store, WatchEvent
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.missing_fields import UNKNOWN_FIELD, MissingFields

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

    The result of a write is in the cache before the call returns. If `create` or a patch fails because the
    cache is stale, the object is read again and `Conflict` is raised: reconcile again.

    Args:
        store: The API server.
        cache: Source of all reads.
        is_leader: Returns whether this process may write now.
        objects: Creates objects without the fields that the API server lacks; None: its CRDs are current.
    """

    def __init__(
        self,
        store: Store,
        cache: ObjectCache,
        is_leader: Callable[[], bool],
        *,
        objects: ObjectApi | None = None,
    ) -> None:
        self._store, self._cache, self._is_leader, self._objects = store, cache, is_leader, objects
        self.missing_fields = MissingFields()

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
            return self._cache_result(await self._create(obj))
        except AlreadyExists as error:
            await self._refresh(type(obj), obj.metadata.namespace, obj.metadata.name)
            raise Conflict(str(error)) from error

    async def apply(self, obj: R, *, manager: str) -> R:
        """See `Store`; with all fields, also those that the CRDs lack."""
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

        async def write(known: Mapping[str, Any]) -> R:
            if not known:
                return await self.get(kind, name, namespace=namespace)
            return await self._store.patch(
                kind, name, known, namespace=namespace, resource_version=resource_version
            )

        return await self._write_through(kind, namespace, name, patch, write)

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

        async def write(known: Mapping[str, Any]) -> R:
            if not known:
                return await self.get(kind, name, namespace=namespace)
            planned = await self.get(kind, name, namespace=namespace)
            try:
                return await self._store.patch_status(
                    kind, name, known["status"], namespace=namespace, resource_version=resource_version
                )
            except NamespaceNotFound:  # says nothing about the kind
                raise
            except NotFound:
                found = await self._store.get(kind, name, namespace=namespace)
                if found.metadata.uid != planned.metadata.uid:  # deleted and created again meanwhile
                    raise
                # The object is there, so the subresource is not: the CRDs are older.
                raise InvalidInput("status", None, UNKNOWN_FIELD) from None

        return await self._write_through(kind, namespace, name, {"status": patch}, write)

    async def delete(self, kind: type[R], name: str, *, namespace: str, uid: str | None = None) -> None:
        """See `Store`."""
        check_is_leader(self._is_leader)
        try:
            await self._store.delete(kind, name, namespace=namespace, uid=uid)
        except (Conflict, NotFound):
            await self._refresh(kind, namespace, name)
            raise
        await self._refresh(kind, namespace, name)

    async def _create(self, obj: R) -> R:
        kind, document = type(obj), {key: part for key, part in obj.dump().items() if key != "status"}

        async def create(known: Mapping[str, Any]) -> R:
            if self._objects is None or known == document:
                return await self._store.create(obj)
            body = await self._objects.create(kind_of_resource(kind), known, namespace=obj.metadata.namespace)
            return kind.model_validate(body, extra="ignore")

        return await self._without_missing_fields(kind, document, create)

    async def _write_through(
        self,
        kind: type[R],
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        write: Callable[[Mapping[str, Any]], Awaitable[R]],
    ) -> R:
        check_is_leader(self._is_leader)
        try:
            return self._cache_result(await self._without_missing_fields(kind, patch, write))
        except NamespaceNotFound:  # not a Conflict, which would be tried again at once
            raise
        except (Conflict, NotFound) as error:
            await self._refresh(kind, namespace, name)
            raise Conflict(str(error)) from error

    async def _without_missing_fields(
        self, kind: type[R], document: Mapping[str, Any], write: Callable[[Mapping[str, Any]], Awaitable[R]]
    ) -> R:
        """Write the document without the fields that the CRDs lack, as refusals show them.

        The revision of instances follows from the spec of their pool, so a pool must be planned again without
        a missing field: `Conflict`.
        """
        while True:
            known = self.missing_fields.prune(kind, document)
            try:
                result = await write(known)
            except InvalidInput as error:
                if self._objects is None or not self.missing_fields.note(kind, error):
                    raise
                if kind is PDPool and error.path.startswith("spec."):
                    raise Conflict(f"the CRDs lack {error.path}") from error
                continue
            self.missing_fields.note_accepted(kind, known)
            return result

    def _cache_result(self, obj: R) -> R:
        self._cache.put_resource(obj)
        return obj

    async def _refresh(self, kind: type[R], namespace: str, name: str) -> None:
        """Read the object into the cache; an object that waits for its finalizers still exists."""
        try:
            self._cache.put_resource(await self._store.get(kind, name, namespace=namespace))
        except NotFound:
            self._cache.remove(kind_of_resource(kind), namespace, name)
