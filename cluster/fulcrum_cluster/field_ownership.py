"""Field ownership of server-side apply for `MemoryStore`, as simple as our kinds need it.

A document is cut into nodes: every key of every object, each item of a list that is keyed (pools by name,
owner references by uid); other lists are atomic. Each field manager owns a set of node paths. Writers that
do not apply (create, patch) share one manager, `UPDATE_MANAGER`: like in Kubernetes, what they change they
own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.merge_patch import apply_merge_patch

FieldPath = tuple[str, ...]
Managers = Mapping[str, frozenset[FieldPath]]
Document = Mapping[str, Any]

UPDATE_MANAGER = ""
_OWNED_METADATA = ("labels", "annotations", "ownerReferences")
_LIST_KEYS: Mapping[FieldPath, str] = {("metadata", "ownerReferences"): "uid", ("spec", "pools"): "name"}
_ABSENT = object()


def extract_owned_part(document: Document) -> dict[str, Any]:
    """What managers own of a document: labels, annotations, owner references and spec, with lists keyed."""
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
    """The document with another owned part; lists are lists again."""
    for path in _LIST_KEYS:
        part = _replace_at(part, path, lambda items: list(items.values()))
    metadata = {key: value for key, value in document["metadata"].items() if key not in _OWNED_METADATA}
    rest = {key: value for key, value in document.items() if key not in ("metadata", "spec")}
    return {**rest, **part, "metadata": {**metadata, **part.get("metadata", {})}}


def merge_applied(live: Document, applied: Document, managers: Managers, manager: str) -> dict[str, Any]:
    """The owned part after `manager` applied: what it alone owned and left out now is gone."""
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
    """`Conflict` if an applied field changes that another manager owns; an equal value is shared."""
    for path in leaf_paths(applied):
        if _value_at(live, path) == _value_at(new, path):
            continue
        owners = [name for name, paths in sorted(managers.items()) if name != manager and path in paths]
        if owners:
            owner = f'field manager "{owners[0]}"' if owners[0] else "another writer"
            field, theirs = ".".join(path), _value_at(live, path)
            raise Conflict(f"{field} ({_value_at(new, path)}) is owned by {owner}, which set {theirs}")


def claim_changes(before: Document, after: Document, managers: Managers) -> dict[str, frozenset[FieldPath]]:
    """The managers after a plain write: what it changed is `UPDATE_MANAGER`' now and nobody else's."""
    written, overwritten = frozenset(_changed_paths(before, after)), frozenset(_changed_paths(after, before))
    ancestors = {path[:length] for path in written for length in range(1, len(path))}
    left = {name: owned - overwritten for name, owned in managers.items()}
    return {**left, UPDATE_MANAGER: left.get(UPDATE_MANAGER, frozenset()) | written | ancestors}


def _changed_paths(before: Document, after: Document, at: FieldPath = ()) -> Iterator[FieldPath]:
    """The paths in `after` of every node that is not in `before` or has another value there."""
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
    """The path of every key, inner ones too."""
    for key, value in document.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from node_paths(value, (*at, key))


def leaf_paths(document: Document, at: FieldPath = ()) -> Iterator[FieldPath]:
    """The path of every key whose value is no object."""
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
    """The document with `change` made to the value at `path`, if there is one."""
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
            raise InvalidInput(f"{path}[{index}].{key}", name, "is there twice")
        keyed[name] = item
    return keyed
