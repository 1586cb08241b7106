"""Requests of doctor to an API server, with bounded concurrency.

Doctor sends more than a hundred requests. One after the other they would take seconds with a distant API
server. All at once they would open a connection each, whose TLS handshakes take longer than the requests.
`gather` and `access_reviews` read with it; it writes nothing but access reviews.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulcrum_cluster.objects import Object, ObjectApi, ObjectKind

CONCURRENCY_MAX = 8


class BoundedObjects:
    """The methods of `ObjectApi` that doctor uses, at most `CONCURRENCY_MAX` requests at a time."""

    def __init__(self, objects: "ObjectApi") -> None:
        self._objects, self._free = objects, asyncio.Semaphore(CONCURRENCY_MAX)

    async def get(self, kind: "ObjectKind", name: str, *, namespace: str) -> "Object":
        """The object, or `NotFound`."""
        async with self._free:
            return await self._objects.get(kind, name, namespace=namespace)

    async def list(self, kind: "ObjectKind", *, namespace: str, labels: str) -> "list[Object]":
        """All selected objects in the namespace ("": in all)."""
        async with self._free:
            return (await self._objects.list(kind, namespace=namespace, labels=labels))[0]

    async def create(self, kind: "ObjectKind", body: Mapping[str, Any], *, namespace: str) -> "Object":
        """The API server's response to an object that is not stored, such as an access review."""
        async with self._free:
            return await self._objects.create(kind, body, namespace=namespace)
