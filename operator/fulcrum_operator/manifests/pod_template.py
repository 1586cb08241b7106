"""Merge a user's template into a pod that the operator generated, by Kubernetes' strategic merge patch.

No Python library implements it, and the API server patches only objects that exist (docs/decisions/0034). A
test has a real API server apply the same patches and compares the results. Only the order of a merged list
differs: items that a template adds come last, so that the engine remains the first container and variables
may refer to ours. `engine_pod`, `children` and `model_reader_pod` merge with it; what a template may not do
is checked in `fulcrum_core.api.pod_template`.
"""

from collections.abc import Mapping
from typing import Any

from fulcrum_core.errors import InvalidInput

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "hostAliases": "ip",
}
"""Lists that merge, with the key of their items: the merge keys of Kubernetes' PodSpec."""
_ACCOUNT_FIELDS = ("serviceAccountName", "automountServiceAccountToken")
_DIRECTIVE = "$patch"
_RETAIN_KEYS = "$retainKeys"
_MERGE, _REPLACE, _DELETE = "merge", "replace", "delete"


def apply_template(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A new map: `base` with `patch` merged into it.

    Maps merge, the lists with a merge key merge by it, every other list replaces, and a null removes a
    field. `$patch: replace` and `$patch: delete` replace or delete the map, or the list, in which they are;
    `$retainKeys` lists the only fields that a map keeps.

    Raises:
        InvalidInput: for another directive of strategic merge patch.
    """
    return _merge_map(base, patch) or {}


def require_map(value: object, path: str) -> dict[str, Any]:
    """A part of the merged manifest that has to be a map; a template may set it to null.

    Raises:
        InvalidInput: if it is anything else.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    raise InvalidInput(f"template.{path}", value, "must be a map")


def keep_tolerations(spec: object, ours: list[dict[str, Any]]) -> None:
    """Add our tolerations to those of the template, which replace the whole list."""
    if isinstance(spec, dict) and isinstance(given := spec.get("tolerations", []), list):
        spec["tolerations"] = [*given, *(toleration for toleration in ours if toleration not in given)]
        if not spec["tolerations"]:
            del spec["tolerations"]


def keep_account_and_program(spec: object, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The merged spec of a pod with the ServiceAccount of `ours`, the spec without templates.

    Whoever may write a template could otherwise run a pod with the permissions of any account of its
    namespace.

    Raises:
        InvalidInput: if the template has removed our first container, or its image.
    """
    kept = require_map(spec, "spec")
    name = ours["containers"][0]["name"]
    containers = kept.get("containers")
    named = containers if isinstance(containers, list) else []
    if not any(isinstance(c, dict) and c.get("name") == name and c.get("image") for c in named):
        raise InvalidInput("template.spec.containers", containers, f"must keep the container {name}")
    kept.pop("serviceAccount", None)
    return {**kept, **{field: ours[field] for field in _ACCOUNT_FIELDS}}


def _merge_map(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The merged map; None if the patch deletes it."""
    directive = _directive_of(patch)
    if directive == _DELETE:
        return None
    merged = {} if directive == _REPLACE else dict(base)
    for name, value in patch.items():
        if name in (_DIRECTIVE, _RETAIN_KEYS):
            continue
        if name.startswith("$"):
            rule = f"is not supported: write {_DIRECTIVE} or {_RETAIN_KEYS}"
            raise InvalidInput("template", name, rule)
        changed = None if value is None else _merge_value(name, merged.get(name), value)
        if changed is None:
            merged.pop(name, None)
        else:
            merged[name] = changed
    retained = patch.get(_RETAIN_KEYS)
    if not isinstance(retained, list):
        return merged
    return {name: part for name, part in merged.items() if name in retained}


def _directive_of(patch: Mapping[str, Any]) -> str:
    directive = str(patch.get(_DIRECTIVE, _MERGE))
    if directive not in (_MERGE, _REPLACE, _DELETE):
        raise InvalidInput(f"template: {_DIRECTIVE}", directive, f"is not {_REPLACE}, {_DELETE} or {_MERGE}")
    return directive


def _merge_value(name: str, base: object, patch: object) -> Any:
    if isinstance(patch, Mapping):
        return _merge_map(base if isinstance(base, Mapping) else {}, patch)
    key = _MERGE_KEYS.get(name)
    if key and isinstance(patch, list):
        return _merge_list(key, base if isinstance(base, list) else [], patch)
    return patch


def _merge_list(key: str, base: list[Any], patch: list[Any]) -> list[Any]:
    """Items with the same key merge in place; the other items of the patch follow, in its order.

    An item with `$patch: replace` replaces the whole list by the patch's other items, an item with
    `$patch: delete` removes its namesake.
    """
    directives = {id(item): each for item in patch if (each := _directive_in_item(item)) != _MERGE}
    items = [item for item in patch if id(item) not in directives]
    if _REPLACE in directives.values():
        return items
    deleted = {_merge_key_of(item, key) for item in patch if directives.get(id(item)) == _DELETE}
    patches = {name: item for item in items if (name := _merge_key_of(item, key)) is not None}
    found = {name: item for item in base if (name := _merge_key_of(item, key)) is not None}
    kept = (item for item in base if _merge_key_of(item, key) not in deleted - {None})
    merged = [_merge_item(item, patches.get(_merge_key_of(item, key) or "")) for item in kept]
    added = (item for item in items if (name := _merge_key_of(item, key)) is None or name not in found)
    return [item for item in (*merged, *(_merge_item({}, item) for item in added)) if item is not None]


def _directive_in_item(item: object) -> str:
    return _directive_of(item) if isinstance(item, Mapping) else _MERGE


def _merge_item(base: Any, patch: Any) -> Any:
    if patch is None:
        return base
    return _merge_map(base, patch) if isinstance(patch, Mapping) and isinstance(base, Mapping) else patch


def _merge_key_of(item: object, key: str) -> str | None:
    """The merge key's value of an item; None if the item has none."""
    return str(item[key]) if isinstance(item, Mapping) and key in item else None
