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
    """Items of the same key merge in place; new ones come after, in the patch's order."""
    patches = {_key(item, key): item for item in patch}
    found = {_key(item, key) for item in made}
    kept = [laid_over(item, patches.get(_key(item, key), {})) for item in made]
    return [*kept, *(item for item in patch if _key(item, key) not in found)]


def _key(item: object, key: str) -> object:
    return str(item[key]) if isinstance(item, Mapping) and key in item else id(item)
