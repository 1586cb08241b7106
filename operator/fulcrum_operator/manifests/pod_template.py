"""A user's `pools[].template`, laid over a pod that the operator made.

It follows Kubernetes' strategic merge patch as far as pods need it: maps merge, the usual lists merge by
their key (containers by name, mounts by path …), every other list replaces, and a null removes.
"""

from collections.abc import Mapping
from typing import Any

_KEYS = {
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


def laid_over(made: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`made` with `patch` over it; neither is changed."""
    merged = dict(made)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(name, made.get(name), value)
    return merged


def _merged(name: str, made: object, patch: object) -> Any:
    if isinstance(patch, Mapping):
        return laid_over(made if isinstance(made, Mapping) else {}, patch)
    key = _KEYS.get(name)
    if key and isinstance(made, list) and isinstance(patch, list):
        return _merged_by(key, made, patch)
    return patch


def _merged_by(key: str, made: list[Any], patch: list[Any]) -> list[Any]:
    """Items of the same key merge in place; all others of the patch come after, in its order."""
    patches = {name: item for item in patch if (name := _name(item, key)) is not None}
    kept = [
        laid_over(item, patches[name]) if (name := _name(item, key)) in patches else item for item in made
    ]
    found = {_name(item, key) for item in made}
    return [*kept, *(item for item in patch if (name := _name(item, key)) is None or name not in found)]


def _name(item: object, key: str) -> str | None:
    """What an item is merged by; None for what is no item of such a list."""
    return str(item[key]) if isinstance(item, Mapping) and key in item else None
