"""In-memory fake of the Kubernetes API that a router uses (`ObjectApi`); a test can make it unavailable."""

# ruff: noqa: ARG002  # the signatures are ObjectApi's

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from fulcrum_cluster.objects import Object, ObjectKind
from fulcrum_core.errors import Conflict, Forbidden, Gone, NotFound, StoreUnavailable
from fulcrum_core.merge_patch import apply_merge_patch
from fulcrum_core.ports import EventType


class FakeObjectApi:
    """A `fulcrum_cluster.objects.ObjectApi` that refuses the calls that a router must never make."""

    def __init__(self) -> None:
        self.unavailable = False
        self.internal_error: Exception | None = None
        """Raised by the next `get`, once: stands for a bug of the router."""
        self.lists = 0
        """Calls of `list`, also those refused while unavailable."""
        self.writes: list[tuple[str, str]] = []
        """Kind and name of each object written, in order."""
        self._version = 0
        self._objects: dict[tuple[str, str], Object] = {}
        self._watches: set[asyncio.Queue[tuple[EventType, Object] | Gone]] = set()

    def put(self, kind: str, name: str, **fields: Any) -> None:
        """Create or replace an object."""
        self._version += 1
        metadata = {**fields.pop("metadata", {}), "name": name, "resourceVersion": str(self._version)}
        known = (kind, name) in self._objects
        self._objects[kind, name] = {"kind": kind, "metadata": metadata, **fields}
        self._publish(EventType.MODIFIED if known else EventType.ADDED, self._objects[kind, name])

    def remove(self, kind: str, name: str) -> None:
        """Delete an object."""
        self._version += 1
        deleted = self._objects.pop((kind, name))
        deleted["metadata"]["resourceVersion"] = str(self._version)
        self._publish(EventType.DELETED, deleted)

    def peek(self, kind: str, name: str) -> Object:
        """Return the current object, also while the API server is unavailable."""
        return copy.deepcopy(self._objects[kind, name])

    def expire_watches(self) -> None:
        """End all watches with 410 Gone: the next one must list again."""
        for queue in self._watches:
            queue.put_nowait(Gone("too old"))

    def _publish(self, event: EventType, body: Object) -> None:
        for queue in self._watches:
            queue.put_nowait((event, copy.deepcopy(body)))

    def _check_available(self) -> None:
        if self.unavailable:
            raise StoreUnavailable("unavailable")

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        self._check_available()
        if self.internal_error is not None:
            error, self.internal_error = self.internal_error, None
            raise error
        if (kind.kind, name) not in self._objects:
            raise NotFound(name)
        return copy.deepcopy(self._objects[kind.kind, name])

    async def list(
        self,
        kind: ObjectKind,
        *,
        namespace: str,
        labels: str = "",
        fields: str = "",
        keep: Callable[[Object], Object] | None = None,
    ) -> tuple[list[Object], str]:
        assert keep is None
        self.lists += 1
        self._check_available()
        found = [copy.deepcopy(body) for (of, _), body in sorted(self._objects.items()) if of == kind.kind]
        return found, str(self._version)

    async def watch(
        self,
        kind: ObjectKind,
        *,
        namespace: str,
        since: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[tuple[EventType, Object], None]:
        self._check_available()
        queue: asyncio.Queue[tuple[EventType, Object] | Gone] = asyncio.Queue()
        self._watches.add(queue)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, Gone):
                    raise event
                if event[1]["kind"] == kind.kind:
                    yield event
        finally:
            self._watches.discard(queue)

    async def patch(
        self,
        kind: ObjectKind,
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
        subresource: str = "",
    ) -> Object:
        found = await self.get(kind, name, namespace=namespace)
        if resource_version not in (None, found["metadata"]["resourceVersion"]):
            raise Conflict(name)
        self.writes.append((kind.kind, name))
        merged = apply_merge_patch(found, patch)
        self.put(kind.kind, name, **{k: v for k, v in merged.items() if k != "kind"})
        return await self.get(kind, name, namespace=namespace)

    async def create(
        self,
        kind: ObjectKind,
        body: Mapping[str, Any],
        *,
        namespace: str,
        dry_run: bool = False,
    ) -> Object:
        raise Forbidden("routers create nothing")

    async def apply(
        self,
        body: Mapping[str, Any],
        *,
        manager: str,
        force: bool = False,
        dry_run: bool = False,
    ) -> Object:
        raise Forbidden("routers apply nothing")

    async def replace(self, body: Mapping[str, Any]) -> Object:
        raise Forbidden("routers replace nothing")

    async def delete(
        self,
        kind: ObjectKind,
        name: str,
        *,
        namespace: str,
        grace_s: float | None = None,
        uid: str | None = None,
    ) -> None:
        raise Forbidden(f"routers delete no {kind.kind}")

    async def get_raw(self, path: str) -> Any:
        raise Forbidden(f"{path} is not read here")
