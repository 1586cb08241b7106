"""Reads the facts for doctor's checks; judges nothing.

A fact about cluster objects is None if the user may not read them, a single object also if it does not exist.
Our own kinds give an empty list then, because the checks of permissions and CRDs report that.
"""

import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fulcrum_cli.doctor.access_reviews import AccessReviewer, service_account_of
from fulcrum_cli.doctor.facts import Bodies, Body, ClusterFacts, DoctorFacts, LocalFacts
from fulcrum_cli.doctor.findings import Component
from fulcrum_cli.target.autoscaler import AutoscalerUnavailable
from fulcrum_cli.target.connection import TargetConnection
from fulcrum_core.api.labels import ROUTER_LABEL, SERVICE_LABEL, WATCHED_NAMESPACE_LABEL
from fulcrum_core.api.meta import GROUP, Resource
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.api.registry import KINDS
from fulcrum_core.errors import Forbidden, InvalidInput, NotFound

if TYPE_CHECKING:
    from fulcrum_cluster.objects import ObjectApi, ObjectKind

_PART_OF = "app.kubernetes.io/part-of=fulcrum"
_ROUTER_OBJECTS = f"{_PART_OF},app.kubernetes.io/name=fulcrum-router"
"""Selects what the operator creates for routers: Deployments, Leases and EndpointSlices."""
_COMPONENT = "app.kubernetes.io/component"

T = TypeVar("T")
R = TypeVar("R", bound=Resource)


async def gather_facts(connection: TargetConnection) -> DoctorFacts:
    """Read the facts of a namespace of a cluster, or of a local run."""
    services, instances = (
        await _list_readable(connection, PDService),
        await _list_readable(connection, PDInstance),
    )
    assignments, tiers = (
        await _list_readable(connection, PDAssignment),
        await _list_readable(connection, QoSTier),
    )
    cluster = None
    if connection.objects is not None:
        cluster = await _ClusterReader(connection.objects, connection.namespace).read(services)
    return DoctorFacts(
        now_s=time.time(),
        namespace=connection.namespace,
        services=services,
        instances=instances,
        assignments={found.metadata.name: found for found in assignments},
        tiers=frozenset(tier.metadata.name for tier in tiers),
        cluster=cluster,
        local=await _read_local_run(connection) if connection.local_run else None,
    )


async def _list_readable(connection: TargetConnection, kind: type[R]) -> tuple[R, ...]:
    """List all objects of a kind; empty without permission or CRD, which other checks report."""
    try:
        return (await connection.store.list(kind, namespace=connection.namespace)).items
    except (NotFound, Forbidden):
        return ()


async def _read_local_run(connection: TargetConnection) -> LocalFacts:
    assert connection.local_run is not None
    error_text = ""
    try:
        await connection.fetch_decisions(connection.local_run.service, limit=1)
    except AutoscalerUnavailable as error:
        error_text = str(error)
    return LocalFacts(state=await connection.router_state(), autoscaler_error=error_text)


class _ClusterReader:
    """Reads the cluster objects besides the services, for one namespace."""

    def __init__(self, objects: "ObjectApi", namespace: str) -> None:
        self._objects, self._namespace = objects, namespace

    async def read(self, services: Sequence[PDService]) -> ClusterFacts:
        from fulcrum_cluster import objects as kinds

        names = [service.metadata.name for service in services]
        pods = await self._list(kinds.POD, labels=_PART_OF)
        routers = await self._list(kinds.DEPLOYMENT, labels=_ROUTER_OBJECTS)
        reviewer = AccessReviewer(self._objects, self._namespace)
        operator, autoscaler = (
            await self._list_deployments(Component.OPERATOR),
            await self._list_deployments(Component.AUTOSCALER),
        )
        leader, leases_readable = await self._read_operator_lease(operator)
        return ClusterFacts(
            crds=await self._read_crds(),
            user_access=await reviewer.review_user(),
            service_accounts=await reviewer.review_service_accounts(operator, autoscaler, names),
            operator_deployments=operator,
            autoscaler_deployments=autoscaler,
            component_pods={
                Component.OPERATOR: await self._list_pods(operator),
                Component.AUTOSCALER: await self._list_pods(autoscaler),
            },
            operator_lease=leader,
            leases_readable=leases_readable,
            nodes=await self._list(kinds.NODE),
            engine_pods=None if pods is None else _group_by_label(pods, SERVICE_LABEL),
            router_pods=None if pods is None else _group_by_label(pods, ROUTER_LABEL),
            router_deployments=None if routers is None else _group_by_label(routers, SERVICE_LABEL),
            router_leases=_first_by_service(await self._list(kinds.LEASE, labels=_ROUTER_OBJECTS)),
            endpoint_slices=_first_by_service(await self._list(kinds.ENDPOINT_SLICE, labels=_ROUTER_OBJECTS)),
        )

    async def _list(
        self, kind: "ObjectKind", *, namespace: str | None = None, labels: str = ""
    ) -> Bodies | None:
        scope = self._namespace if namespace is None else namespace
        return await _none_if_refused(self._list_bodies(kind, scope, labels))

    async def _list_bodies(self, kind: "ObjectKind", namespace: str, labels: str) -> Bodies:
        return (await self._objects.list(kind, namespace=namespace, labels=labels))[0]

    async def _read_crds(self) -> Mapping[str, Body | None] | None:
        from fulcrum_cluster.objects import CRD

        found: dict[str, Body | None] = {}
        for kind in KINDS:
            name = f"{kind.plural}.{GROUP}"
            try:
                found[name] = await self._objects.get(CRD, name, namespace="")
            except NotFound:
                found[name] = None
            except Forbidden:
                return None
        return found

    async def _list_deployments(self, component: Component) -> Bodies | None:
        """List the Deployments of a component that manage this namespace, in all namespaces if permitted.

        None if there may be one in a namespace that cannot be read.
        """
        from fulcrum_cluster.objects import DEPLOYMENT

        labels = f"{_PART_OF},{_COMPONENT}={component}"
        everywhere = await self._list(DEPLOYMENT, namespace="", labels=labels)
        if everywhere is not None:
            return deployments_for_namespace(everywhere, self._namespace)
        here = await self._list(DEPLOYMENT, labels=labels)
        return here or None  # the component may run in another namespace

    async def _list_pods(self, deployments: Bodies | None) -> Bodies | None:
        """List the pods that the Deployments select.

        None if pods cannot be read; empty if no Deployment is known.
        """
        from fulcrum_cluster.objects import POD

        found: list[Body] = []
        for deployment in deployments or ():
            selector = deployment["spec"]["selector"]["matchLabels"]
            labels = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
            pods = await self._list(POD, namespace=deployment["metadata"]["namespace"], labels=labels)
            if pods is None:
                return None
            found += pods
        return found

    async def _read_operator_lease(self, operator: Bodies | None) -> tuple[Body | None, bool]:
        """Return the operator's Lease, named like its ServiceAccount, and whether it may be read."""
        from fulcrum_cluster.objects import LEASE

        if not operator:
            return None, False
        try:
            lease_namespace, name = service_account_of(operator[0])
            return await self._objects.get(LEASE, name, namespace=lease_namespace), True
        except NotFound:
            return None, True
        except Forbidden:
            return None, False


async def _none_if_refused(read: Awaitable[T]) -> T | None:
    try:
        return await read
    except (Forbidden, InvalidInput):
        return None


def deployments_for_namespace(deployments: Bodies, namespace: str) -> Bodies:
    """Return the Deployments that manage the namespace.

    Those in it; if there are none, those for it only; if there are none, those for all namespaces.
    """
    for manages in (
        lambda body: body["metadata"]["namespace"] == namespace,
        lambda body: _watched_namespace(body) == namespace,
        lambda body: _watched_namespace(body) is None,
    ):
        if found := [body for body in deployments if manages(body)]:
            return found
    return []


def _watched_namespace(deployment: Body) -> str | None:
    """Return the only namespace that the Deployment's program watches; None if it watches all."""
    watched: str | None = deployment["metadata"].get("labels", {}).get(WATCHED_NAMESPACE_LABEL)
    return watched


def _group_by_label(bodies: Bodies, label: str) -> dict[str, Bodies]:
    grouped: dict[str, list[Body]] = {}
    for body in bodies:
        if value := body["metadata"].get("labels", {}).get(label):
            grouped.setdefault(value, []).append(body)
    return dict(grouped)


def _first_by_service(bodies: Bodies | None) -> dict[str, Body] | None:
    """Return the first object of each service; None if `bodies` is None."""
    if bodies is None:
        return None
    return {service: found[0] for service, found in _group_by_label(bodies, SERVICE_LABEL).items()}
