"""Which objects belong to a service. No other object may be changed or deleted.

A PDPool or an object of Kubernetes belongs to the service if that is its controller, by uid. A PDInstance
does if it names the service and its controller is a PDPool or missing. An object that was made for a service
of this name and has no controller was orphaned (`kubectl delete --cascade=orphan`); the service adopts it.

Called by `controller/children` for kinds of Kubernetes, by `controller/reconcile` for Fulcrum's own, and by
`controller/pods` for pods.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fulcrum_core.api import ObjectMeta, OwnerReference, PDInstance, PDPool, PDService
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_operator.plan.pools import list_pool_names


class Ownership(Enum):
    """Whose object it is."""

    OURS = "ours"
    ORPHANED = "orphaned"
    """The object has no controller, but was made for a service of this name."""
    FOREIGN = "foreign"


def judge_ownership(meta: ObjectMeta, service: PDService, *, names_service: bool) -> Ownership:
    """Whose object it is.

    Args:
        meta: Metadata of the object.
        service: The service that needs an object of this name.
        names_service: Whether the object says that it was made for a service of this name.
    """
    owner = meta.controller
    if owner is not None:
        return Ownership.OURS if owner.uid == service.metadata.uid else Ownership.FOREIGN
    return Ownership.ORPHANED if names_service else Ownership.FOREIGN


def is_labelled_as_child(meta: ObjectMeta, service: PDService) -> bool:
    """Whether the labels of a Kubernetes object say that the operator made it for a service of this name."""
    labels = meta.labels
    return (
        labels.get(SERVICE_LABEL) == service.metadata.name
        and labels.get("app.kubernetes.io/managed-by") == "fulcrum-operator"
    )


def describe_taken(kind: str, meta: ObjectMeta, service: PDService) -> str:
    """One line for people: the object whose name is taken, and whose it is."""
    owner, name = meta.controller, f"{kind} {meta.name}"
    if owner is None:
        return f"{name} exists and was not made for this service; rename one of them"
    if (owner.kind, owner.name) == (PDService.kind_name(), service.metadata.name):
        return f"{name} belongs to a deleted PDService {owner.name}; waiting until it is deleted, too"
    return f"{name} exists and belongs to {owner.kind} {owner.name}; rename one of them"


@dataclass(frozen=True, slots=True)
class OwnedObjects:
    """The objects of a service among all of its namespace, and the names that others' objects take."""

    pools: tuple[PDPool, ...]
    instances: tuple[PDInstance, ...]
    orphaned_pools: frozenset[str]
    taken_pools: dict[str, str]
    """Names of needed pools that objects of others have, each with a line on whose they are."""
    taken_names: frozenset[str]
    """Names of the PDInstances in the namespace that are not the service's."""


def find_owned_objects(
    service: PDService, pools: Iterable[PDPool], instances: Iterable[PDInstance]
) -> OwnedObjects:
    """Find the service's objects among all PDPools and PDInstances of its namespace, orphaned pools included.

    Also returns the names that objects of others take.
    """
    own, orphaned, taken = [], set(), {}
    needed = list_pool_names(service)
    for pool in pools:
        name, of_service = pool.metadata.name, pool.spec.service == service.metadata.name
        ownership = judge_ownership(pool.metadata, service, names_service=of_service)
        if ownership is Ownership.FOREIGN:
            if name in needed:
                taken[name] = describe_taken(PDPool.kind_name(), pool.metadata, service)
            continue
        own.append(pool)
        if ownership is Ownership.ORPHANED:
            orphaned.add(name)
    found = tuple(instances)
    members = tuple(instance for instance in found if _is_member(instance, service))
    others = {i.metadata.name for i in found} - {i.metadata.name for i in members}
    return OwnedObjects(tuple(own), members, frozenset(orphaned), taken, frozenset(others))


def _is_member(instance: PDInstance, service: PDService) -> bool:
    """Whether the instance names the service, and a PDPool or nothing controls it; the pool may be gone."""
    owner = instance.metadata.controller
    made_by_pool = owner is None or owner.kind == PDPool.kind_name()
    return made_by_pool and instance.spec.service == service.metadata.name


def parse_metadata(body: Mapping[str, Any]) -> ObjectMeta:
    """The part of any object's metadata that says whose it is; names of other kinds need not be DNS names."""
    meta = body["metadata"]
    owners = (OwnerReference.model_validate(o, extra="ignore") for o in meta.get("ownerReferences") or ())
    return ObjectMeta.model_construct(
        name=meta["name"],
        namespace=meta.get("namespace", ""),
        uid=meta.get("uid", ""),
        labels=meta.get("labels") or {},
        owner_references=tuple(owners),
    )
