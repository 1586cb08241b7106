"""Takes the picture: what a right is missing for is left out, and said to be."""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from fulcrum_cli.doctor.facts import AccountFacts, Bodies, Body, ClusterFacts, Facts, LocalFacts
from fulcrum_cli.doctor.rights import AUTOSCALER, OPERATOR, PERSON, Answer, Need, router_needs
from fulcrum_cli.target.connection import Connection
from fulcrum_cli.target.local_autoscaler import Unreachable
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


async def gather(there: Connection) -> Facts:
    """The picture of the namespace, or of the run."""
    services, instances = await _items(there, PDService), await _items(there, PDInstance)
    assignments, tiers = await _items(there, PDAssignment), await _items(there, QoSTier)
    cluster = None
    if there.objects is not None:
        cluster = await _Cluster(there.objects, there.namespace).facts(services)
    return Facts(
        now_s=time.time(),
        namespace=there.namespace,
        services=services,
        instances=instances,
        assignments={found.metadata.name: found for found in assignments},
        tiers=frozenset(tier.metadata.name for tier in tiers),
        cluster=cluster,
        local=await _local(there) if there.run else None,
    )


async def _items(there: Connection, kind: type[R]) -> tuple[R, ...]:
    """All of a kind; none where they may not be listed or the kind is missing: checks say that."""
    try:
        return (await there.store.list(kind, namespace=there.namespace)).items
    except (NotFound, Forbidden):
        return ()


async def _local(there: Connection) -> LocalFacts:
    assert there.run is not None
    refusal = ""
    try:
        await there.decisions(there.run.service, limit=1)
    except Unreachable as error:
        refusal = str(error)
    return LocalFacts(state=await there.router_state(), autoscaler_refusal=refusal)


class _Cluster:
    """Reads what stands around the services of one namespace."""

    def __init__(self, objects: "ObjectApi", namespace: str) -> None:
        self._objects, self._namespace = objects, namespace

    async def facts(self, services: Sequence[PDService]) -> ClusterFacts:
        from fulcrum_cluster import objects as kinds

        names = [service.metadata.name for service in services]
        pods = await self._list(kinds.POD, labels=_PART_OF)
        deployments = await self._list(kinds.DEPLOYMENT, labels=_PART_OF)
        leases = await self._list(kinds.LEASE, labels=_PART_OF)
        slices = await self._list(kinds.ENDPOINT_SLICE, labels=_PART_OF)
        operator, autoscaler = await self._component("operator"), await self._component("autoscaler")
        leader, leases_seen = await self._leader(operator)
        routers = None if deployments is None else _by_owner(deployments, names, suffix="-router")
        return ClusterFacts(
            kinds=await self._kinds(),
            person=await self._rights_of_person(),
            accounts=await self._accounts(operator, autoscaler, names),
            operator=operator,
            autoscaler=autoscaler,
            program_pods={
                "operator": await self._pods_of("operator", operator),
                "autoscaler": await self._pods_of("autoscaler", autoscaler),
            },
            leader=leader,
            leases_seen=leases_seen,
            nodes=await self._list(kinds.NODE),
            engine_pods=None if pods is None else _by_label(pods, SERVICE_LABEL),
            router_pods=None if pods is None else _by_label(pods, ROUTER_LABEL),
            routers=routers,
            router_leases=_one_each(leases, names),
            slices=_one_each(slices, names),
        )

    async def _list(
        self, kind: "ObjectKind", *, namespace: str | None = None, labels: str = ""
    ) -> Bodies | None:
        where = self._namespace if namespace is None else namespace
        return await _unless_forbidden(self._listed(kind, where, labels))

    async def _listed(self, kind: "ObjectKind", namespace: str, labels: str) -> Bodies:
        return (await self._objects.list(kind, namespace=namespace, labels=labels))[0]

    async def _kinds(self) -> Mapping[str, Body | None] | None:
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

    async def _component(self, part: str) -> Bodies | None:
        """The Deployments of a part that look after this namespace, wherever they may be seen."""
        from fulcrum_cluster.objects import DEPLOYMENT

        labels = f"{_PART_OF},{_COMPONENT}={part}"
        everywhere = await self._list(DEPLOYMENT, namespace="", labels=labels)
        if everywhere is not None:
            return in_charge(everywhere, self._namespace)
        here = await self._list(DEPLOYMENT, labels=labels)
        return here or None  # none here says nothing of other namespaces

    async def _pods_of(self, part: str, deployments: Bodies | None) -> Bodies | None:
        """The pods of a part's Deployments; None where they may not be listed."""
        from fulcrum_cluster.objects import POD

        found: list[Body] = []
        for meta in [deployment["metadata"] for deployment in deployments or ()]:
            labels = f"{_PART_OF},{_COMPONENT}={part}"
            pods = await self._list(POD, namespace=meta["namespace"], labels=labels)
            if pods is None:
                return None
            found += [pod for pod in pods if pod["metadata"]["name"].startswith(f"{meta['name']}-")]
        return found

    async def _leader(self, operator: Bodies | None) -> tuple[Body | None, bool]:
        """The operator's Lease, called as its account, and whether it could be looked for."""
        from fulcrum_cluster.objects import LEASE

        if not operator:
            return None, False
        try:
            where, name = account_of(operator[0])
            return await self._objects.get(LEASE, name, namespace=where), True
        except NotFound:
            return None, True
        except Forbidden:
            return None, False

    async def _rights_of_person(self) -> tuple[Answer, ...]:
        from fulcrum_cluster.objects import SELF_SUBJECT_ACCESS_REVIEW

        return await self._ask(SELF_SUBJECT_ACCESS_REVIEW, PERSON, {})

    async def _accounts(
        self, operator: Bodies | None, autoscaler: Bodies | None, services: Iterable[str]
    ) -> tuple[AccountFacts, ...]:
        asked = [
            *((part, *account_of(found[0]), needs, "") for part, found, needs in (
                ("operator", operator, OPERATOR), ("autoscaler", autoscaler, AUTOSCALER),
            ) if found),
            *(("router", self._namespace, f"{name}-router", router_needs(name), name) for name in services),
        ]  # fmt: skip
        return tuple(
            [
                AccountFacts(
                    part=part,
                    account=f"{namespace}/{account}",
                    answers=await self._rights_of(namespace, account, needs),
                    service=service,
                )
                for part, namespace, account, needs, service in asked
            ]
        )

    async def _rights_of(self, namespace: str, account: str, needs: Sequence[Need]) -> tuple[Answer, ...]:
        user = f"system:serviceaccount:{namespace}:{account}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
        return await self._ask(_access_review(), needs, {"user": user, "groups": groups})

    async def _ask(
        self, kind: "ObjectKind", needs: Sequence[Need], whom: Mapping[str, Any]
    ) -> tuple[Answer, ...]:
        return tuple(await asyncio.gather(*(self._answer(kind, need, whom) for need in needs)))

    async def _answer(self, kind: "ObjectKind", need: Need, whom: Mapping[str, Any]) -> Answer:
        attributes = {
            "namespace": self._namespace, "verb": need.verb, "group": need.group, "resource": need.resource,
            "subresource": need.subresource, "name": need.name,
        }  # fmt: skip
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {},
            "spec": {
                **whom,
                "resourceAttributes": {key: value for key, value in attributes.items() if value},
            },
        }
        review = await _unless_forbidden(self._objects.create(kind, body, namespace=""))
        return Answer(need, None if review is None else bool(review["status"].get("allowed")))


def _access_review() -> "ObjectKind":
    from fulcrum_cluster.objects import ObjectKind

    plural = "subjectaccessreviews"
    return ObjectKind("authorization.k8s.io/v1", plural, "SubjectAccessReview", namespaced=False)


async def _unless_forbidden(read: Awaitable[T]) -> T | None:
    try:
        return await read
    except (Forbidden, InvalidInput):
        return None


def account_of(deployment: Body) -> tuple[str, str]:
    """Namespace and name of the ServiceAccount that its pods have."""
    spec = deployment["spec"]["template"]["spec"]
    return deployment["metadata"]["namespace"], spec.get("serviceAccountName", "default")


def in_charge(deployments: Bodies, namespace: str) -> Bodies:
    """Those that look after the namespace: installed in it, else for it alone, else for all."""
    for wanted in (
        lambda body: body["metadata"]["namespace"] == namespace,
        lambda body: _option(body, "--namespace") == namespace,
        lambda body: _option(body, "--namespace") is None,
    ):
        if found := [body for body in deployments if wanted(body)]:
            return found
    return []


def _option(deployment: Body, option: str) -> str | None:
    """What its containers are told with that option, in one word or in two."""
    arguments = [
        str(argument)
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for argument in (*container.get("command", ()), *container.get("args", ()))
    ]
    joined = (a.removeprefix(f"{option}=") for a in arguments if a.startswith(f"{option}="))
    following = (value for name, value in pairwise(arguments) if name == option)
    return next(joined, None) or next(following, None)


def _by_label(bodies: Bodies, label: str) -> dict[str, Bodies]:
    grouped: dict[str, list[Body]] = {}
    for body in bodies:
        if value := body["metadata"].get("labels", {}).get(label):
            grouped.setdefault(value, []).append(body)
    return dict(grouped)


def _by_owner(bodies: Bodies, services: Iterable[str], *, suffix: str) -> dict[str, Bodies]:
    return {
        name: [body for body in bodies if body["metadata"]["name"] == f"{name}{suffix}"] for name in services
    }


def _one_each(bodies: Bodies | None, services: Iterable[str]) -> dict[str, Body | None] | None:
    if bodies is None:
        return None
    named = {body["metadata"]["name"]: body for body in bodies}
    return {name: named.get(f"{name}-router") for name in services}
