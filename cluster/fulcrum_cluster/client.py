"""REST client of a local run's socket or a cluster's API server, for every program.

`open_store` returns the typed store of `fulcrum_core.ports`. `open_cluster` also gives access to any other
Kubernetes object as a dictionary, over the same connections.
"""

import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from fulcrum_cluster.client_config import ClientConfig, in_cluster_config
from fulcrum_cluster.error_status import error_from_status
from fulcrum_cluster.memory_store import build_applied_document
from fulcrum_cluster.objects import Object, ObjectApi, ObjectKind, ObjectList, kind_of_body, kind_of_resource
from fulcrum_cluster.transport import HttpClient
from fulcrum_core.api.manifest import first_broken_rule
from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import Gone, InvalidInput, StoreUnavailable
from fulcrum_core.ports import EventType, Listing, WatchEvent

R = TypeVar("R", bound=Resource)

_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_STRICT_VALIDATION = {"fieldValidation": "Strict"}
_DRY_RUN = {"dryRun": "All"}
_PAGE_SIZE, _PAGE_SIZE_OF_LARGE_OBJECTS = 500, 100
_SOCKET_IDLE_TIMEOUT_S = 30.0  # the store sends bookmarks every 10 s
# An API server sends bookmarks only about every minute. It ends a watch sooner, and the next one goes on
# where it was, so that a connection that died silently is noticed within half a minute.
_SERVER_IDLE_TIMEOUT_S = 28.0
_WATCH_TIMEOUT_RANGE_S = (20, 25)  # spread, so that many watches do not end together


class RestObjects:
    """`fulcrum_cluster.objects.ObjectApi` over HTTP."""

    def __init__(self, http: HttpClient, *, rng: random.Random) -> None:
        self._http, self._rng = http, rng

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        """The object, or `NotFound`."""
        return await self._request_object("GET", kind.path(namespace, name))

    async def list(
        self,
        kind: ObjectKind,
        *,
        namespace: str,
        labels: str = "",
        fields: str = "",
        keep: Callable[[Object], Object] | None = None,
    ) -> ObjectList:
        """All selected objects in the namespace ("": in all), and the version to watch from.

        `keep`: returns what is kept of an object. At most a page of whole objects is in memory then.
        """
        path, query = kind.path(namespace), _selectors(labels, fields)
        page_size = _PAGE_SIZE if keep is None else _PAGE_SIZE_OF_LARGE_OBJECTS
        try:
            return await self._list_pages(path, {**query, "limit": str(page_size)}, keep)
        except Gone:  # the server has forgotten the list's version between two pages: list without pages
            return await self._list_pages(path, query, keep)

    async def watch(
        self, kind: ObjectKind, *, namespace: str, since: str, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[tuple[EventType, Object], None]:
        """Every change after `since` until caller or server end it; `Gone` if that is too old."""
        query = {
            **_selectors(labels, fields),
            "watch": "true",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._rng.randint(*_WATCH_TIMEOUT_RANGE_S)),
        }
        async with self._http.stream_lines(kind.path(namespace), query=query) as lines:
            async for line in lines:
                yield _parse_event(line)

    async def create(
        self, kind: ObjectKind, body: Mapping[str, Any], *, namespace: str, dry_run: bool = False
    ) -> Object:
        """The stored object, or `AlreadyExists`."""
        version = body.get("metadata", {}).get("resourceVersion")
        if version:
            raise InvalidInput(
                "metadata.resourceVersion", version, "must not be set on an object to be created"
            )
        query = {**_STRICT_VALIDATION, **(_DRY_RUN if dry_run else {})}
        return await self._request_object("POST", kind.path(namespace), body=body, query=query)

    async def apply(
        self, body: Mapping[str, Any], *, manager: str, force: bool = False, dry_run: bool = False
    ) -> Object:
        """Server-side apply of the body; `Conflict` if another manager owns a field, unless forced.

        The server counts plain writes (create, patch) of the same manager as another manager's.
        """
        query = {**_STRICT_VALIDATION, "fieldManager": manager, **(_DRY_RUN if dry_run else {})}
        if force:
            query["force"] = "true"
        return await self._request_object(
            "PATCH", _object_path(body), body=body, content_type=_APPLY_PATCH, query=query
        )

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
        return await self._request_object(
            "PATCH", path, body=patch, content_type=_MERGE_PATCH, query=_STRICT_VALIDATION
        )

    async def replace(self, body: Mapping[str, Any]) -> Object:
        """Replace the whole object; `Conflict` if its metadata.resourceVersion is not current."""
        return await self._request_object("PUT", _object_path(body), body=body, query=_STRICT_VALIDATION)

    async def delete(
        self,
        kind: ObjectKind,
        name: str,
        *,
        namespace: str,
        grace_s: float | None = None,
        uid: str | None = None,
    ) -> None:
        """Delete the object and later its dependents; `Conflict` if `uid` is given and differs."""
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = int(grace_s)
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        await self._http.request("DELETE", kind.path(namespace, name), body=options)

    async def get_raw(self, path: str) -> Any:
        """The server's response at a path: parsed JSON, anything else as text."""
        return await self._http.request("GET", path, allow_text=True)

    async def _request_object(self, method: str, path: str, **sent: Any) -> Object:
        response = await self._http.request(method, path, **sent)
        if not isinstance(response, dict):
            raise StoreUnavailable(f"{path} has a response that is not an object")
        return response

    async def _list_pages(
        self, path: str, query: Mapping[str, str], keep: Callable[[Object], Object] | None
    ) -> ObjectList:
        items: list[Object] = []
        more: dict[str, str] = {}
        while True:
            body = await self._request_object("GET", path, query={**query, **more})
            page = body["items"] or ()
            items += page if keep is None else map(keep, page)
            if not body["metadata"].get("continue"):
                return items, body["metadata"]["resourceVersion"]
            more = {"continue": body["metadata"]["continue"]}


class RestStore:
    """`fulcrum_core.ports.Store` over HTTP. To be closed, or used as a context."""

    def __init__(self, http: HttpClient, *, rng: random.Random) -> None:
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
        return _parse_object(kind, await self._objects.get(kind_of_resource(kind), name, namespace=namespace))

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """All objects of the kind in the namespace ("": in all), and the version a watch continues from."""
        bodies, version = await self._objects.list(kind_of_resource(kind), namespace=namespace)
        items: list[R] = []
        unreadable: list[tuple[str, str]] = []
        for body in bodies:
            try:
                items.append(_parse_object(kind, body))
            except StoreUnavailable:
                unreadable.append(_namespaced_name(body))
        return Listing(tuple(items), version, tuple(unreadable))

    async def watch(
        self, kind: type[R], *, namespace: str, since: str
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Every change after `since`, in order, until the server ends it; `Gone` if `since` is too old."""
        stream = self._objects.watch(kind_of_resource(kind), namespace=namespace, since=since)
        async with aclosing(stream) as events:
            async for event, body in events:
                yield _to_watch_event(kind, event, body)

    async def create(self, obj: R) -> R:
        """The stored object, or `AlreadyExists`. The status given is dropped."""
        kind, namespace = kind_of_resource(type(obj)), obj.metadata.namespace
        return _parse_object(
            type(obj), await self._objects.create(kind, _without_status(obj), namespace=namespace)
        )

    async def apply(self, obj: R, *, manager: str) -> R:
        """Server-side apply of the fields set when `obj` was made; `Conflict` over a field of another."""
        return _parse_object(
            type(obj), await self._objects.apply(build_applied_document(obj), manager=manager)
        )

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
        return _parse_object(kind, body)

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
        return _parse_object(kind, body)

    async def delete(self, kind: type[R], name: str, *, namespace: str, uid: str | None = None) -> None:
        """Delete the object, and later all that only it owned; `NotFound` if there is none."""
        await self._objects.delete(kind_of_resource(kind), name, namespace=namespace, uid=uid)


class ClusterClient:
    """Client of one cluster, with one pool of connections. To be closed, or used as a context.

    Attributes:
        store: Our own kinds.
        objects: Any kind, as dictionaries.
        namespace: Default namespace: of the kubeconfig's context, or of the pod.
        url: The API server's address.
        responses: Responses by HTTP method (WATCH for a watch) and status; status 0: there was no response.
    """

    def __init__(
        self, config: ClientConfig, *, program: str = "fulcrum", idle_timeout_s: float | None = None
    ) -> None:
        idle_timeout_s = idle_timeout_s or (
            _SOCKET_IDLE_TIMEOUT_S if config.socket else _SERVER_IDLE_TIMEOUT_S
        )
        self._http = HttpClient(config, idle_timeout_s=idle_timeout_s, program=program)
        rng = random.Random()
        self.store = RestStore(self._http, rng=rng)
        self.objects: ObjectApi = RestObjects(self._http, rng=rng)
        self.namespace, self.url = config.namespace, config.url
        self.responses: Mapping[tuple[str, int], int] = self._http.responses

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def open_cluster(address: str, *, program: str = "fulcrum") -> ClusterClient:
    """Open a client of the cluster at a `--store` address (see `resolve_client_config`).

    `program` is the client's name in the API server's logs (User-Agent).
    """
    return ClusterClient(resolve_client_config(address), program=program)


def open_store(address: str, *, program: str = "fulcrum", idle_timeout_s: float | None = None) -> RestStore:
    """Open the store at the `--store` address of a program's command line.

    Args:
        address: See `resolve_client_config`.
        program: The client's name in the API server's logs (User-Agent).
        idle_timeout_s: A watch without a change or bookmark for this long raises `StoreUnavailable`.
    """
    return ClusterClient(resolve_client_config(address), program=program, idle_timeout_s=idle_timeout_s).store


def resolve_client_config(address: str) -> ClientConfig:
    """Translate a `--store` address into a client configuration.

    unix:PATH                    the socket of a local run
    kubeconfig:[PATH][#CONTEXT]  an API server as kubectl reaches it; without a path, kubectl's own default
    in-cluster                   the API server of the cluster that this pod runs in

    Raises:
        InvalidInput: if the address has another form, or the files behind it cannot be used.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return ClientConfig(url="http://fulcrum", socket=Path(rest))
    if scheme == "kubeconfig" and address != scheme:
        from fulcrum_cluster.kubeconfig import read_kubeconfig  # loads 60 MB that a pod never needs

        path, _, context = rest.partition("#")
        return read_kubeconfig(path or None, context or None, address=address)
    if address == "in-cluster":
        return in_cluster_config()
    raise InvalidInput(
        "--store", address, "is not unix: and a path, nor kubeconfig:[PATH][#CONTEXT], nor in-cluster"
    )


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _object_path(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata", {})
    return kind_of_body(body).path(metadata.get("namespace", ""), metadata["name"])


def _parse_event(line: bytes) -> tuple[EventType, Object]:
    body = json.loads(line)
    if body["type"] == "ERROR":
        raise error_from_status(body["object"])
    return EventType(body["type"]), body["object"]


def _to_watch_event(kind: type[R], event: EventType, body: Object) -> WatchEvent[R]:
    version = body["metadata"]["resourceVersion"]
    if event is EventType.BOOKMARK:
        return WatchEvent(event, None, version)
    try:
        return WatchEvent(event, _parse_object(kind, body), version)
    except StoreUnavailable:
        return WatchEvent(event, None, version, _namespaced_name(body))


def _parse_object(kind: type[R], body: Object) -> R:
    """Parse a stored object, ignoring unknown fields: they are of a newer version."""
    try:
        return kind.model_validate(body, extra="ignore")
    except ValidationError as error:
        name = "/".join(_namespaced_name(body))
        broken = first_broken_rule(error, kind)
        raise StoreUnavailable(f'{kind.kind_name()} "{name}" cannot be read: {broken}') from error


def _namespaced_name(body: Object) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]


def _without_status(obj: Resource) -> dict[str, Any]:
    return {key: value for key, value in obj.dump().items() if key != "status"}
