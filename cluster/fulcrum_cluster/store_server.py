"""HTTP server of a memory store on a unix socket, for local runs: the part of Kubernetes' REST API we use.

    GET                 /apis/fulcrum.dev/v1alpha1/{plural}                             (?watch=true)
    GET POST            /apis/fulcrum.dev/v1alpha1/namespaces/{namespace}/{plural}      (?watch=true)
    GET PATCH DELETE    /apis/fulcrum.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}
    PATCH               /apis/fulcrum.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}/status

`client.open_store("unix:...")` is the client. There is no authentication: whoever can open the socket may
write, so only the user who started the server can open it.
"""

import errno
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from fulcrum_cluster.error_status import status_from_error
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api.manifest import parse_as, read_yaml
from fulcrum_core.api.meta import API_VERSION, Resource
from fulcrum_core.api.registry import KINDS
from fulcrum_core.errors import FulcrumError, Gone, InvalidInput, NotFound
from fulcrum_core.ports import WatchEvent

NAMESPACED_ROOT = f"/apis/{API_VERSION}/namespaces"
ALL_NAMESPACES_ROOT = f"/apis/{API_VERSION}"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_PATH_BYTES_MAX = 107  # sizeof(sun_path) - 1
_PROBE_TIMEOUT_S = 1.0
_SHUTDOWN_TIMEOUT_S = 0.05  # open watches never end by themselves
_BY_PLURAL: Mapping[str, type[Resource]] = {kind.plural: kind for kind in KINDS}


@asynccontextmanager
async def serve_store(store: MemoryStore, path: Path) -> AsyncIterator[None]:
    """Serve `store` on the unix socket `path` until the context ends.

    Raises:
        InvalidInput: if another process serves there, or no socket can be created at `path`.
    """
    listener = _bind_socket(path)
    runner = web.AppRunner(
        build_application(store),
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
    )
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        yield
    finally:
        path.unlink(missing_ok=True)
        await runner.cleanup()
        listener.close()


def build_application(store: MemoryStore) -> web.Application:
    """Return the application whose routes read and write `store`."""
    api = _Handlers(store)
    app = web.Application(middlewares=[_errors_as_status])
    app.add_routes(
        [
            web.get(ALL_NAMESPACES_ROOT + "/{plural}", api.list_or_watch),
            web.get(NAMESPACED_ROOT + "/{namespace}/{plural}", api.list_or_watch),
            web.post(NAMESPACED_ROOT + "/{namespace}/{plural}", api.create),
            web.get(NAMESPACED_ROOT + "/{namespace}/{plural}/{name}", api.get),
            web.patch(NAMESPACED_ROOT + "/{namespace}/{plural}/{name}", api.patch),
            web.delete(NAMESPACED_ROOT + "/{namespace}/{plural}/{name}", api.delete),
            web.patch(NAMESPACED_ROOT + "/{namespace}/{plural}/{name}/status", api.patch_status),
        ]
    )
    return app


class _Handlers:
    """The request handlers: each parses a request, calls the store and encodes the result."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request)
        kind = _kind(request)
        listing = await self._store.list(kind, namespace=_namespace(request))
        body = {
            "apiVersion": API_VERSION,
            "kind": f"{kind.kind_name()}List",
            "metadata": {"resourceVersion": listing.resource_version},
            "items": [obj.dump() for obj in listing.items],
        }
        return web.json_response(body)

    async def get(self, request: web.Request) -> web.Response:
        return _object_response(
            await self._store.get(_kind(request), _name(request), namespace=_namespace(request))
        )

    async def create(self, request: web.Request) -> web.Response:
        body = await _read_body(request)
        _check_address(request, body)
        metadata = {"namespace": _namespace(request), **body.get("metadata", {})}
        created = await self._store.create(parse_as(_kind(request), {**body, "metadata": metadata}))
        return _object_response(created, status=201)

    async def patch(self, request: web.Request) -> web.Response:
        body = await _read_body(request)
        if request.content_type == APPLY_PATCH:
            return await self._apply(request, body)
        _check_content_type(request)
        kind, name, namespace = _kind(request), _name(request), _namespace(request)
        return _object_response(await self._store.patch(kind, name, body, namespace=namespace))

    async def patch_status(self, request: web.Request) -> web.Response:
        _check_content_type(request)
        body = await _read_body(request)
        version = body.get("metadata", {}).get("resourceVersion")
        changed = await self._store.patch_status(
            _kind(request),
            _name(request),
            body.get("status", {}),
            namespace=_namespace(request),
            resource_version=version,
        )
        return _object_response(changed)

    async def delete(self, request: web.Request) -> web.Response:
        options = await _read_body(request) if request.can_read_body else {}
        uid = options.get("preconditions", {}).get("uid")
        await self._store.delete(_kind(request), _name(request), namespace=_namespace(request), uid=uid)
        return web.json_response({"apiVersion": "v1", "kind": "Status", "status": "Success"})

    async def _apply(self, request: web.Request, body: Mapping[str, Any]) -> web.Response:
        _check_address(request, body)
        manager = request.query.get("fieldManager")
        if not manager:
            raise InvalidInput("fieldManager", "nothing", "is required to apply")
        metadata = {**body.get("metadata", {}), "name": _name(request), "namespace": _namespace(request)}
        document = {**body, "metadata": metadata}
        return _object_response(await self._store.apply_document(_kind(request), document, manager=manager))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        kind, since = _kind(request), request.query.get("resourceVersion")
        if since is None:
            raise InvalidInput("resourceVersion", "nothing", "is required to watch: take it from a list")
        bookmarks = request.query.get("allowWatchBookmarks") == "true"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            async with aclosing(
                self._store.watch(kind, namespace=_namespace(request), since=since)
            ) as events:
                async for event in events:
                    if bookmarks or event.object is not None:
                        await response.write(_encode_event(kind, event))
        except Gone as error:
            await response.write(
                json.dumps({"type": "ERROR", "object": status_from_error(error)}).encode() + b"\n"
            )
        return response


def _encode_event(kind: type[Resource], event: WatchEvent[Resource]) -> bytes:
    if event.object is not None:
        body = event.object.model_dump_json(by_alias=True, exclude_none=True)
    else:
        metadata = {"resourceVersion": event.resource_version}
        body = json.dumps({"apiVersion": API_VERSION, "kind": kind.kind_name(), "metadata": metadata})
    return f'{{"type":"{event.type}","object":{body}}}\n'.encode()


@web.middleware
async def _errors_as_status(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except FulcrumError as error:
        status = status_from_error(error)
        return web.json_response(status, status=status["code"])


def _kind(request: web.Request) -> type[Resource]:
    plural = request.match_info["plural"]
    if plural not in _BY_PLURAL:
        raise NotFound(f"{plural} is not one of {', '.join(_BY_PLURAL)}")
    return _BY_PLURAL[plural]


def _name(request: web.Request) -> str:
    return request.match_info["name"]


def _namespace(request: web.Request) -> str:
    return request.match_info.get("namespace", "")


def _object_response(obj: Resource, *, status: int = 200) -> web.Response:
    body = obj.model_dump_json(by_alias=True, exclude_none=True)
    return web.Response(text=body, status=status, content_type="application/json")


async def _read_body(request: web.Request) -> Mapping[str, Any]:
    """Return the object in the request: JSON, or YAML in an apply."""
    _check_field_validation(request)
    text = await request.text()
    try:
        body = json.loads(text) if request.content_type != APPLY_PATCH else _parse_json_or_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidInput("body", text[:40], "is not valid JSON or YAML") from error
    if not isinstance(body, Mapping) or not isinstance(body.get("metadata", {}), Mapping):
        raise InvalidInput("body", text[:40], "is not an object with metadata")
    return body


def _parse_json_or_yaml(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else read_yaml(text)


def _check_field_validation(request: web.Request) -> None:
    requested = request.query.get("fieldValidation", "Strict")
    if requested != "Strict":
        raise InvalidInput("fieldValidation", requested, "is not Strict: unknown fields are always refused")


def _check_content_type(request: web.Request) -> None:
    if request.content_type != MERGE_PATCH:
        raise InvalidInput(
            "Content-Type", request.content_type, f"is neither {MERGE_PATCH} nor {APPLY_PATCH}"
        )


def _check_address(request: web.Request, body: Mapping[str, Any]) -> None:
    """Refuse a body whose name or namespace differs from the path's."""
    for key in ("name", "namespace"):
        in_body, in_path = body.get("metadata", {}).get(key), request.match_info.get(key)
        if in_body is not None and in_path is not None and in_body != in_path:
            raise InvalidInput(f"metadata.{key}", in_body, f"is not {in_path}, as in the request path")


def _bind_socket(path: Path) -> socket.socket:
    """Bind a socket that only this user may open; replace the socket that a dead process left."""
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise InvalidInput(
            "store socket", path, f"is longer than the {_PATH_BYTES_MAX} bytes that a socket path may have"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise InvalidInput("store socket", path, os.strerror(error.errno or errno.EIO).lower()) from error
    finally:
        os.umask(mask)
    listener.listen(128)
    return listener


def _remove_stale_socket(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise InvalidInput("store socket", path, "is a file, not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # a busy process may not accept a connection now, but still uses the socket
    raise InvalidInput("store socket", path, "is in use by another process")
