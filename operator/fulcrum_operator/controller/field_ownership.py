"""Who changed a field last, as the API server keeps account of it in `managedFields`: pure.

What we apply is ours until somebody else gives a field another value or takes it away: then it is not among
our fields any more. Fields that others add are theirs to keep. So an edit by hand is seen without comparing
values, which the server fills up with defaults and spells in its own way.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

FIELD_MANAGER = "fulcrum-operator"
"""Who applies what stands around a service's engines."""

_COMPARED_METADATA = ("labels", "annotations", "ownerReferences")
_UNTRACKED_FIELDS = ("apiVersion", "kind", "metadata", "status")


def owned_fields(body: Mapping[str, Any]) -> str | None:
    """Our fields of an object, as JSON; None where the server keeps no account of it."""
    entries = body["metadata"].get("managedFields")
    if entries is None:
        return None
    for entry in entries:
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply":
            return json.dumps(entry.get("fieldsV1") or {}, separators=(",", ":"))
    return "{}"


def owns_all_fields(owned: str, wanted: Mapping[str, Any]) -> bool:
    """Whether all that `wanted` says is among these fields."""
    fields = json.loads(owned)
    meta = {name: wanted["metadata"][name] for name in _COMPARED_METADATA if name in wanted["metadata"]}
    parts = {name: part for name, part in wanted.items() if name not in _UNTRACKED_FIELDS}
    return (
        bool(fields)
        and _owns_value(fields.get("f:metadata", {}), meta, whole=False)
        and _owns_value(fields, parts)
    )


def _owns_value(fields: Mapping[str, Any], value: Any, *, whole: bool = True) -> bool:
    """Whether a value is ours. A field without fields of its own is ours as a whole, if it may be."""
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
    """The fields of a list's item: by its keys, of which the server knows those with a default, or itself."""
    for name, found in fields.items():
        kind, _, text = name.partition(":")
        if (kind == "v" and json.loads(text) == item) or (kind == "k" and _has_keys(item, json.loads(text))):
            return dict(found)
    return None


def _has_keys(item: Any, keys: Mapping[str, Any]) -> bool:
    return isinstance(item, Mapping) and all(item.get(key, value) == value for key, value in keys.items())
