"""Reads the facts for doctor's checks; judges nothing.

A fact about cluster objects is None if the user may not read them, a single object also if it does not exist.
Our own kinds give an empty list then, because the checks of permissions and CRDs report that. The command
`doctor` calls it, and `examine` judges.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fulcrum_cli.doctor.access_reviews import AccessReviewer, service_account_of
from fulcrum_cli.doctor.bounded_objects import BoundedObjects
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
    from fulcrum_cluster.objects import ObjectKind

_PART_OF = "app.kubernetes.io/part-of=fulcrum"
_ROUTER_OBJECTS = f"{_PART_OF},app.kubernetes.io/name=fulcrum-router"
"""Selects what the operator creates for routers: Deployments, Leases and EndpointSlices."""
_COMPONENT = "app.kubernetes.io/component"

T = TypeVar("T")
R = TypeVar("R", bound=Resource)


async def gather_facts(connection: TargetConnection) -> DoctorFacts:
    """Read the facts of a namespace of a cluster, or of a local run."""
    services, instances, assignments, tiers = await asyncio.gather(
        _list_readable(connection, PDService),
        _list_readable(connection, PDInstance),
        _list_readable(connection, PDAssignment),
        _list_readable(connection, QoSTier),
    )
    cluster = None
    if connection.objects is not None:
        objects = BoundedObjects(connection.objects)
        cluster = await _ClusterReader(objects, connection.namespace).read(services)
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

    def __init__(self, objects: BoundedObjects, namespace: str) -> None:
        self._objects, self._namespace = objects, namespace

    async def read(self, services: Sequence[PDService]) -> ClusterFacts:
        from fulcrum_cluster import objects as kinds

        reviewer = AccessReviewer(self._objects, self._namespace)
        operator, autoscaler, crds, user_access, nodes, pods = await asyncio.gather(
            self._list_deployments(Component.OPERATOR),
            self._list_deployments(Component.AUTOSCALER),
            self._read_crds(),
            reviewer.review_user(),
            self._list(kinds.NODE),
            self._list(kinds.POD, labels=_PART_OF),
        )
        names = [service.metadata.name for service in services]
        accounts, lease, operator_pods, autoscaler_pods, router_objects = await asyncio.gather(
            reviewer.review_service_accounts(operator, autoscaler, names),
            self._read_operator_lease(operator),
            self._list_pods(operator),
            self._list_pods(autoscaler),
            self._list_router_objects(),
        )
        (leader, leases_readable), (routers, leases, slices) = lease, router_objects
        return ClusterFacts(
            crds=crds,
            user_access=user_access,
            service_accounts=accounts,
            operator_deployments=operator,
            autoscaler_deployments=autoscaler,
            component_pods={Component.OPERATOR: operator_pods, Component.AUTOSCALER: autoscaler_pods},
            operator_lease=leader,
            leases_readable=leases_readable,
            nodes=nodes,
            engine_pods=None if pods is None else _group_by_label(pods, SERVICE_LABEL),
            router_pods=None if pods is None else _group_by_label(pods, ROUTER_LABEL),
            router_deployments=None if routers is None else _group_by_label(routers, SERVICE_LABEL),
            router_leases=_first_by_service(leases),
            endpoint_slices=_first_by_service(slices),
        )

    async def _list_router_objects(self) -> tuple[Bodies | None, Bodies | None, Bodies | None]:
        """List Deployments, Leases and EndpointSlices of routers."""
        from fulcrum_cluster import objects as kinds

        return await asyncio.gather(
            self._list(kinds.DEPLOYMENT, labels=_ROUTER_OBJECTS),
            self._list(kinds.LEASE, labels=_ROUTER_OBJECTS),
            self._list(kinds.ENDPOINT_SLICE, labels=_ROUTER_OBJECTS),
        )

    async def _list(
        self, kind: "ObjectKind", *, namespace: str | None = None, labels: str = ""
    ) -> Bodies | None:
        scope = self._namespace if namespace is None else namespace
        return await _none_if_refused(self._objects.list(kind, namespace=scope, labels=labels))

    async def _read_crds(self) -> Mapping[str, Body | None] | None:
        names = [f"{kind.plural}.{GROUP}" for kind in KINDS]
        try:
            found = await asyncio.gather(*(self._read_crd(name) for name in names))
        except Forbidden:
            return None
        return dict(zip(names, found, strict=True))

    async def _read_crd(self, name: str) -> Body | None:
        from fulcrum_cluster.objects import CRD

        try:
            return await self._objects.get(CRD, name, namespace="")
        except NotFound:
            return None

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
