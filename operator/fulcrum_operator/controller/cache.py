"""Last known state of every object that the operator watches; reconciles read it instead of the API server.

Watches, lists and the results of the operator's own writes arrive here in any order. Of two versions of an
object the newer one stays, and a late event does not restore a deleted object. `kopf_feed` and `leader` fill
the cache; the cache itself never calls the API server. Programs that only watch Fulcrum's kinds use
`fulcrum_cluster.informer` instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
from pydantic import ValidationError

from fulcrum_cluster.objects import POD, SERVICE, Object, ObjectKind, kind_of_resource
from fulcrum_core.api import KINDS, ObjectMeta, PDAssignment, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_core.api.labels import ROUTER_LABEL, SERVICE_LABEL
from fulcrum_core.api.manifest import first_broken_rule
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.field_ownership import owned_fields

R = TypeVar("R", bound=Resource)
CachedObject = Resource | Object
_KindInNamespace = tuple[ObjectKind, str]

_MODELS = {kind_of_resource(kind): kind for kind in KINDS}
_SERVICE = kind_of_resource(PDService)
_READ_FIELDS = ("status", "endpoints", "addressType")
OWNED_FIELDS = "owned"
"""Key under which a cached child, such as a Deployment, has the fields that the operator applied, as JSON."""
_DELETED_MAX = 10_000
"""Number of deletions that are recorded, the latest ones: events can arrive seconds late."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UnreadableObject:
    """A stored Fulcrum object that its model cannot parse, such as one of another version."""

    namespace: str
    name: str
    kind: type[Resource]
    uid: str
    version: int
    service: str | None
    """Name of its service; None for a QoSTier, which every service of the namespace can use."""
    error: str
    """The field and the rule that it breaks."""

    @property
    def meta(self) -> ObjectMeta:
        """The metadata that an Event about this object needs."""
        return ObjectMeta.model_construct(namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def description(self) -> str:
        """The object, the field and the rule that it breaks."""
        return f"{self.kind.kind_name()} {self.name} cannot be read: {self.error}"


class ObjectCache:
    """Objects by kind, namespace and name.

    "Resource" means a kind of Fulcrum, parsed by its model; "object" means any kind, as the API's JSON.

    Args:
        on_change: Called with each service that a change may affect.
    """

    def __init__(self, on_change: Callable[[ServiceKey], None]) -> None:
        self._on_change = on_change
        self._objects: dict[_KindInNamespace, dict[str, CachedObject]] = {}
        self._deleted_versions: dict[tuple[ObjectKind, str, str], int] = {}
        self._unreadable: dict[tuple[ObjectKind, str, str], UnreadableObject] = {}

    def put_object(self, kind: ObjectKind, body: Object) -> None:
        """Store an object from a watch, a list or the result of a write, unless a newer version is known."""
        stored = _parse_body(kind, body)
        if isinstance(stored, UnreadableObject):
            self._put_unreadable(kind, stored)
        else:
            self._put(kind, stored)

    def put_resource(self, obj: Resource) -> None:
        """Store a Fulcrum object from the result of a write, unless a newer version is known."""
        self._put(kind_of_resource(type(obj)), obj)

    def remove(self, kind: ObjectKind, namespace: str, name: str, *, version: str = "") -> None:
        """Remove a deleted object unless a newer one is cached; `version`: that of the deletion, if known."""
        objects = self._objects.get((kind, namespace), {})
        before = objects.get(name)
        self._clear_unreadable(kind, namespace, name, version=_version_number(version))
        at = _version_number(version) or _version(before)
        if before is not None and _version(before) > at:
            return
        self._deleted_versions[kind, namespace, name] = max(
            at, self._deleted_versions.pop((kind, namespace, name), 0)
        )
        if len(self._deleted_versions) > _DELETED_MAX:
            del self._deleted_versions[next(iter(self._deleted_versions))]
        if before is not None:
            del objects[name]
            self._notify(before)

    def replace_all(self, kind: ObjectKind, namespace: str, bodies: Iterable[Object], version: str) -> None:
        """Apply a complete list of one kind in a namespace ("": in all), taken at `version`.

        Cached objects that are not in the list are removed, except those newer than `version`.
        """
        listed = set()
        for body in bodies:
            meta = body["metadata"]
            listed.add((meta.get("namespace", ""), meta["name"]))
            self.put_object(kind, body)
        at = _version_number(version)
        for object_namespace, name, stored in list(self._all(kind, namespace)):
            if (object_namespace, name) not in listed and _version(stored) <= at:
                self.remove(kind, object_namespace, name, version=version)
        for found_kind, object_namespace, name in list(self._unreadable):
            if (
                found_kind == kind
                and namespace in ("", object_namespace)
                and (object_namespace, name) not in listed
            ):
                self._clear_unreadable(kind, object_namespace, name, version=at)

    def get_resource(self, kind: type[R], namespace: str, name: str) -> R | None:
        """Return a Fulcrum object; None if it does not exist or was never readable."""
        return cast(R | None, self._objects.get((kind_of_resource(kind), namespace), {}).get(name))

    def list_resources(self, kind: type[R], namespace: str) -> tuple[R, ...]:
        """List all objects of a Fulcrum kind in a namespace ("": in all), sorted by namespace and name."""
        found = sorted(self._all(kind_of_resource(kind), namespace), key=lambda item: item[:2])
        return tuple(cast(R, stored) for _, _, stored in found)

    def get_object(self, kind: ObjectKind, namespace: str, name: str) -> Object | None:
        """Return the fields that the operator reads of a Kubernetes object; None if it does not exist."""
        return cast(Object | None, self._objects.get((kind, namespace), {}).get(name))

    def list_objects(self, kind: ObjectKind, namespace: str) -> tuple[Object, ...]:
        """List all objects of a Kubernetes kind, such as Pod, in one namespace, sorted by name."""
        objects = self._objects.get((kind, namespace), {})
        return tuple(cast(Object, objects[name]) for name in sorted(objects))

    def unreadable_objects(self, key: ServiceKey) -> tuple[UnreadableObject, ...]:
        """List the unreadable objects of a service, and the unreadable QoSTiers of its namespace."""
        found = (each for each in self._unreadable.values() if each.namespace == key.namespace)
        return tuple(each for each in found if each.service in (None, key.name))

    def list_services(self) -> tuple[ServiceKey, ...]:
        """List the keys of all PDServices, readable or not."""
        readable = {
            ServiceKey(object_namespace, name) for object_namespace, name, _ in self._all(_SERVICE, "")
        }
        unreadable = {
            ServiceKey(object_namespace, name)
            for kind, object_namespace, name in self._unreadable
            if kind == _SERVICE
        }
        return tuple(sorted(readable | unreadable))

    def _services_of(self, namespace: str) -> tuple[ServiceKey, ...]:
        return tuple(key for key in self.list_services() if key.namespace == namespace)

    def _all(self, kind: ObjectKind, namespace: str) -> Iterator[tuple[str, str, CachedObject]]:
        for (found_kind, object_namespace), objects in self._objects.items():
            if found_kind == kind and namespace in ("", object_namespace):
                yield from ((object_namespace, name, stored) for name, stored in objects.items())

    def _put(self, kind: ObjectKind, stored: CachedObject) -> None:
        namespace, name = _namespaced_name(stored)
        objects = self._objects.setdefault((kind, namespace), {})
        before, version = objects.get(name), _version(stored)
        if version <= max(_version(before), self._deleted_versions.get((kind, namespace, name), 0)):
            return
        self._deleted_versions.pop((kind, namespace, name), None)
        self._clear_unreadable(kind, namespace, name, version=version)
        objects[name] = stored
        self._notify(stored)

    def _put_unreadable(self, kind: ObjectKind, found: UnreadableObject) -> None:
        """Record that this version cannot be parsed; the last readable version stays cached."""
        key = kind, found.namespace, found.name
        cached = self._objects.get((kind, found.namespace), {}).get(found.name)
        known = self._unreadable.get(key)
        newest = max(_version(cached), self._deleted_versions.get(key, 0), known.version if known else 0)
        if found.version <= newest:
            return
        self._unreadable[key] = found
        if known is None or known.error != found.error:
            _log.error(
                "object cannot be parsed",
                kind=kind.kind,
                name=found.name,
                namespace=found.namespace,
                error=found.error,
            )
            self._notify_unreadable(found)

    def _clear_unreadable(self, kind: ObjectKind, namespace: str, name: str, *, version: int) -> None:
        known = self._unreadable.get((kind, namespace, name))
        if known is not None and (not version or known.version <= version):
            del self._unreadable[kind, namespace, name]
            self._notify_unreadable(known)

    def _notify_unreadable(self, found: UnreadableObject) -> None:
        if found.service is not None:
            self._on_change(ServiceKey(found.namespace, found.service))
            return
        for key in self._services_of(found.namespace):
            self._on_change(key)

    def _notify(self, stored: CachedObject) -> None:
        for key in self._affected_services(stored):
            self._on_change(key)

    def _affected_services(self, stored: CachedObject) -> Iterable[ServiceKey]:
        namespace, name = _namespaced_name(stored)
        match stored:
            case PDService() | PDAssignment():
                return (ServiceKey(namespace, name),)
            case PDPool() | PDInstance():
                return (ServiceKey(namespace, stored.spec.service),)
            case QoSTier():
                return self._services_of(namespace)
            case dict():
                labels = stored["metadata"].get("labels", {})
                service = labels.get(SERVICE_LABEL) or labels.get(ROUTER_LABEL)
                return (ServiceKey(namespace, service),) if service else ()
            case _:
                return ()


def _parse_body(kind: ObjectKind, body: Object) -> CachedObject | UnreadableObject:
    ours = _MODELS.get(kind)
    if ours is None:
        return _keep_read_fields(kind, body)
    try:
        return ours.model_validate(body, extra="ignore")
    except ValidationError as error:
        meta = body["metadata"]
        return UnreadableObject(
            namespace=meta.get("namespace", ""),
            name=meta["name"],
            kind=ours,
            uid=meta.get("uid", ""),
            version=_version_number(meta.get("resourceVersion", "")),
            service=_service_of(ours, body),
            error=str(first_broken_rule(error, ours)),
        )


def _service_of(kind: type[Resource], body: Object) -> str | None:
    meta = body["metadata"]
    if kind is QoSTier:
        return None
    if kind in (PDService, PDAssignment):
        return str(meta["name"])
    return str((meta.get("labels") or {}).get(SERVICE_LABEL) or (body.get("spec") or {}).get("service"))


def _keep_read_fields(kind: ObjectKind, body: Object) -> Object:
    """Drop the fields of a Kubernetes object that the operator never reads, such as the spec it applied."""
    meta = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    parts = {key: body[key] for key in _READ_FIELDS if key in body}
    if kind == POD:
        if spec := _keep_pod_spec(body):
            parts["spec"] = spec
    elif kind == SERVICE:
        parts["spec"] = {"ipFamilies": body.get("spec", {}).get("ipFamilies")}
    if kind != POD and (owned := owned_fields(body)) is not None:
        parts[OWNED_FIELDS] = owned
    return {"metadata": meta, **parts}


def _keep_pod_spec(pod: Object) -> Object:
    """The node of a pod and, of a router, the arguments."""
    spec = pod.get("spec", {})
    kept = {"nodeName": spec["nodeName"]} if "nodeName" in spec else {}
    if ROUTER_LABEL in (pod["metadata"].get("labels") or {}):
        found = spec.get("containers", ())
        kept["containers"] = [{"name": each["name"], "args": each.get("args", [])} for each in found]
    return kept


def _namespaced_name(stored: CachedObject) -> tuple[str, str]:
    if isinstance(stored, Resource):
        return stored.metadata.namespace, stored.metadata.name
    meta: Mapping[str, Any] = stored["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _version(stored: CachedObject | None) -> int:
    if stored is None:
        return 0
    if isinstance(stored, Resource):
        return _version_number(stored.metadata.resource_version)
    return _version_number(stored["metadata"].get("resourceVersion", ""))


def _version_number(version: str) -> int:
    """Resource versions of one API server compare as numbers (guaranteed since Kubernetes 1.35)."""
    return int(version) if version.isdigit() else 0
