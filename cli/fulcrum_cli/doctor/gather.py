"""Takes the picture: what a right is missing for is left out, and said to be."""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from fulcrum_cli.doctor.facts import Bodies, Body, ClusterFacts, DoctorFacts, LocalFacts, ServiceAccountFacts
from fulcrum_cli.doctor.permissions import (
    AUTOSCALER_PERMISSIONS,
    OPERATOR_PERMISSIONS,
    USER_PERMISSIONS,
    AccessReview,
    Permission,
    router_permissions,
)
from fulcrum_cli.target.autoscaler_client import AutoscalerUnavailable
from fulcrum_cli.target.connection import TargetConnection
from fulcrum_core.api.labels import ROUTER_LABEL, SERVICE_LABEL
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
_COMPONENT = "app.kubernetes.io/component"

T = TypeVar("T")
R = TypeVar("R", bound=Resource)


async def gather_facts(connection: TargetConnection) -> DoctorFacts:
    """The picture of the namespace, or of the run."""
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
    """All of a kind; none where they may not be listed or the kind is missing: checks say that."""
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
    """Reads what stands around the services of one namespace."""

    def __init__(self, objects: "ObjectApi", namespace: str) -> None:
        self._objects, self._namespace = objects, namespace

    async def read(self, services: Sequence[PDService]) -> ClusterFacts:
        from fulcrum_cluster import objects as kinds

        names = [service.metadata.name for service in services]
        pods = await self._list(kinds.POD, labels=_PART_OF)
        deployments = await self._list(kinds.DEPLOYMENT, labels=_PART_OF)
        leases = await self._list(kinds.LEASE, labels=_PART_OF)
        endpoint_slices = await self._list(kinds.ENDPOINT_SLICE, labels=_PART_OF)
        operator, autoscaler = (
            await self._list_deployments("operator"),
            await self._list_deployments("autoscaler"),
        )
        leader, leases_readable = await self._read_operator_lease(operator)
        routers = None if deployments is None else _group_by_service(deployments, names, suffix="-router")
        return ClusterFacts(
            crds=await self._read_crds(),
            user_access=await self._review_user_access(),
            service_accounts=await self._review_service_accounts(operator, autoscaler, names),
            operator_deployments=operator,
            autoscaler_deployments=autoscaler,
            component_pods={
                "operator": await self._list_pods("operator", operator),
                "autoscaler": await self._list_pods("autoscaler", autoscaler),
            },
            operator_lease=leader,
            leases_readable=leases_readable,
            nodes=await self._list(kinds.NODE),
            engine_pods=None if pods is None else _group_by_label(pods, SERVICE_LABEL),
            router_pods=None if pods is None else _group_by_label(pods, ROUTER_LABEL),
            router_deployments=routers,
            router_leases=_router_object_by_service(leases, names),
            endpoint_slices=_router_object_by_service(endpoint_slices, names),
        )

    async def _list(
        self, kind: "ObjectKind", *, namespace: str | None = None, labels: str = ""
    ) -> Bodies | None:
        scope = self._namespace if namespace is None else namespace
        return await _none_if_forbidden(self._list_bodies(kind, scope, labels))

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

    async def _list_deployments(self, component: str) -> Bodies | None:
        """The Deployments of a part that look after this namespace, wherever they may be seen."""
        from fulcrum_cluster.objects import DEPLOYMENT

        labels = f"{_PART_OF},{_COMPONENT}={component}"
        everywhere = await self._list(DEPLOYMENT, namespace="", labels=labels)
        if everywhere is not None:
            return deployments_for_namespace(everywhere, self._namespace)
        here = await self._list(DEPLOYMENT, labels=labels)
        return here or None  # none here says nothing of other namespaces

    async def _list_pods(self, component: str, deployments: Bodies | None) -> Bodies | None:
        """The pods of a part's Deployments; None where they may not be listed."""
        from fulcrum_cluster.objects import POD

        found: list[Body] = []
        for meta in [deployment["metadata"] for deployment in deployments or ()]:
            labels = f"{_PART_OF},{_COMPONENT}={component}"
            pods = await self._list(POD, namespace=meta["namespace"], labels=labels)
            if pods is None:
                return None
            found += [pod for pod in pods if pod["metadata"]["name"].startswith(f"{meta['name']}-")]
        return found

    async def _read_operator_lease(self, operator: Bodies | None) -> tuple[Body | None, bool]:
        """The operator's Lease, called as its account, and whether it could be looked for."""
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

    async def _review_user_access(self) -> tuple[AccessReview, ...]:
        from fulcrum_cluster.objects import SELF_SUBJECT_ACCESS_REVIEW

        return await self._review_permissions(SELF_SUBJECT_ACCESS_REVIEW, USER_PERMISSIONS, {})

    async def _review_service_accounts(
        self, operator: Bodies | None, autoscaler: Bodies | None, services: Iterable[str]
    ) -> tuple[ServiceAccountFacts, ...]:
        reviews = [
            *((component, *service_account_of(found[0]), permissions, "") for component, found, permissions in (  # noqa: E501
                ("operator", operator, OPERATOR_PERMISSIONS), ("autoscaler", autoscaler,
                AUTOSCALER_PERMISSIONS),
            ) if found),
            *(("router", self._namespace, f"{name}-router", router_permissions(name), name) for name in
            services),
        ]  # fmt: skip
        return tuple(
            [
                ServiceAccountFacts(
                    component=component,
                    account=f"{namespace}/{account}",
                    access_reviews=await self._review_access_of(namespace, account, permissions),
                    service=service,
                )
                for component, namespace, account, permissions, service in reviews
            ]
        )

    async def _review_access_of(
        self, namespace: str, account: str, permissions: Sequence[Permission]
    ) -> tuple[AccessReview, ...]:
        user = f"system:serviceaccount:{namespace}:{account}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
        return await self._review_permissions(
            _subject_access_review(), permissions, {"user": user, "groups": groups}
        )

    async def _review_permissions(
        self, kind: "ObjectKind", permissions: Sequence[Permission], subject: Mapping[str, Any]
    ) -> tuple[AccessReview, ...]:
        return tuple(
            await asyncio.gather(
                *(self._review_permission(kind, permission, subject) for permission in permissions)
            )
        )

    async def _review_permission(
        self, kind: "ObjectKind", permission: Permission, subject: Mapping[str, Any]
    ) -> AccessReview:
        attributes = {
            "namespace": self._namespace, "verb": permission.verb, "group": permission.group, "resource":
            permission.resource,
            "subresource": permission.subresource, "name": permission.name,
        }  # fmt: skip
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {},
            "spec": {
                **subject,
                "resourceAttributes": {key: value for key, value in attributes.items() if value},
            },
        }
        review = await _none_if_forbidden(self._objects.create(kind, body, namespace=""))
        return AccessReview(permission, None if review is None else bool(review["status"].get("allowed")))


def _subject_access_review() -> "ObjectKind":
    from fulcrum_cluster.objects import ObjectKind

    plural = "subjectaccessreviews"
    return ObjectKind("authorization.k8s.io/v1", plural, "SubjectAccessReview", namespaced=False)


async def _none_if_forbidden(read: Awaitable[T]) -> T | None:
    try:
        return await read
    except (Forbidden, InvalidInput):
        return None


def service_account_of(deployment: Body) -> tuple[str, str]:
    """Namespace and name of the ServiceAccount that its pods have."""
    spec = deployment["spec"]["template"]["spec"]
    return deployment["metadata"]["namespace"], spec.get("serviceAccountName", "default")


def deployments_for_namespace(deployments: Bodies, namespace: str) -> Bodies:
    """Those that look after the namespace: installed in it, else for it alone, else for all."""
    for wanted in (
        lambda body: body["metadata"]["namespace"] == namespace,
        lambda body: _option_of(body, "--namespace") == namespace,
        lambda body: _option_of(body, "--namespace") is None,
    ):
        if found := [body for body in deployments if wanted(body)]:
            return found
    return []


def _option_of(deployment: Body, option: str) -> str | None:
    """What its containers are told with that option, in one word or in two."""
    arguments = [
        str(argument)
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for argument in (*container.get("command", ()), *container.get("args", ()))
    ]
    values_after_equals = (a.removeprefix(f"{option}=") for a in arguments if a.startswith(f"{option}="))
    values_after_space = (value for name, value in pairwise(arguments) if name == option)
    return next(values_after_equals, None) or next(values_after_space, None)


def _group_by_label(bodies: Bodies, label: str) -> dict[str, Bodies]:
    grouped: dict[str, list[Body]] = {}
    for body in bodies:
        if value := body["metadata"].get("labels", {}).get(label):
            grouped.setdefault(value, []).append(body)
    return dict(grouped)


def _group_by_service(bodies: Bodies, services: Iterable[str], *, suffix: str) -> dict[str, Bodies]:
    return {
        name: [body for body in bodies if body["metadata"]["name"] == f"{name}{suffix}"] for name in services
    }


def _router_object_by_service(
    bodies: Bodies | None, services: Iterable[str]
) -> dict[str, Body | None] | None:
    if bodies is None:
        return None
    named = {body["metadata"]["name"]: body for body in bodies}
    return {name: named.get(f"{name}-router") for name in services}
