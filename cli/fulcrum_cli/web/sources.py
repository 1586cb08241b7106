"""Where the live page reads router and autoscaler: directly in a local run, else through the API server.

`fulcrum regret` reads the recorded requests of a cluster's router with `ClusterRouter`, too.

The commands open a source, and `feed` polls it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from fulcrum_cli.target.autoscaler import fetch_decisions
from fulcrum_cli.web.router_reading import parse_reading
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.errors import StoreError

if TYPE_CHECKING:
    from fulcrum_cli.local.run_folder import RunInfo
    from fulcrum_cluster.objects import ObjectApi

DECISIONS_READ = 200
"""Decisions read from the autoscaler; most of them are holds."""
_TIMEOUT_S = 2.0

ReadMetrics = Callable[[], Awaitable[str]]
"""Returns the text of the active router's `/metrics`, or raises `RouterUnavailable`."""
ReadDecisions = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""Returns the autoscaler's last decisions, or raises `AutoscalerUnavailable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSource:
    """Router and autoscaler of one service. `description` names the target, for people."""

    description: str
    read_metrics: ReadMetrics
    read_decisions: ReadDecisions


@asynccontextmanager
async def open_local_source(run: "RunInfo", description: str) -> AsyncIterator[FeedSource]:
    """Open the source of a local run."""
    async with httpx.AsyncClient(trust_env=False) as client:
        yield FeedSource(
            description=description,
            read_metrics=partial(_read_metrics, client, run.router_metrics_url),
            read_decisions=partial(fetch_decisions, client, run.autoscaler_url, limit=DECISIONS_READ),
        )


async def _read_metrics(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get(f"{url}/metrics", timeout=_TIMEOUT_S)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise RouterUnavailable(f"/metrics: {type(error).__name__}") from error
    return response.text


class ClusterRouter:
    """The active router pod of a service, read through the API server's proxy of pods."""

    def __init__(self, objects: "ObjectApi", service: str, *, namespace: str) -> None:
        self._objects, self._service, self._namespace = objects, service, namespace
        self._active_pod: str | None = None

    async def read_metrics(self) -> str:
        """Return the metrics of the active router.

        It asks only the pod that was active at the last read; if there is none, each router pod in turn.

        Raises:
            RouterUnavailable: if no pod that it asked is active, or one cannot be read. The next read asks
                each router pod again.
        """
        try:
            for pod in [self._active_pod] if self._active_pod else await self._list_pods():
                text = str(await self._objects.get_raw(self._metrics_path(pod)))
                if parse_reading(text, at_s=0.0).active:
                    self._active_pod = pod
                    return text
        except StoreError as error:
            self._active_pod = None
            raise RouterUnavailable(str(error)) from error
        self._active_pod = None
        raise RouterUnavailable("no router is active")

    async def read_document(self, page: str) -> Any:
        """Return a JSON page of the metrics port of the active router.

        Raises:
            RouterUnavailable: see `read_metrics`; or if the pod does not have the page.
        """
        await self.read_metrics()
        assert self._active_pod is not None
        try:
            return await self._objects.get_raw(self._metrics_path(self._active_pod, page))
        except StoreError as error:
            raise RouterUnavailable(str(error)) from error

    async def _list_pods(self) -> list[str]:
        from fulcrum_cluster.objects import POD
        from fulcrum_core.api.labels import ROUTER_LABEL
        from fulcrum_operator.manifests.names import ROUTER_PART

        labels = f"app.kubernetes.io/name={ROUTER_PART},{ROUTER_LABEL}={self._service}"
        listed, _ = await self._objects.list(POD, namespace=self._namespace, labels=labels)
        return sorted(pod["metadata"]["name"] for pod in listed)

    def _metrics_path(self, pod: str, page: str = "metrics") -> str:
        from fulcrum_operator.manifests.names import ROUTER_METRICS_PORT

        proxy = f"{pod}:{ROUTER_METRICS_PORT}/proxy/{page}"
        return f"/api/v1/namespaces/{self._namespace}/pods/{proxy}"
