"""Whether the fields that the operator applied are still its own, from `managedFields`: pure.

A field that another manager changes or removes leaves the operator's set of fields. So a manual edit is found
without comparing values, which the API server completes with defaults and normalises. `children` asks; the
cache keeps only the operator's part of `managedFields`. `fulcrum_cluster.field_ownership` is the other side:
the rules of a store.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

FIELD_MANAGER = "fulcrum-operator"
"""Name under which the operator applies fields."""

NO_FIELDS = "{}"
"""`owned_fields` of an object of which the operator has applied nothing."""

_COMPARED_METADATA = ("labels", "annotations", "ownerReferences")
_UNTRACKED_FIELDS = ("apiVersion", "kind", "metadata", "status")


def owned_fields(body: Mapping[str, Any]) -> str | None:
    """The operator's fields of an object as JSON; None if the object has no managedFields."""
    entries = body["metadata"].get("managedFields")
    if entries is None:
        return None
    for entry in entries:
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply":
            return json.dumps(entry.get("fieldsV1") or {}, separators=(",", ":"))
    return NO_FIELDS


def as_applied_fields(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The managedFields with the fields that the operator created as fields that it applied.

    None if there is nothing to change: the operator created no field, or has applied some already.
    """
    ours = [entry for entry in entries if entry.get("manager") == FIELD_MANAGER]
    created = [e for e in ours if e.get("operation") == "Update" and not e.get("subresource")]
    if len(created) != 1 or any(entry.get("operation") == "Apply" for entry in ours):
        return None
    return [{**entry, "operation": "Apply"} if entry is created[0] else dict(entry) for entry in entries]


def owns_all_fields(owned: str, manifest: Mapping[str, Any]) -> bool:
    """Whether every field of `manifest` is among the fields `owned`."""
    fields = json.loads(owned)
    meta = {name: manifest["metadata"][name] for name in _COMPARED_METADATA if name in manifest["metadata"]}
    parts = {name: part for name, part in manifest.items() if name not in _UNTRACKED_FIELDS}
    return (
        bool(fields)
        and _owns_value(fields.get("f:metadata", {}), meta, whole=False)
        and _owns_value(fields, parts)
    )


def _owns_value(fields: Mapping[str, Any], value: Any, *, whole: bool = True) -> bool:
    """Whether the value is owned. With `whole`, a field without subfields is owned as a whole."""
    if whole and not fields:
        return True
    if isinstance(value, Mapping):
        return all(_owns_field(fields.get(f"f:{name}"), part) for name, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_owns_field(_item_fields(fields, item), item) for item in value)
    return True


def _owns_field(fields: Mapping[str, Any] | None, value: Any) -> bool:
    return fields is not None and _owns_value(fields, value)


def _item_fields(fields: Mapping[str, Any], item: Any) -> Mapping[str, Any] | None:
    """The owned fields of a list item, found by the item's merge keys (`k:`) or by its value (`v:`).

    The API server adds merge keys that have a default; such a key may be absent from our item.
    """
    for name, found in fields.items():
        kind, _, text = name.partition(":")
        if (kind == "v" and json.loads(text) == item) or (kind == "k" and _has_keys(item, json.loads(text))):
            return dict(found)
    return None


def _has_keys(item: Any, keys: Mapping[str, Any]) -> bool:
    return isinstance(item, Mapping) and all(item.get(key, value) == value for key, value in keys.items())
