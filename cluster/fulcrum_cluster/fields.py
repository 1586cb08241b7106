"""Who owns which field: server-side apply, kept as simple as the kinds need.

A document is cut into nodes: every key of every object, each item of a list that is keyed (pools by name,
owner references by uid); other lists are atomic. Each field manager owns a set of node paths. Writers that
do not apply (create, patch) share one manager, `UPDATES`: like in Kubernetes, what they change they own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.merge import apply_merge_patch

Path = tuple[str, ...]
Managers = Mapping[str, frozenset[Path]]
Document = Mapping[str, Any]

UPDATES = ""
_METADATA = ("labels", "annotations", "ownerReferences")
_KEYED: Mapping[Path, str] = {("metadata", "ownerReferences"): "uid", ("spec", "pools"): "name"}
_ABSENT = object()


def owned_part(document: Document) -> dict[str, Any]:
    """What managers own of a document: labels, annotations, owner references and spec, with lists keyed."""
    metadata = document.get("metadata") or {}
    part: dict[str, Any] = {"metadata": {key: metadata[key] for key in _METADATA if key in metadata}}
    if "spec" in document:
        part["spec"] = document["spec"]
    for path, key in _KEYED.items():
        part = _replaced(part, path, lambda items, path=path, key=key: _keyed(items, ".".join(path), key))
    return part


def with_owned_part(document: Document, part: Document) -> dict[str, Any]:
    """The document with another owned part; lists are lists again."""
    for path in _KEYED:
        part = _replaced(part, path, lambda items: list(items.values()))
    metadata = {key: value for key, value in document["metadata"].items() if key not in _METADATA}
    rest = {key: value for key, value in document.items() if key not in ("metadata", "spec")}
    return {**rest, **part, "metadata": {**metadata, **part.get("metadata", {})}}


def merge_applied(live: Document, applied: Document, managers: Managers, manager: str) -> dict[str, Any]:
    """The owned part after `manager` applied: what it alone owned and left out now is gone."""
    others = {path for name, paths in managers.items() if name != manager for path in paths}
    left_out = managers.get(manager, frozenset()) - frozenset(nodes(applied)) - others
    kept = live
    for path in sorted(left_out):
        kept = _without(kept, path)
    merged: dict[str, Any] = apply_merge_patch(kept, applied)
    return merged


def check_conflicts(
    live: Document, new: Document, applied: Document, managers: Managers, manager: str
) -> None:
    """`Conflict` if an applied field changes that another manager owns; an equal value is shared."""
    for path in leaves(applied):
        if _at(live, path) == _at(new, path):
            continue
        owners = [name for name, paths in sorted(managers.items()) if name != manager and path in paths]
        if owners:
            owner = f'field manager "{owners[0]}"' if owners[0] else "another writer"
            raise Conflict(
                f"{'.'.join(path)} ({_at(new, path)}) is owned by {owner}, which set {_at(live, path)}"
            )


def claim_changes(before: Document, after: Document, managers: Managers) -> dict[str, frozenset[Path]]:
    """The managers after a plain write: what it changed is `UPDATES`' now and nobody else's."""
    written, overwritten = frozenset(_additions(before, after)), frozenset(_additions(after, before))
    ancestors = {path[:length] for path in written for length in range(1, len(path))}
    left = {name: owned - overwritten for name, owned in managers.items()}
    return {**left, UPDATES: left.get(UPDATES, frozenset()) | written | ancestors}


def _additions(before: Document, after: Document, at: Path = ()) -> Iterator[Path]:
    """The paths in `after` of every node that is not in `before` or has another value there."""
    for key, value in after.items():
        old = before.get(key, _ABSENT)
        if old == value:
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _additions(old, value, (*at, key))
            continue
        yield (*at, key)
        if isinstance(value, dict):
            yield from nodes(value, (*at, key))


def nodes(document: Document, at: Path = ()) -> Iterator[Path]:
    """The path of every key, inner ones too."""
    for key, value in document.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from nodes(value, (*at, key))


def leaves(document: Document, at: Path = ()) -> Iterator[Path]:
    """The path of every key whose value is no object."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key)


def _at(document: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(document, Mapping) or key not in document:
            return None
        document = document[key]
    return document


def _without(document: Document, path: Path) -> dict[str, Any]:
    head, *rest = path
    if head not in document:
        return dict(document)
    if not rest:
        return {key: value for key, value in document.items() if key != head}
    return {**document, head: _without(document[head], tuple(rest))}


def _replaced(document: Document, path: Path, change: Any) -> dict[str, Any]:
    """The document with `change` made to the value at `path`, if there is one."""
    head, *rest = path
    value = document.get(head, _ABSENT)
    if value is _ABSENT or (rest and not isinstance(value, dict)):
        return dict(document)
    return {**document, head: _replaced(value, tuple(rest), change) if rest else change(value)}


def _keyed(items: Any, path: str, key: str) -> Any:
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
