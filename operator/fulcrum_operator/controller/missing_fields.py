"""Fields of Fulcrum's kinds that the API server's CRDs lack, because the CRDs are older than the operator.

Several operators can share CRDs, so an operator can be newer than they are. The API server refuses a write
that has a field it does not know and names the field; from then on `cached_store` leaves the field out. What
depends on the field does not work, and the condition Degraded names it. When the CRDs have changed
(`crd_changes`), and from time to time, the field is sent again.
"""

import re
from collections.abc import Mapping
from typing import Any

from fulcrum_core.api import Resource, conditions
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_list
from fulcrum_operator.plan.observed import FailureCause

Path = tuple[str, ...]

UNKNOWN_FIELD = "is not a field"
"""Rule of an error that names a field which the CRDs lack."""
_EACH = "*"
"""Stands for each item of a list, or each key of `_MAPS`."""
_MAPS = frozenset({("spec", "roles")})
"""Maps whose keys are names and not fields."""
_FIELDS_LISTED_MAX = 16


class MissingFields:
    """The missing fields of each kind, as far as refused writes have shown them."""

    def __init__(self) -> None:
        self._paths: dict[type[Resource], dict[Path, bool]] = {}
        """Missing fields of each kind by path. True: leave the field out; False: try to write it again."""

    def note(self, kind: type[Resource], error: InvalidInput) -> bool:
        """Remember the field that a refusal names; False if the refusal has another reason."""
        path = _parse_path(error.path)
        known = self._paths.setdefault(kind, {})
        if error.rule != UNKNOWN_FIELD or known.get(path):
            return False
        known[path] = True
        return True

    def lacks(self, kind: type[Resource], path: Path) -> bool:
        """Whether the field would be left out now."""
        return self._paths.get(kind, {}).get(path, False)

    def prune(self, kind: type[Resource], document: Mapping[str, Any]) -> dict[str, Any]:
        """The document without the fields that are missing, and without parts that are empty then."""
        pruned = dict(document)
        for path, left_out in self._paths.get(kind, {}).items():
            if left_out:
                pruned = _without(pruned, path)
        return pruned

    def note_accepted(self, kind: type[Resource], document: Mapping[str, Any]) -> None:
        """Forget the fields that the API server has accepted now."""
        known = self._paths.get(kind, {})
        for path in [path for path, left_out in known.items() if not left_out]:
            if _without(document, path) != document:
                del known[path]

    def retry_all(self) -> None:
        """Send all fields once more."""
        for known in self._paths.values():
            known.update(dict.fromkeys(known, False))

    def forget_unsent(self) -> None:
        """Forget the fields that no write had since they were to be sent once more."""
        for kind, known in self._paths.items():
            self._paths[kind] = {path: left_out for path, left_out in known.items() if left_out}

    def causes(self) -> tuple[FailureCause, ...]:
        """The cause for the condition Degraded that names the fields; empty if none is missing."""
        names = [
            f"{kind.plural} {'.'.join(path)}"
            for kind, known in sorted(self._paths.items(), key=lambda item: item[0].plural)
            for path in sorted(known)
        ]
        if not names:
            return ()
        listed = format_list(names, at_most=_FIELDS_LISTED_MAX)
        text = f"the CRDs are older than the operator and lack {listed}; apply the operator's CRDs"
        return (FailureCause(conditions.CRDS_OUTDATED, text),)


def _parse_path(text: str) -> Path:
    path: Path = ()
    for part in re.sub(r"\[\d+\]", f".{_EACH}", text).split("."):
        path = (*path, _EACH if path in _MAPS else part)
    return path


def _without(document: Any, path: Path) -> Any:
    head, rest = path[0], path[1:]
    if isinstance(document, list | tuple):
        return [_without(item, rest) for item in document] if head == _EACH and rest else document
    if not isinstance(document, Mapping):
        return document
    keys = list(document) if head == _EACH else [head] if head in document else []
    changed = dict(document)
    for key in keys:
        part = _without(document[key], rest) if rest else None
        if part or part == document[key]:
            changed[key] = part
        else:
            del changed[key]
    return changed
