"""Kubernetes objects in memory, as much of them as a router touches, with an API server that can be
unavailable."""

# ruff: noqa: ARG002  # the signatures are ObjectApi's

import asyncio
import copy
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fulcrum_cluster.objects import Object, ObjectKind
from fulcrum_core.errors import Conflict, Forbidden, NotFound, StoreUnavailable
from fulcrum_core.merge_patch import apply_merge_patch
from fulcrum_core.ports import EventType


class FakeObjectApi:
    """`fulcrum_cluster.objects.ObjectApi`; what a router never calls is refused."""

    def __init__(self) -> None:
        self.unavailable = False
        self.writes: list[tuple[str, str]] = []
        """Kind and name of each object written, in order."""
        self._version = 0
        self._objects: dict[tuple[str, str], Object] = {}
        self._watches: set[asyncio.Queue[tuple[EventType, Object] | None]] = set()

    def put(self, kind: str, name: str, **fields: Any) -> None:
        """The object from now on, whoever wrote it."""
        self._version += 1
        metadata = {**fields.pop("metadata", {}), "name": name, "resourceVersion": str(self._version)}
        known = (kind, name) in self._objects
        self._objects[kind, name] = {"kind": kind, "metadata": metadata, **fields}
        self._publish(EventType.MODIFIED if known else EventType.ADDED, self._objects[kind, name])

    def remove(self, kind: str, name: str) -> None:
        """It is gone from now on."""
        self._version += 1
        gone = self._objects.pop((kind, name))
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._publish(EventType.DELETED, gone)

    def end_watches(self) -> None:
        """End all watches."""
        for queue in self._watches:
            queue.put_nowait(None)

    def _publish(self, event: EventType, body: Object) -> None:
        for queue in self._watches:
            queue.put_nowait((event, copy.deepcopy(body)))

    def _check_available(self) -> None:
        if self.unavailable:
            raise StoreUnavailable("unavailable")

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        self._check_available()
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
    ) -> tuple[list[Object], str]:
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
        queue: asyncio.Queue[tuple[EventType, Object] | None] = asyncio.Queue()
        self._watches.add(queue)
        try:
            while (event := await queue.get()) is not None:
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
