"""JSON merge patches (RFC 7386): stores apply them, writers create them from a changed copy.

Documents are plain dictionaries here; conflicts and ownership of fields are the stores'.
"""

from collections.abc import Mapping
from typing import Any


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """`target` with `patch` merged in; null removes a key. Neither argument is changed."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = apply_merge_patch(merged.get(key), value)
    return merged


def create_merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest merge patch that turns `before` into `after`."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif before[key] != value:
            nested = isinstance(before[key], Mapping) and isinstance(value, Mapping)
            patch[key] = create_merge_patch(before[key], value) if nested else value
    return patch
