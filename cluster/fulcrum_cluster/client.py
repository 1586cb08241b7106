"""The store on a unix socket, seen from another process."""

import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from fulcrum_cluster.memory import applied_document
from fulcrum_cluster.statuses import error_of
from fulcrum_cluster.transport import UnixHttp
from fulcrum_core.api.meta import API_VERSION, Resource
from fulcrum_core.errors import InvalidInput
from fulcrum_core.ports import EventType, Listing, WatchEvent

R = TypeVar("R", bound=Resource)

_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_STRICT = {"fieldValidation": "Strict"}
_SCHEME = "unix:"


class SocketStore:
    """`fulcrum_core.ports.Store` over the socket of `serve_store`. To be closed, or used as a context.

    Args:
        path: The socket.
        silence_s: A watch without even a bookmark for so long raises `StoreUnavailable`.
    """

    def __init__(self, path: Path, *, silence_s: float = 30.0) -> None:
        self._http = UnixHttp(path, silence_s=silence_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        """The object, or `NotFound`."""
        return kind.model_validate(await self._http.request("GET", _path(kind, namespace, name)))

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """All objects of the kind in the namespace, by name, and the version from which a watch continues."""
        body = await self._http.request("GET", _path(kind, namespace))
        items = tuple(kind.model_validate(item) for item in body["items"])
        return Listing(items, body["metadata"]["resourceVersion"])

    async def watch(
        self, kind: type[R], *, namespace: str, since: str
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Every change after `since`, in order, until the server ends it; `Gone` if `since` is too old."""
        query = {"watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true"}
        async with self._http.lines(_path(kind, namespace), query=query) as lines:
            async for line in lines:
                yield _event(kind, json.loads(line))

    async def create(self, obj: R) -> R:
        """The stored object, or `AlreadyExists`. The status given is dropped."""
        path = _path(type(obj), obj.metadata.namespace)
        return type(obj).model_validate(
            await self._http.request("POST", path, body=_sent(obj), query=_STRICT)
        )

    async def apply(self, obj: R, *, manager: str) -> R:
        """Server-side apply of the fields set when `obj` was made; `Conflict` over a field of another."""
        path = _path(type(obj), obj.metadata.namespace, obj.metadata.name)
        query = {**_STRICT, "fieldManager": manager}
        document = applied_document(obj)
        answer = await self._http.request(
            "PATCH", path, body=document, content_type=_APPLY_PATCH, query=query
        )
        return type(obj).model_validate(answer)

    async def patch(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """JSON merge patch of everything but status; `Conflict` if the version given is not current."""
        return await self._patch(kind, _path(kind, namespace, name), patch, resource_version)

    async def patch_status(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """JSON merge patch of status (`patch` is the status itself)."""
        path = f"{_path(kind, namespace, name)}/status"
        return await self._patch(kind, path, {"status": patch}, resource_version)

    async def delete(self, kind: type[R], name: str, *, namespace: str) -> None:
        """Delete the object, and later all that only it owned; `NotFound` if there is none."""
        await self._http.request("DELETE", _path(kind, namespace, name))

    async def _patch(self, kind: type[R], path: str, patch: Mapping[str, Any], version: str | None) -> R:
        if version is not None:
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "resourceVersion": version}}
        answer = await self._http.request("PATCH", path, body=patch, content_type=_MERGE_PATCH, query=_STRICT)
        return kind.model_validate(answer)


def open_store(address: str) -> SocketStore:
    """The store at `unix:PATH`, as processes are told it on their command line."""
    path = address.removeprefix(_SCHEME)
    if path == address or not path:
        raise InvalidInput("--store", address, "is not unix: and a path")
    return SocketStore(Path(path))


def _path(kind: type[Resource], namespace: str, name: str | None = None) -> str:
    collection = f"/apis/{API_VERSION}/namespaces/{namespace}/{kind.plural}"
    return collection if name is None else f"{collection}/{name}"


def _sent(obj: Resource) -> dict[str, Any]:
    return {key: value for key, value in obj.dump().items() if key != "status"}


def _event(kind: type[R], body: Mapping[str, Any]) -> WatchEvent[R]:
    if body["type"] == "ERROR":
        raise error_of(body["object"])
    event, version = EventType(body["type"]), body["object"]["metadata"]["resourceVersion"]
    if event is EventType.BOOKMARK:
        return WatchEvent(event, None, version)
    return WatchEvent(event, kind.model_validate(body["object"]), version)
