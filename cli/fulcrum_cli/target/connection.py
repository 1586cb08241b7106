"""A target that was opened: the same questions to a local run and to a cluster.

A cluster is asked one cheap question first, so that whatever is wrong with the way there is said in one
line and within seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from fulcrum_cli.target.autoscaler_client import fetch_decisions
from fulcrum_cli.target.cluster_autoscaler import fetch_cluster_decisions
from fulcrum_cli.target.selection import ClusterTarget, LocalTarget, Target
from fulcrum_cluster.router_client import HttpRouterClient, RouterUnavailable, open_http_client
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import Forbidden, FulcrumError, InvalidInput, NotFound, StoreUnavailable
from fulcrum_core.ports import Store
from fulcrum_core.router_state import RouterState

if TYPE_CHECKING:
    from fulcrum_cli.local.run_folder import RunInfo
    from fulcrum_cluster.objects import ObjectApi

FIELD_MANAGER = "fulcrum-cli"
"""Under which name writes stand in the objects' managed fields."""

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a cluster's first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConnection:
    """One namespace that can be read and written. `local_run` is there in a local run, `objects` in a
    cluster."""

    store: Store
    namespace: str
    description: str
    """What it is, for people."""
    local_run: "RunInfo | None" = None
    objects: "ObjectApi | None" = None

    async def router_state(self, *, min_generation: int = 0, timeout_s: float = 0.0) -> RouterState | None:
        """What the router tells; None if it does not answer, and in a cluster, where people have no token."""
        if self.local_run is None:
            return None
        async with open_http_client(self.local_run.router_state_url, token=self.local_run.token) as client:
            try:
                return await HttpRouterClient(client).get_state(
                    min_generation=min_generation, timeout_s=timeout_s
                )
            except RouterUnavailable:
                return None

    async def fetch_decisions(self, service: str, *, limit: int) -> Sequence[dict[str, Any]]:
        """The autoscaler's last decisions on the service, newest last; `AutoscalerUnavailable` if it is
        away."""
        if self.objects is not None:
            return await fetch_cluster_decisions(self.objects, service, namespace=self.namespace, limit=limit)
        assert self.local_run is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            return await fetch_decisions(client, self.local_run.autoscaler_url, limit=limit)

    async def services(self, name: str | None = None) -> tuple[PDService, ...]:
        """The services, or the one of that name; `InvalidInput` if there is none of that name."""
        listed = (await self.store.list(PDService, namespace=self.namespace)).items
        if name is None:
            return listed
        found = tuple(service for service in listed if service.metadata.name == name)
        if not found:
            known = ", ".join(service.metadata.name for service in listed) or "none"
            raise InvalidInput("SERVICE", name, f"is not a PDService of {self.description}; it has {known}")
        return found


@asynccontextmanager
async def connect(
    target: Target, service: str | None = None, *, instance: str | None = None, crds_optional: bool = False
) -> AsyncIterator[TargetConnection]:
    """The connection to the service called so, or that has an instance called so, or to the only one.

    Whatever fails on the way is one line. With `crds_optional` a cluster may lack our kinds, or the right
    to list them.
    """
    async with AsyncExitStack() as stack:
        if isinstance(target, LocalTarget):
            yield await _connect_local_run(stack, find_run(target, service, instance=instance))
        else:
            yield await _connect_cluster(stack, target, crds_optional=crds_optional)


def find_run(target: LocalTarget, name: str | None, *, instance: str | None = None) -> "RunInfo":
    """The running service of that name, the latest one of several; without a name the only one there is.

    Instances are called after their service, which decides where several run.

    Raises:
        InvalidInput: if there is none, or without a name if there are several.
    """
    names, several = ", ".join(target.services), len(target.services) > 1
    if instance is not None and several:
        name = service_name_of(instance) or instance
    if name is None and several:
        raise InvalidInput("SERVICE", names, "are running: name one")
    found = [run for run in target.runs if name in (None, run.service)]
    if not found:
        rule = f"does not run on this machine; running: {names}; --context or -n means a cluster"
        raise InvalidInput("SERVICE", str(name), rule)
    return found[0]


def service_name_of(instance: str) -> str:
    """The service whose instances are called so: `chat` for `chat-3`."""
    return instance.rpartition("-")[0]


async def _connect_local_run(stack: AsyncExitStack, run: "RunInfo") -> TargetConnection:
    from fulcrum_cluster.client import open_store

    store = await stack.enter_async_context(open_store(run.store_address))
    description = f"the local run of {run.service}, process {run.pid}"
    return TargetConnection(store=store, namespace=run.namespace, description=description, local_run=run)


async def _connect_cluster(
    stack: AsyncExitStack, target: ClusterTarget, *, crds_optional: bool
) -> TargetConnection:
    from fulcrum_cluster.client import open_cluster

    try:
        cluster = await stack.enter_async_context(open_cluster(target.store_address, program=FIELD_MANAGER))
    except InvalidInput as error:  # its path is an option of other programs
        raise FulcrumError(f"{target.context} ({target.server}) {error.rule}") from error
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await cluster.objects.get_raw("/version")
            if not crds_optional:
                await cluster.store.list(PDService, namespace=target.namespace)
    except (TimeoutError, StoreUnavailable) as error:
        cause = (
            str(error).removeprefix(f"{target.server} does not answer: ")
            or f"nothing for {CONNECT_TIMEOUT_S:g} s"
        )
        raise StoreUnavailable(f"{target.context} ({target.server}) does not answer: {cause}") from error
    except Forbidden as error:
        raise Forbidden(f"{target.context} ({target.server}): {error}") from error
    except NotFound as error:
        raise FulcrumError(f"{target.context} has no Fulcrum: {CRDS_MISSING}") from error
    return TargetConnection(
        store=cluster.store, namespace=target.namespace, description=str(target), objects=cluster.objects
    )


CRDS_MISSING = (
    "the CustomResourceDefinition pdservices.fulcrum.dev is missing; install the chart, or the kinds alone "
    "with kubectl apply --server-side -f crds/"
)
