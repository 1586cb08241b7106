"""Merge a user's `pools[].template` into a pod that the operator generated.

Follows Kubernetes' strategic merge patch as far as pods need it: maps merge, the lists below merge by the
key of their items, every other list replaces, and a null removes a field.
"""

from collections.abc import Mapping
from typing import Any

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "hostAliases": "ip",
}
"""Lists that merge, with the key of their items: the merge keys of Kubernetes' PodSpec."""


def apply_template(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A new map: `base` with `patch` merged into it."""
    merged = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(name, base.get(name), value)
    return merged


def _merge_value(name: str, base: object, patch: object) -> Any:
    if isinstance(patch, Mapping):
        return apply_template(base if isinstance(base, Mapping) else {}, patch)
    key = _MERGE_KEYS.get(name)
    if key and isinstance(base, list) and isinstance(patch, list):
        return _merge_list(key, base, patch)
    return patch


def _merge_list(key: str, base: list[Any], patch: list[Any]) -> list[Any]:
    """Items with the same key merge in place; the other items of the patch follow, in its order."""
    patches = {name: item for item in patch if (name := _merge_key_of(item, key)) is not None}
    kept = [
        apply_template(item, patches[name]) if (name := _merge_key_of(item, key)) in patches else item
        for item in base
    ]
    found = {_merge_key_of(item, key) for item in base}
    return [
        *kept,
        *(item for item in patch if (name := _merge_key_of(item, key)) is None or name not in found),
    ]


def _merge_key_of(item: object, key: str) -> str | None:
    """The merge key's value of an item; None if the item has none."""
    return str(item[key]) if isinstance(item, Mapping) and key in item else None
