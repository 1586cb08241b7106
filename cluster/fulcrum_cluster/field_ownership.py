"""Field ownership of server-side apply, for `MemoryStore`: the part of Kubernetes' rules that our kinds need.

A document is a tree of nodes: each key of an object, and each item of a keyed list (pools by name, owner
references by uid); any other list is one value. A field manager owns a set of node paths. Writers that do not
apply (create, patch) share one manager, `UPDATE_MANAGER`, which owns the fields that they change. Pure;
`fulcrum_operator.controller.field_ownership` reads the ownership that a real API server reports.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.merge_patch import apply_merge_patch

FieldPath = tuple[str, ...]
Managers = Mapping[str, frozenset[FieldPath]]
Document = Mapping[str, Any]

UPDATE_MANAGER = ""
"""Owner of the fields that were written by create or patch."""
_OWNED_METADATA = ("labels", "annotations", "ownerReferences")
_LIST_KEYS: Mapping[FieldPath, str] = {("metadata", "ownerReferences"): "uid", ("spec", "pools"): "name"}
_ABSENT = object()


def extract_owned_part(document: Document) -> dict[str, Any]:
    """Return the fields that can have owners: labels, annotations, owner references and spec; lists keyed."""
    metadata = document.get("metadata") or {}
    part: dict[str, Any] = {"metadata": {key: metadata[key] for key in _OWNED_METADATA if key in metadata}}
    if "spec" in document:
        part["spec"] = document["spec"]
    for path, key in _LIST_KEYS.items():
        part = _replace_at(
            part, path, lambda items, path=path, key=key: _index_by_key(items, ".".join(path), key)
        )
    return part


def replace_owned_part(document: Document, part: Document) -> dict[str, Any]:
    """Return the document with another owned part, whose keyed lists become lists again."""
    for path in _LIST_KEYS:
        part = _replace_at(part, path, lambda items: list(items.values()))
    metadata = {key: value for key, value in document["metadata"].items() if key not in _OWNED_METADATA}
    rest = {key: value for key, value in document.items() if key not in ("metadata", "spec")}
    return {**rest, **part, "metadata": {**metadata, **part.get("metadata", {})}}


def merge_applied(live: Document, applied: Document, managers: Managers, manager: str) -> dict[str, Any]:
    """Return the owned part after an apply; a field that only `manager` owned and now omits is removed."""
    others = {path for name, paths in managers.items() if name != manager for path in paths}
    left_out = managers.get(manager, frozenset()) - frozenset(node_paths(applied)) - others
    kept = live
    for path in sorted(left_out):
        kept = _remove_path(kept, path)
    merged: dict[str, Any] = apply_merge_patch(kept, applied)
    return merged


def check_conflicts(
    live: Document, new: Document, applied: Document, managers: Managers, manager: str
) -> None:
    """Raise `Conflict` if an applied field changes and another manager owns it; an equal value is shared."""
    for path in leaf_paths(applied):
        if _value_at(live, path) == _value_at(new, path):
            continue
        owners = [name for name, paths in sorted(managers.items()) if name != manager and path in paths]
        if owners:
            owner = f'field manager "{owners[0]}"' if owners[0] else "a create or patch"
            field, theirs = ".".join(path), _value_at(live, path)
            raise Conflict(f"{field} ({_value_at(new, path)}) is owned by {owner}, which set {theirs}")


def claim_changes(before: Document, after: Document, managers: Managers) -> dict[str, frozenset[FieldPath]]:
    """Return the managers after a create or patch: only `UPDATE_MANAGER` owns the changed fields."""
    written, overwritten = frozenset(_changed_paths(before, after)), frozenset(_changed_paths(after, before))
    ancestors = {path[:length] for path in written for length in range(1, len(path))}
    left = {name: owned - overwritten for name, owned in managers.items()}
    return {**left, UPDATE_MANAGER: left.get(UPDATE_MANAGER, frozenset()) | written | ancestors}


def _changed_paths(before: Document, after: Document, at: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every node in `after` that `before` lacks or has with another value."""
    for key, value in after.items():
        old = before.get(key, _ABSENT)
        if old == value:
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _changed_paths(old, value, (*at, key))
            continue
        yield (*at, key)
        if isinstance(value, dict):
            yield from node_paths(value, (*at, key))


def node_paths(document: Document, at: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every key, also of keys whose value is an object."""
    for key, value in document.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from node_paths(value, (*at, key))


def leaf_paths(document: Document, at: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every key whose value is not an object."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from leaf_paths(value, (*at, key))
        else:
            yield (*at, key)


def _value_at(document: Any, path: FieldPath) -> Any:
    for key in path:
        if not isinstance(document, Mapping) or key not in document:
            return None
        document = document[key]
    return document


def _remove_path(document: Document, path: FieldPath) -> dict[str, Any]:
    head, *rest = path
    if head not in document:
        return dict(document)
    if not rest:
        return {key: value for key, value in document.items() if key != head}
    return {**document, head: _remove_path(document[head], tuple(rest))}


def _replace_at(document: Document, path: FieldPath, change: Any) -> dict[str, Any]:
    """Return the document with the value at `path`, if any, replaced by `change(value)`."""
    head, *rest = path
    value = document.get(head, _ABSENT)
    if value is _ABSENT or (rest and not isinstance(value, dict)):
        return dict(document)
    return {**document, head: _replace_at(value, tuple(rest), change) if rest else change(value)}


def _index_by_key(items: Any, path: str, key: str) -> Any:
    if not isinstance(items, list):
        raise InvalidInput(path, items, "is not a list")
    keyed: dict[str, Any] = {}
    for index, item in enumerate(items):
        name = item.get(key) if isinstance(item, Mapping) else None
        if not isinstance(name, str):
            raise InvalidInput(f"{path}[{index}].{key}", name, "is required")
        if name in keyed:
            raise InvalidInput(f"{path}[{index}].{key}", name, "is used twice")
        keyed[name] = item
    return keyed
