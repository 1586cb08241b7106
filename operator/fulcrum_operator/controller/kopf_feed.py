"""Watches all kinds that the operator reads through kopf and puts every event into the object cache.

Only `kopf.on.event` is used: other handlers would add finalizers and annotations to users' objects. kopf
does not report objects that were deleted while a watch was interrupted; `leader`, which runs the feed, finds
these by lists of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

import aiohttp
import kopf

from fulcrum_cluster.client_config import ClientConfig
from fulcrum_cluster.objects import POD, ObjectKind, kind_of_resource
from fulcrum_core.api import KINDS
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.children import WATCHED_CHILDREN

LABELLED_KINDS = (POD, *WATCHED_CHILDREN)
"""Kinds of which only objects with a label of ours are watched."""
_POD_SELECTOR = "app.kubernetes.io/managed-by=fulcrum-operator"
"""Selects pods of engines, routers and model readers; router pods have no `SERVICE_LABEL`."""
WATCHED_KINDS = (*(kind_of_resource(kind) for kind in KINDS), *LABELLED_KINDS)
"""All kinds of Fulcrum, pods, and the children that the operator creates for a service."""

WORKERS_MAX = 32
"""Most events of one kind that kopf handles in one turn of the event loop.

kopf has a worker for each object. When hundreds of pods change at the same time, the workers of all of them
would run in one turn, which takes seconds: the Lease could not be renewed meanwhile.
"""
WORKER_IDLE_S = 0.02
"""Seconds for which a worker waits for another event of its object, and keeps others from running."""
WATCH_TIMEOUT_S = 25
"""Seconds after which the API server ends a watch, and it goes on with another one where it was."""
WATCH_SILENCE_MAX_S = 28.0
"""Silence after which a watch is broken, in seconds: the API server would have ended it."""
_CANCELLATIONS_MAX, _CANCELLATION_INTERVAL_S = 10, 0.2
_BACKOFFS_S = (0.2, 0.5, 1.0, 1.0, 2.0)


def label_selector(kind: ObjectKind) -> str:
    """Label selector for lists and watches of a kind; "" selects all objects."""
    if kind == POD:
        return _POD_SELECTOR
    return SERVICE_LABEL if kind in LABELLED_KINDS else ""


class KopfFeed:
    """Watches of all kinds in `WATCHED_KINDS`.

    Args:
        access: Connection settings of the API server.
        cache: Receives the events.
        namespace: The only namespace to watch; "": all.
    """

    def __init__(self, access: ClientConfig, cache: ObjectCache, *, namespace: str) -> None:
        self._access, self._cache, self._namespace = access, cache, namespace

    async def run(
        self, stop: asyncio.Event, *, on_started: Callable[[], None], on_object_listed: Callable[[], None]
    ) -> None:
        """Feed the cache until `stop` is set.

        Args:
            stop: Ends the watches.
            on_started: Called after kopf has installed its signal handlers, so that the caller can replace
                them.
            on_object_listed: Called for each object of the list with which a watch begins: at the start, and
                after an interruption.
        """
        logging.getLogger("kopf").setLevel(logging.WARNING)
        others = asyncio.all_tasks()
        session = _make_session(self._access)
        try:
            tasks = await kopf.spawn_tasks(
                registry=self._make_registry(session, on_object_listed),
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not self._namespace,
                namespaces=[self._namespace] if self._namespace else [],
                stop_flag=stop,
            )
            on_started()
            await _run_until_stopped(tasks, stop, others)
        finally:
            await session.close()

    def _make_registry(
        self, session: aiohttp.ClientSession, on_object_listed: Callable[[], None]
    ) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(
                server=self._access.url, aiohttp_session=session, default_namespace=self._access.namespace
            )

        kopf.on.login(registry=registry)(login)
        for kind in WATCHED_KINDS:
            self._watch_kind(registry, kind, on_object_listed)
        return registry

    def _watch_kind(
        self, registry: kopf.OperatorRegistry, kind: ObjectKind, on_object_listed: Callable[[], None]
    ) -> None:
        async def on_event(event: Any, **_: Any) -> None:
            apply_event(self._cache, kind, event)
            if event["type"] is None:  # kopf sets no type for an object from a list
                on_object_listed()

        group, _, version = kind.api_version.rpartition("/")
        kopf.on.event(group, version, kind.plural, registry=registry, id=kind.plural)(on_event)


async def _run_until_stopped(
    tasks: Collection[asyncio.Task[Any]], stop: asyncio.Event, others: set[asyncio.Task[Any]]
) -> None:
    """Run kopf until `stop` is set; raise the error of the first of its tasks that fails.

    kopf would then wait for ever for its other watches, which swallow a cancellation.
    """
    running = asyncio.get_running_loop().create_task(kopf.run_tasks(tasks, ignored=others))
    await asyncio.wait((running, *tasks), return_when=asyncio.FIRST_COMPLETED)
    ended = [task for task in tasks if task.done() and not task.cancelled()]
    error = next((failure for task in ended if (failure := task.exception()) is not None), None)
    if stop.is_set() or error is None:
        await running
        return
    for _ in range(_CANCELLATIONS_MAX):
        left = asyncio.all_tasks() - others - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCELLATION_INTERVAL_S)
    raise error


def apply_event(cache: ObjectCache, kind: ObjectKind, event: Any) -> None:
    """Apply one kopf event to the cache: remove the object for DELETED, else store it."""
    body = event["object"]
    if event["type"] == "DELETED":
        meta = body["metadata"]
        cache.remove(kind, meta.get("namespace", ""), meta["name"], version=meta["resourceVersion"])
    else:
        cache.put_object(kind, dict(body))


class NoDiffBase(kopf.DiffBaseStorage):
    """Compares no object with its last version: only handlers of changes need that, and we have none.

    kopf's own storage copies each object several times for each event.
    """

    def build(self, **_: Any) -> Any:
        """Nothing of an object is compared."""
        return {}

    def fetch(self, **_: Any) -> None:
        """There is no last version."""

    def store(self, **_: Any) -> None:
        """Nothing is stored."""


def kopf_settings() -> kopf.OperatorSettings:
    """The settings of kopf: it only watches."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.queueing.worker_limit = WORKERS_MAX
    settings.queueing.idle_timeout = WORKER_IDLE_S
    settings.scanning.disabled = True
    settings.networking.error_backoffs = _BACKOFFS_S
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = WATCH_TIMEOUT_S
    settings.watching.inactivity_timeout = WATCH_SILENCE_MAX_S
    for kind in LABELLED_KINDS:
        group, _, version = kind.api_version.rpartition("/")
        settings.watching.label_selectors[group, version, kind.plural] = label_selector(kind)
    return settings


def _make_session(access: ClientConfig) -> aiohttp.ClientSession:
    """A session that takes the token from `ClientConfig` for each request; kopf's own reads it only once."""

    async def with_token(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        token = access.token
        header = await token.authorization_header() if token else None
        if header:
            request.headers["Authorization"] = header
        response = await handler(request)
        if response.status == 401 and token:
            token.invalidate()
        return response

    connector = aiohttp.TCPConnector(limit=0, ssl=access.tls if access.tls else True)
    return aiohttp.ClientSession(connector=connector, middlewares=(with_token,), proxy=access.proxy)
