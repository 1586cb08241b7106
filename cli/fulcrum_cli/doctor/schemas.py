"""Are the kinds in the cluster the ones that this program was made for?"""

from collections.abc import Iterator, Mapping
from typing import Any

from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_core.spelling import format_list

NAME = "kinds"
_INSTALL = "helm upgrade with this version's chart, or kubectl apply --server-side -f crds/"
_SHOWN = 4

Schema = Mapping[str, Any]


def check_kinds(stored: Mapping[str, Schema | None], ours: Mapping[str, Schema]) -> Finding:
    """Compares the CustomResourceDefinitions in the cluster (None: not there) with our own, by name."""
    missing = sorted(name for name in ours if stored.get(name) is None)
    if missing:
        return problem(NAME, f"missing: {', '.join(missing)}", f"install them: {_INSTALL}")
    older, newer, other = [], [], []
    for name, own in sorted(ours.items()):
        there = stored[name]
        assert there is not None
        lacks, has_more = _fields(own) - _fields(there), _fields(there) - _fields(own)
        if not _established(there):
            other.append(f"{name} is not established yet")
        elif lacks:
            older.append(f"{name} has no {_shown(lacks)}")
        elif has_more:
            newer.append(f"{name} has {_shown(has_more)}, which this program does not know")
        elif _schema(own) != _schema(there):
            other.append(f"{name} has other rules")
    if older:
        return problem(
            NAME, f"older than this program: {'; '.join(older)}", f"bring them up to date: {_INSTALL}"
        )
    if newer:
        return warning(NAME, f"newer than this program: {'; '.join(newer)}", "update this program")
    if other:
        return warning(NAME, "; ".join(other), f"bring both to one version: {_INSTALL}")
    return ok(NAME, f"all {len(ours)} kinds are there, as this program knows them")


def _established(stored: Schema) -> bool:
    conditions = stored.get("status", {}).get("conditions")
    return conditions is None or any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def _schema(body: Schema) -> Any:
    """The schema of the version that is stored; what an API server adds of itself is left out."""
    version = next((v for v in body["spec"]["versions"] if v.get("storage")), body["spec"]["versions"][0])
    return _plain(version["schema"]["openAPIV3Schema"])


def _plain(node: Any) -> Any:
    """Without descriptions, and numbers of one type: JSON and YAML tell 1 from 1.0."""
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items() if key != "description"}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    return float(node) if isinstance(node, int) and not isinstance(node, bool) else node


def _fields(body: Schema) -> set[str]:
    return set(_paths(_schema(body), ""))


def _paths(node: Schema, path: str) -> Iterator[str]:
    """The path of every field below the node."""
    for name, child in node.get("properties", {}).items():
        yield f"{path}{name}"
        yield from _paths(child, f"{path}{name}.")
    for inner in ("items", "additionalProperties"):
        if isinstance(child := node.get(inner), Mapping):
            yield from _paths(child, path)


def _shown(fields: set[str]) -> str:
    """The outermost of the fields, a few."""
    outer = sorted(field for field in fields if not any(field.startswith(f"{other}.") for other in fields))
    return format_list(outer, at_most=_SHOWN)
