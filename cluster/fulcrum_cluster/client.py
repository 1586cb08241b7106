"""Stores in other processes: the socket of a local run, or the API server of a cluster, over one REST client.

`open_store` gives the typed store of `fulcrum_core.ports`; `open_cluster` gives beside it, over the same
connections, any other Kubernetes object as a dictionary.
"""

import json
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from fulcrum_cluster.access import Access, find_access
from fulcrum_cluster.memory import applied_document
from fulcrum_cluster.objects import Object, ObjectApi, ObjectKind, Page, kind_of_body, kind_of_resource
from fulcrum_cluster.statuses import error_of
from fulcrum_cluster.transport import Http
from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import Gone, InvalidInput, StoreUnavailable
from fulcrum_core.ports import EventType, Listing, WatchEvent

R = TypeVar("R", bound=Resource)

_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_STRICT = {"fieldValidation": "Strict"}
_DRY = {"dryRun": "All"}
_PAGE = 500
_SOCKET_SILENCE_S = 30.0  # its bookmarks come every 10 s
_SERVER_SILENCE_S = 100.0  # an API server's come about every minute
_WATCH_S = (240, 300)  # how long to ask for: many watches shall not end together


class RestObjects:
    """`fulcrum_cluster.objects.ObjectApi` over HTTP."""

    def __init__(self, http: Http, *, rng: random.Random) -> None:
        self._http, self._rng = http, rng

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        """The object, or `NotFound`."""
        return await self._object("GET", kind.path(namespace, name))

    async def list(self, kind: ObjectKind, *, namespace: str, labels: str = "", fields: str = "") -> Page:
        """All that the selectors choose in the namespace ("": in all), and the version to watch from."""
        query = _selectors(labels, fields)
        try:
            return await self._pages(kind.path(namespace), {**query, "limit": str(_PAGE)})
        except Gone:  # the pages outlived the server's memory: all at once, then
            return await self._pages(kind.path(namespace), query)

    async def watch(
        self, kind: ObjectKind, *, namespace: str, since: str, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[tuple[EventType, Object], None]:
        """Every change after `since` until caller or server end it; `Gone` if that is too old."""
        query = {
            **_selectors(labels, fields),
            "watch": "true",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._rng.randint(*_WATCH_S)),
        }
        async with self._http.lines(kind.path(namespace), query=query) as lines:
            async for line in lines:
                yield _event(line)

    async def create(
        self, kind: ObjectKind, body: Mapping[str, Any], *, namespace: str, dry_run: bool = False
    ) -> Object:
        """The stored object, or `AlreadyExists`."""
        version = body.get("metadata", {}).get("resourceVersion")
        if version:
            raise InvalidInput(
                "metadata.resourceVersion", version, "must not be set on an object to be created"
            )
        query = {**_STRICT, **(_DRY if dry_run else {})}
        return await self._object("POST", kind.path(namespace), body=body, query=query)

    async def apply(
        self, body: Mapping[str, Any], *, manager: str, force: bool = False, dry_run: bool = False
    ) -> Object:
        """Server-side apply of what the body says; `Conflict` over a field of another unless forced.

        To the server the same manager's plain writes (create, patch) are another's.
        """
        query = {**_STRICT, "fieldManager": manager, **(_DRY if dry_run else {})}
        if force:
            query["force"] = "true"
        return await self._object("PATCH", _address(body), body=body, content_type=_APPLY_PATCH, query=query)

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
        """JSON merge patch; `Conflict` if `resource_version` is given and not current."""
        if resource_version is not None:
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "resourceVersion": resource_version}}
        path = kind.path(namespace, name, subresource)
        return await self._object("PATCH", path, body=patch, content_type=_MERGE_PATCH, query=_STRICT)

    async def replace(self, body: Mapping[str, Any]) -> Object:
        """The whole object anew; `Conflict` if its metadata.resourceVersion is not current."""
        return await self._object("PUT", _address(body), body=body, query=_STRICT)

    async def delete(
        self,
        kind: ObjectKind,
        name: str,
        *,
        namespace: str,
        grace_s: float | None = None,
        uid: str | None = None,
    ) -> None:
        """Delete it and, later, what it owns; `Conflict` if `uid` is given and it is another one by now."""
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = int(grace_s)
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        await self._http.request("DELETE", kind.path(namespace, name), body=options)

    async def get_path(self, path: str) -> Any:
        """What the server answers at a path: JSON read, anything else as text."""
        return await self._http.request("GET", path, plain=True)

    async def _object(self, method: str, path: str, **sent: Any) -> Object:
        answer = await self._http.request(method, path, **sent)
        if not isinstance(answer, dict):
            raise StoreUnavailable(f"{path} is answered with something that is no object")
        return answer

    async def _pages(self, path: str, query: Mapping[str, str]) -> Page:
        items: list[Object] = []
        more: dict[str, str] = {}
        while True:
            body = await self._object("GET", path, query={**query, **more})
            items += body["items"] or ()
            if not body["metadata"].get("continue"):
                return items, body["metadata"]["resourceVersion"]
            more = {"continue": body["metadata"]["continue"]}


class RestStore:
    """`fulcrum_core.ports.Store` over a REST client. To be closed, or used as a context."""

    def __init__(self, http: Http, *, rng: random.Random) -> None:
        self._http = http
        self._objects: ObjectApi = RestObjects(http, rng=rng)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        """The object, or `NotFound`."""
        return _read(kind, await self._objects.get(kind_of_resource(kind), name, namespace=namespace))

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """All objects of the kind in the namespace ("": in all), and the version a watch continues from."""
        bodies, version = await self._objects.list(kind_of_resource(kind), namespace=namespace)
        items: list[R] = []
        unreadable: list[tuple[str, str]] = []
        for body in bodies:
            try:
                items.append(_read(kind, body))
            except StoreUnavailable:
                unreadable.append(_key(body))
        return Listing(tuple(items), version, tuple(unreadable))

    async def watch(
        self, kind: type[R], *, namespace: str, since: str
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Every change after `since`, in order, until the server ends it; `Gone` if `since` is too old."""
        stream = self._objects.watch(kind_of_resource(kind), namespace=namespace, since=since)
        async with aclosing(stream) as events:
            async for event, body in events:
                yield _watch_event(kind, event, body)

    async def create(self, obj: R) -> R:
        """The stored object, or `AlreadyExists`. The status given is dropped."""
        kind, namespace = kind_of_resource(type(obj)), obj.metadata.namespace
        return _read(type(obj), await self._objects.create(kind, _sent(obj), namespace=namespace))

    async def apply(self, obj: R, *, manager: str) -> R:
        """Server-side apply of the fields set when `obj` was made; `Conflict` over a field of another."""
        return _read(type(obj), await self._objects.apply(applied_document(obj), manager=manager))

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
        body = await self._objects.patch(
            kind_of_resource(kind), name, patch, namespace=namespace, resource_version=resource_version
        )
        return _read(kind, body)

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
        body = await self._objects.patch(
            kind_of_resource(kind),
            name,
            {"status": patch},
            namespace=namespace,
            resource_version=resource_version,
            subresource="status",
        )
        return _read(kind, body)

    async def delete(self, kind: type[R], name: str, *, namespace: str, uid: str | None = None) -> None:
        """Delete the object, and later all that only it owned; `NotFound` if there is none."""
        await self._objects.delete(kind_of_resource(kind), name, namespace=namespace, uid=uid)


class Cluster:
    """Everything in one cluster, over one pool of connections. To be closed, or used as a context.

    Attributes:
        store: Our own kinds.
        objects: Any kind, as dictionaries.
        namespace: The namespace meant where a user names none: of the kubeconfig's context, or of the pod.
        url: The API server's address.
    """

    def __init__(self, access: Access, *, program: str = "fulcrum", silence_s: float | None = None) -> None:
        silence_s = silence_s or (_SOCKET_SILENCE_S if access.socket else _SERVER_SILENCE_S)
        self._http = Http(access, silence_s=silence_s, program=program)
        rng = random.Random()
        self.store = RestStore(self._http, rng=rng)
        self.objects: ObjectApi = RestObjects(self._http, rng=rng)
        self.namespace, self.url = access.namespace, access.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def open_cluster(address: str, *, program: str = "fulcrum") -> Cluster:
    """The cluster at a `--store` address (see `access`). `program` is the name under which it sees us."""
    return Cluster(find_access(address), program=program)


def open_store(address: str, *, program: str = "fulcrum", silence_s: float | None = None) -> RestStore:
    """The store at a `--store` address (see `access`), as processes are told it on their command line.

    Args:
        address: `unix:PATH`, `kubeconfig:[PATH][#CONTEXT]` or `in-cluster`; anything else is `InvalidInput`.
        program: The name under which an API server sees us.
        silence_s: A watch without even a bookmark for so long raises `StoreUnavailable`.
    """
    return Cluster(find_access(address), program=program, silence_s=silence_s).store


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _address(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata", {})
    return kind_of_body(body).path(metadata.get("namespace", ""), metadata["name"])


def _event(line: bytes) -> tuple[EventType, Object]:
    body = json.loads(line)
    if body["type"] == "ERROR":
        raise error_of(body["object"])
    return EventType(body["type"]), body["object"]


def _watch_event(kind: type[R], event: EventType, body: Object) -> WatchEvent[R]:
    version = body["metadata"]["resourceVersion"]
    if event is EventType.BOOKMARK:
        return WatchEvent(event, None, version)
    try:
        return WatchEvent(event, _read(kind, body), version)
    except StoreUnavailable:
        return WatchEvent(event, None, version, _key(body))


def _read(kind: type[R], body: Object) -> R:
    """What the store says, passing over fields that a newer writer knows; it refused unknown ones already."""
    try:
        return kind.model_validate(body, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreUnavailable(
            f'{kind.kind_name()} "{"/".join(_key(body))}" cannot be read: {where}: {first["msg"]}'
        ) from error


def _key(body: Object) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]


def _sent(obj: Resource) -> dict[str, Any]:
    return {key: value for key, value in obj.dump().items() if key != "status"}
