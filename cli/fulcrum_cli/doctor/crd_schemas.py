"""Compares the cluster's CustomResourceDefinitions with those of this program's version.

`examine` calls it with the CRDs that `gather` has read. It updates none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fulcrum_cli.doctor.findings import CheckId, Finding, ok, problem, warning
from fulcrum_core.formatting import format_list

_CHECK = CheckId.CRDS
_INSTALL = "helm upgrade with this version's chart, or kubectl apply --server-side -f crds/"
_FIELDS_NAMED_MAX = 4

Schema = Mapping[str, Any]


def check_crds(installed: Mapping[str, Schema | None], ours: Mapping[str, Schema]) -> Finding:
    """Compare the installed CustomResourceDefinitions (None if missing) with `ours`, by name."""
    missing = sorted(name for name in ours if installed.get(name) is None)
    if missing:
        return problem(_CHECK, f"missing: {', '.join(missing)}", f"install them: {_INSTALL}")
    older, newer, other = [], [], []
    for name, own in sorted(ours.items()):
        theirs = installed[name]
        assert theirs is not None
        missing_fields, extra_fields = _fields(own) - _fields(theirs), _fields(theirs) - _fields(own)
        if not _established(theirs):
            other.append(f"{name} is not established yet")
        elif missing_fields:
            older.append(f"{name} has no {_format_fields(missing_fields)}")
        elif extra_fields:
            newer.append(f"{name} has {_format_fields(extra_fields)}, unknown to this program")
        elif _schema(own) != _schema(theirs):
            other.append(f"{name} has different validation rules")
    if older:
        return problem(_CHECK, f"older than this program: {'; '.join(older)}", f"update them: {_INSTALL}")
    if newer:
        return warning(_CHECK, f"newer than this program: {'; '.join(newer)}", "update this program")
    if other:
        return warning(_CHECK, "; ".join(other), f"use one version for both: {_INSTALL}")
    return ok(_CHECK, f"all {len(ours)} are installed in this program's version")


def _established(installed: Schema) -> bool:
    conditions = installed.get("status", {}).get("conditions")
    return conditions is None or any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def _schema(body: Schema) -> Any:
    """Return the schema of the stored version, without fields that the API server adds."""
    version = next((v for v in body["spec"]["versions"] if v.get("storage")), body["spec"]["versions"][0])
    return _normalise(version["schema"]["openAPIV3Schema"])


def _normalise(node: Any) -> Any:
    """Return the schema without descriptions, and with all numbers as floats so that 1 equals 1.0."""
    if isinstance(node, Mapping):
        return {key: _normalise(value) for key, value in node.items() if key != "description"}
    if isinstance(node, list | tuple):
        return [_normalise(value) for value in node]
    return float(node) if isinstance(node, int) and not isinstance(node, bool) else node


def _fields(body: Schema) -> set[str]:
    return set(_field_paths(_schema(body), ""))


def _field_paths(node: Schema, path: str) -> Iterator[str]:
    """Yield the path of every field below the node."""
    for name, child in node.get("properties", {}).items():
        yield f"{path}{name}"
        yield from _field_paths(child, f"{path}{name}.")
    for inner in ("items", "additionalProperties"):
        if isinstance(child := node.get(inner), Mapping):
            yield from _field_paths(child, path)


def _format_fields(fields: set[str]) -> str:
    """Name the outermost of the fields, at most `_FIELDS_NAMED_MAX`."""
    outer = sorted(field for field in fields if not any(field.startswith(f"{other}.") for other in fields))
    return format_list(outer, at_most=_FIELDS_NAMED_MAX)
