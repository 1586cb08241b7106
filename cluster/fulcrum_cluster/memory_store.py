"""The store port in memory, with Kubernetes' semantics: for local runs (behind `store_server`) and tests.

No method awaits between reading and writing, so every write is atomic on one event loop. An object is
parsed once, when it is written; all readers share the same frozen model. Who owns which field is decided
in `field_ownership`.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from fulcrum_cluster import field_ownership
from fulcrum_cluster.event_log import EventLog, LoggedChange
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.meta import CANNOT_CHANGE, Resource, format_time
from fulcrum_core.errors import AlreadyExists, Conflict, Gone, InvalidInput, NotFound
from fulcrum_core.merge_patch import apply_merge_patch
from fulcrum_core.ports import Clock, EventType, Listing, WatchEvent

R = TypeVar("R", bound=Resource)
Key = tuple[type[Resource], str, str]

_SYSTEM_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)


@dataclass(frozen=True, slots=True)
class _Entry:
    obj: Resource
    document: Mapping[str, Any]
    managers: field_ownership.Managers


class MemoryStore:
    """`fulcrum_core.ports.Store` in memory.

    Args:
        clock: Source of creation times. Versions start at its unix time in milliseconds, so that a watch
            from before a restart of the store finds its version too old and misses no change.
        history: Number of changes that the log keeps; a watch that falls further behind must list again.
        bookmark_interval_s: Seconds without a change after which a watch gets a bookmark.
        new_uid: Function that returns the uid of a new object.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        history: int = 2048,
        bookmark_interval_s: float = 10.0,
        new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._clock = clock
        self._bookmark_interval_s = bookmark_interval_s
        self._new_uid = new_uid
        self._entries: dict[Key, _Entry] = {}
        self._log = EventLog(start=int(clock.now_s() * 1000), size=history)

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        """Return the object; raise `NotFound` if it does not exist."""
        return cast(R, self._entry(kind, name, namespace).obj)

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """Return all objects of the kind in the namespace ("": all), and the version for a watch."""
        found = [
            entry.obj
            for (of_kind, within, _), entry in self._entries.items()
            if of_kind is kind and namespace in ("", within)
        ]
        found.sort(key=lambda obj: (obj.metadata.namespace, obj.metadata.name))
        return Listing(cast(tuple[R, ...], tuple(found)), str(self._log.last_version))

    async def watch(
        self, kind: type[R], *, namespace: str, since: str
    ) -> AsyncGenerator[WatchEvent[R], None]:
        """Yield every change after the version `since` in order, and bookmarks while nothing changes.

        Raises:
            Gone: if the version is too old, or another store's.
        """
        version = self._parse_version(since)
        while True:
            while version < self._log.last_version:
                record = self._log.change_after(version)
                version += 1
                if record.kind is kind and namespace in ("", record.namespace):
                    yield record.event
            if not await self._log.wait_for_change(version, timeout_s=self._bookmark_interval_s):
                yield WatchEvent(EventType.BOOKMARK, None, str(version))

    async def create(self, obj: R) -> R:
        """Store a new object without its status and return it; raise `AlreadyExists` if the name is used."""
        if obj.metadata.resource_version:
            rule = "must not be set on an object to be created"
            raise InvalidInput("metadata.resourceVersion", obj.metadata.resource_version, rule)
        document = obj.dump()
        managers = field_ownership.claim_changes({}, field_ownership.extract_owned_part(document), {})
        return self._create(type(obj), document, managers)

    async def apply(self, obj: R, *, manager: str) -> R:
        """Apply the fields that were set when `obj` was made; `Conflict` if another manager owns one."""
        return await self.apply_document(type(obj), build_applied_document(obj), manager=manager)

    async def apply_document(self, kind: type[R], document: Mapping[str, Any], *, manager: str) -> R:
        """Apply a user's document: `manager` owns exactly the fields that the document contains."""
        metadata = document.get("metadata") or {}
        applied = field_ownership.extract_owned_part(document)
        entry = self._entries.get((kind, metadata.get("namespace", "default"), metadata.get("name", "")))
        claim = {manager: frozenset(field_ownership.node_paths(applied))}
        if entry is None:
            return self._create(kind, document, claim)
        _check_version(entry, metadata.get("resourceVersion"))
        _check_top_level(kind, document)
        live = field_ownership.extract_owned_part(entry.document)
        part = field_ownership.merge_applied(live, applied, entry.managers, manager)
        new = parse_as(kind, field_ownership.replace_owned_part(entry.document, part))
        stored = new.dump()
        field_ownership.check_conflicts(
            live, field_ownership.extract_owned_part(stored), applied, entry.managers, manager
        )
        return self._update(entry, new, stored, {**entry.managers, **claim})

    async def patch(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """Merge a JSON merge patch into all but status; `Conflict` if the given version is not current."""
        entry = self._entry(kind, name, namespace)
        applied = {
            key: value for key, value in patch.items() if key != "status" or key not in kind.model_fields
        }
        metadata = applied.get("metadata") or {}
        _check_version(entry, resource_version or metadata.get("resourceVersion"))
        _check_identity(entry, metadata)
        merged = apply_merge_patch(entry.document, applied)
        system = {key: value for key, value in entry.document["metadata"].items() if key in _SYSTEM_METADATA}
        own = {
            key: value for key, value in (merged.get("metadata") or {}).items() if key not in _SYSTEM_METADATA
        }
        new = parse_as(kind, {**merged, "metadata": {**own, **system}})
        stored = new.dump()
        before, after = (
            field_ownership.extract_owned_part(entry.document),
            field_ownership.extract_owned_part(stored),
        )
        return self._update(entry, new, stored, field_ownership.claim_changes(before, after, entry.managers))

    async def patch_status(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """Merge a JSON merge patch into status; `patch` has the fields of the status itself."""
        entry = self._entry(kind, name, namespace)
        if "status" not in kind.model_fields:
            raise NotFound(f"{kind.plural} have no status")
        _check_version(entry, resource_version)
        status = apply_merge_patch(entry.document["status"], patch)
        new = parse_as(kind, {**entry.document, "status": status})
        return self._update(entry, new, new.dump(), entry.managers)

    async def delete(self, kind: type[R], name: str, *, namespace: str, uid: str | None = None) -> None:
        """Delete the object, then all objects whose owners no longer exist.

        Raises:
            NotFound: if the object does not exist.
            Conflict: if `uid` is given and is not the object's.
        """
        found = self._entry(kind, name, namespace).obj.metadata.uid
        if uid is not None and uid != found:
            raise Conflict(
                f'{kind.kind_name()} "{name}" has the uid {found}, not {uid}: it was created again'
            )
        self._remove((kind, namespace, name))
        self._collect_garbage()

    def _entry(self, kind: type[Resource], name: str, namespace: str) -> _Entry:
        entry = self._entries.get((kind, namespace, name))
        if entry is None:
            raise NotFound(f'{kind.kind_name()} "{name}" does not exist in namespace "{namespace}"')
        return entry

    def _parse_version(self, since: str) -> int:
        if not since.isdecimal() or int(since) > self._log.last_version:
            raise Gone(f"resourceVersion {since} was not issued by this store: list again")
        return int(since)

    def _create(self, kind: type[R], document: Mapping[str, Any], managers: field_ownership.Managers) -> R:
        given = {
            key: value for key, value in document.items() if key != "status" or key not in kind.model_fields
        }
        metadata = {
            **(document.get("metadata") or {}),
            "uid": self._new_uid(),
            "creationTimestamp": format_time(self._clock.now_s()),
            "deletionTimestamp": None,
        }
        new = parse_as(kind, {**given, "metadata": metadata})
        if _key(new) in self._entries:
            raise AlreadyExists(f'{new.kind} "{new.metadata.name}" already exists')
        return self._append_change(EventType.ADDED, new, new.dump(), managers, generation=1)

    def _update(
        self, entry: _Entry, new: R, document: dict[str, Any], managers: field_ownership.Managers
    ) -> R:
        """Replace `entry` by `new`; a write that changes nothing emits no event."""
        _check_immutable(entry, document)
        if document == entry.document:
            self._entries[_key(new)] = replace(entry, managers=managers)
            return cast(R, entry.obj)
        generation = entry.obj.metadata.generation + (document["spec"] != entry.document["spec"])
        return self._append_change(EventType.MODIFIED, new, document, managers, generation=generation)

    def _append_change(
        self,
        event: EventType,
        new: R,
        document: dict[str, Any],
        managers: field_ownership.Managers,
        *,
        generation: int,
    ) -> R:
        version = str(self._log.last_version + 1)
        stamp = {"resource_version": version, "generation": generation}
        new = new.replace(metadata=new.metadata.model_copy(update=stamp))
        document["metadata"] |= {"resourceVersion": version, "generation": generation}
        self._entries[_key(new)] = _Entry(new, document, managers)
        self._log.append(LoggedChange(type(new), new.metadata.namespace, WatchEvent(event, new, version)))
        if new.metadata.owner_references:
            self._collect_garbage()
        return new

    def _remove(self, key: Key) -> None:
        last = self._entries.pop(key).obj
        version = str(self._log.last_version + 1)
        last = last.replace(metadata=last.metadata.model_copy(update={"resource_version": version}))
        self._log.append(LoggedChange(key[0], key[1], WatchEvent(EventType.DELETED, last, version)))

    def _collect_garbage(self) -> None:
        """Remove objects whose owners were all deleted, then the objects that those owned."""
        while orphans := tuple(self._orphans()):
            for key in orphans:
                self._remove(key)

    def _orphans(self) -> Iterator[Key]:
        alive = {entry.obj.metadata.uid for entry in self._entries.values()}
        for key, entry in self._entries.items():
            owners = entry.obj.metadata.owner_references
            if owners and not any(owner.uid in alive for owner in owners):
                yield key


def build_applied_document(obj: Resource) -> dict[str, Any]:
    """Return the document that applies `obj`: the fields that were set when it was made, without status."""
    document = obj.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_unset=True, exclude={"status"}
    )
    metadata = {**document["metadata"], "name": obj.metadata.name, "namespace": obj.metadata.namespace}
    return {**document, "apiVersion": obj.api_version, "kind": obj.kind, "metadata": metadata}


def _key(obj: Resource) -> Key:
    return type(obj), obj.metadata.namespace, obj.metadata.name


def _check_version(entry: _Entry, version: object) -> None:
    current = entry.obj.metadata.resource_version
    if version and version != current:
        name = f'{entry.obj.kind} "{entry.obj.metadata.name}"'
        raise Conflict(f"{name} changed: resourceVersion is {current}, the write was based on {version}")


def _check_identity(entry: _Entry, metadata: Mapping[str, Any]) -> None:
    for key in ("name", "namespace", "uid"):
        if metadata.get(key, entry.document["metadata"][key]) != entry.document["metadata"][key]:
            raise InvalidInput(f"metadata.{key}", metadata[key], CANNOT_CHANGE)


def _check_immutable(entry: _Entry, document: Mapping[str, Any]) -> None:
    for name in entry.obj.immutable_fields:
        if document["spec"].get(name) != entry.document["spec"].get(name):
            raise InvalidInput(f"spec.{name}", document["spec"].get(name), CANNOT_CHANGE)


def _check_top_level(kind: type[Resource], document: Mapping[str, Any]) -> None:
    known = {"apiVersion", "kind", "metadata", "spec", "status"}
    for key, value in document.items():
        if key not in known:
            raise InvalidInput(key, value, "is not a field")
    for key, expected in (
        ("kind", kind.kind_name()),
        ("apiVersion", kind.model_fields["api_version"].default),
    ):
        if document.get(key) != expected:
            raise InvalidInput(key, document.get(key), f"is not {expected}")
