"""What the operator last heard of every object that it cares for: passes read this, never the API server.

Watches, lists and the answers to the operator's own writes all end here, in any order: of two states of one
object the newer one stays, and what is known to be deleted does not come back with a late event.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import structlog
from pydantic import ValidationError

from fulcrum_cluster.objects import POD, Object, ObjectKind, kind_of_resource
from fulcrum_core.api import KINDS, PDAssignment, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_operator.reconcile import ServiceKey

R = TypeVar("R", bound=Resource)
Stored = Resource | Object
_Place = tuple[ObjectKind, str]
"""A kind and a namespace."""

_OURS = {kind_of_resource(kind): kind for kind in KINDS}
_STATUS = ("status", "endpoints")
_REMEMBERED = 10_000
"""So many of the deleted are known, the latest: events are late by seconds."""

_log = structlog.get_logger()


class Cache:
    """Objects by kind, namespace and name.

    Args:
        on_change: Called with each service that a change may concern.
    """

    def __init__(self, on_change: Callable[[ServiceKey], None]) -> None:
        self._on_change = on_change
        self._held: dict[_Place, dict[str, Stored]] = {}
        self._gone: dict[tuple[ObjectKind, str, str], int] = {}

    def take(self, kind: ObjectKind, body: Object) -> None:
        """Hold an object as a watch, a list or an answer said it."""
        stored = _stored(kind, body)
        if stored is not None:
            self._put(kind, stored)

    def take_resource(self, obj: Resource) -> None:
        """Hold an object of ours as the store answered it."""
        self._put(kind_of_resource(type(obj)), obj)

    def drop(self, kind: ObjectKind, namespace: str, name: str, *, version: str = "") -> None:
        """Forget an object that was deleted, at `version` if that is known."""
        objects = self._held.get((kind, namespace), {})
        before = objects.get(name)
        at = _number(version) or _version(before)
        if before is not None and _version(before) > at:
            return
        self._gone[kind, namespace, name] = max(at, self._gone.pop((kind, namespace, name), 0))
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        if before is not None:
            del objects[name]
            self._tell(before)

    def relisted(self, kind: ObjectKind, namespace: str, bodies: Iterable[Object], version: str) -> None:
        """Take in a whole list of a kind, in one namespace or in all (""), and forget what it lacks."""
        listed = set()
        for body in bodies:
            meta = body["metadata"]
            listed.add((meta.get("namespace", ""), meta["name"]))
            self.take(kind, body)
        at = _number(version)
        for place, name, stored in list(self._all(kind, namespace)):
            if (place, name) not in listed and _version(stored) <= at:
                self.drop(kind, place, name, version=version)

    def resource(self, kind: type[R], namespace: str, name: str) -> R | None:
        """One object of ours."""
        return cast(R | None, self._held.get((kind_of_resource(kind), namespace), {}).get(name))

    def resources(self, kind: type[R], namespace: str) -> tuple[R, ...]:
        """All objects of one of our kinds in a namespace ("": in all), by namespace and name."""
        found = sorted(self._all(kind_of_resource(kind), namespace), key=lambda item: item[:2])
        return tuple(cast(R, stored) for _, _, stored in found)

    def object(self, kind: ObjectKind, namespace: str, name: str) -> Object | None:
        """One object of any other kind, as far as the operator reads it."""
        return cast(Object | None, self._held.get((kind, namespace), {}).get(name))

    def objects(self, kind: ObjectKind, namespace: str) -> tuple[Object, ...]:
        """All objects of another kind in a namespace, by name."""
        held = self._held.get((kind, namespace), {})
        return tuple(cast(Object, held[name]) for name in sorted(held))

    def services(self) -> tuple[ServiceKey, ...]:
        """Every service that there is."""
        return tuple(
            ServiceKey(service.metadata.namespace, service.metadata.name)
            for service in self.resources(PDService, "")
        )

    def _all(self, kind: ObjectKind, namespace: str) -> Iterator[tuple[str, str, Stored]]:
        for (held, place), objects in self._held.items():
            if held == kind and namespace in ("", place):
                yield from ((place, name, stored) for name, stored in objects.items())

    def _put(self, kind: ObjectKind, stored: Stored) -> None:
        namespace, name = _key(stored)
        objects = self._held.setdefault((kind, namespace), {})
        before, version = objects.get(name), _version(stored)
        if version <= max(_version(before), self._gone.get((kind, namespace, name), 0)):
            return
        self._gone.pop((kind, namespace, name), None)
        objects[name] = stored
        self._tell(stored)

    def _tell(self, stored: Stored) -> None:
        for key in self._concerned(stored):
            self._on_change(key)

    def _concerned(self, stored: Stored) -> Iterable[ServiceKey]:
        namespace, name = _key(stored)
        match stored:
            case PDService() | PDAssignment():
                return (ServiceKey(namespace, name),)
            case PDPool() | PDInstance():
                return (ServiceKey(namespace, stored.spec.service),)
            case QoSTier():
                return tuple(key for key in self.services() if key.namespace == namespace)
            case dict():
                service = stored["metadata"].get("labels", {}).get(SERVICE_LABEL)
                return (ServiceKey(namespace, service),) if service else ()
            case _:
                return ()


def _stored(kind: ObjectKind, body: Object) -> Stored | None:
    ours = _OURS.get(kind)
    if ours is None:
        return _slim(kind, body)
    try:
        return ours.model_validate(body, extra="ignore")
    except ValidationError as error:  # written by a newer version: it stays as it was last read
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        _log.error(
            "object cannot be read",
            kind=kind.kind,
            name=body["metadata"]["name"],
            field=where,
            why=first["msg"],
        )
        return None


def _slim(kind: ObjectKind, body: Object) -> Object:
    """What the operator reads of objects that are not its own kinds: their specs it wrote itself."""
    meta = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    parts = {key: body[key] for key in _STATUS if key in body}
    if kind == POD and "nodeName" in body.get("spec", {}):
        parts["spec"] = {"nodeName": body["spec"]["nodeName"]}
    return {"metadata": meta, **parts}


def _key(stored: Stored) -> tuple[str, str]:
    if isinstance(stored, Resource):
        return stored.metadata.namespace, stored.metadata.name
    meta: Mapping[str, Any] = stored["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _version(stored: Stored | None) -> int:
    if stored is None:
        return 0
    if isinstance(stored, Resource):
        return _number(stored.metadata.resource_version)
    return _number(stored["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """Versions of one API server can be compared as numbers (since 1.35 that is promised)."""
    return int(version) if version.isdigit() else 0
