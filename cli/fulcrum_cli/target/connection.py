"""Connects a command to its target and reads services, router state and decisions from it.

A cluster gets two cheap requests first (version, PDServices), so that a connection problem is one line
within seconds; a local run gets none. Commands use the connection alike for a local run and a cluster.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from fulcrum_cli.target.autoscaler import fetch_cluster_decisions, fetch_decisions
from fulcrum_cli.target.selection import ClusterTarget, LocalTarget, Target
from fulcrum_cluster.router_client import HttpRouterClient, RouterUnavailable, open_http_client
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import Forbidden, FulcrumError, InvalidInput, NotFound, StoreError, StoreUnavailable
from fulcrum_core.formatting import format_list
from fulcrum_core.ports import Store
from fulcrum_core.router_state import RouterState

if TYPE_CHECKING:
    from fulcrum_cli.local.run_folder import RunInfo
    from fulcrum_cluster.objects import ObjectApi

FIELD_MANAGER = "fulcrum-cli"
"""Field manager of this program's writes, as `metadata.managedFields` shows it."""

CONNECT_TIMEOUT_S = 5.0
"""Timeout of the first requests to a cluster, in seconds."""

_INSTANCES_NAMED_MAX = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConnection:
    """One open namespace. `local_run` is set for a local run, `objects` for a cluster."""

    store: Store
    namespace: str
    description: str
    """Name of the target, for people."""
    local_run: "RunInfo | None" = None
    objects: "ObjectApi | None" = None

    async def router_state(self, *, min_generation: int = 0, timeout_s: float = 0.0) -> RouterState | None:
        """Return the router's state once it has applied `min_generation`, else as it is after `timeout_s`.

        The caller compares `generation`. None if the router does not respond, and always in a cluster, where
        people have no token for it.
        """
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
        """Return the autoscaler's last decisions on the service, oldest first.

        Raises:
            AutoscalerUnavailable: if the autoscaler does not respond.
        """
        if self.objects is not None:
            return await fetch_cluster_decisions(self.objects, service, namespace=self.namespace, limit=limit)
        assert self.local_run is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            return await fetch_decisions(client, self.local_run.autoscaler_url, limit=limit)

    async def services(self, name: str | None = None) -> tuple[PDService, ...]:
        """Return all services, or only the service called `name`.

        Raises:
            InvalidInput: if there is no service of that name.
        """
        listed = (await self.store.list(PDService, namespace=self.namespace)).items
        if name is None:
            return listed
        found = tuple(service for service in listed if service.metadata.name == name)
        if not found:
            known = ", ".join(service.metadata.name for service in listed) or "none"
            raise InvalidInput("SERVICE", name, f"is not a PDService of {self.description}; it has {known}")
        return found

    async def only_service(self, name: str | None = None) -> PDService:
        """Return the service called `name`, or the only one.

        Raises:
            InvalidInput: if there is no such service, or there are several and no name.
        """
        services = await self.services(name)
        if len(services) == 1:
            return services[0]
        names = ", ".join(service.metadata.name for service in services) or "none"
        rule = "exist: name one of them" if services else f"exists: {self.description} has no PDService"
        raise InvalidInput("SERVICE", names, rule)


@asynccontextmanager
async def connect(
    target: Target, service: str | None = None, *, instance: str | None = None, crds_optional: bool = False
) -> AsyncIterator[TargetConnection]:
    """Connect to the target: in a local run to the named service, that of `instance`, or the only one.

    With `crds_optional` a cluster without Fulcrum's CRDs, or without permission to list them, is accepted.

    Raises:
        InvalidInput: if no local run matches, or several do.
        FulcrumError: in one line, if the cluster cannot be used.
    """
    async with AsyncExitStack() as stack:
        if isinstance(target, LocalTarget):
            if instance is None or len(target.services) == 1:
                run = find_run(target, service)
            else:
                run = await find_run_of_instance(target, instance)
            yield await _connect_local_run(stack, run)
        else:
            yield await _connect_cluster(stack, target, crds_optional=crds_optional)


async def find_run_of_instance(target: LocalTarget, instance: str) -> "RunInfo":
    """Return the local run that has the instance; of several runs of a service only the latest counts.

    Raises:
        InvalidInput: if no local run has the instance.
    """
    for name in target.services:
        run = find_run(target, name)
        if await _has_instance(run, instance):
            return run
    names = ", ".join(target.services)
    raise InvalidInput("instance", instance, f"is in no local run; running: {names}")


async def _has_instance(run: "RunInfo", instance: str) -> bool:
    async with AsyncExitStack() as stack:
        connection = await _connect_local_run(stack, run)
        try:
            await connection.store.get(PDInstance, instance, namespace=run.namespace)
        except StoreError:
            return False
    return True


def find_run(target: LocalTarget, name: str | None) -> "RunInfo":
    """Return the latest local run of the named service; without a name that of the only service.

    Raises:
        InvalidInput: if no such service runs, or if several run and none is named.
    """
    names = ", ".join(target.services)
    if name is None and len(target.services) > 1:
        raise InvalidInput("SERVICE", names, "are running: name one of them")
    found = [run for run in target.runs if name in (None, run.service)]
    if not found:
        rule = f"does not run on this machine; running: {names}; use --context or -n for a cluster"
        raise InvalidInput("SERVICE", str(name), rule)
    return found[0]


async def find_service_of_instance(connection: TargetConnection, instance: str) -> PDService:
    """Return the service of the instance, by `spec.service`.

    Raises:
        InvalidInput: if there is no such instance or its service was deleted.
    """
    instances = (await connection.store.list(PDInstance, namespace=connection.namespace)).items
    for found in instances:
        if found.metadata.name == instance:
            (service,) = await connection.services(found.spec.service)
            return service
    known = format_list([i.metadata.name for i in instances], at_most=_INSTANCES_NAMED_MAX) or "none"
    raise InvalidInput("instance", instance, f"is not in {connection.description}; there are {known}")


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
    except InvalidInput as error:  # its path names an option of other programs
        raise FulcrumError(f"{target.context} ({target.server}) {error.rule}") from error
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await cluster.objects.get_raw("/version")
            if not crds_optional:
                await cluster.store.list(PDService, namespace=target.namespace)
    except (TimeoutError, StoreUnavailable) as error:
        timed_out = f"no response within {CONNECT_TIMEOUT_S:g} s"
        cause = error.cause if isinstance(error, StoreUnavailable) else timed_out
        raise StoreUnavailable(f"{target.context} ({target.server}) does not respond: {cause}") from error
    except Forbidden as error:
        raise Forbidden(f"{target.context} ({target.server}): {error}") from error
    except NotFound as error:
        raise FulcrumError(f"{target.context} has no Fulcrum: {CRDS_MISSING}") from error
    return TargetConnection(
        store=cluster.store, namespace=target.namespace, description=str(target), objects=cluster.objects
    )


CRDS_MISSING = (
    "the CustomResourceDefinition pdservices.fulcrum.dev is missing; install the chart, or only the CRDs "
    "with kubectl apply --server-side -f crds/"
)
