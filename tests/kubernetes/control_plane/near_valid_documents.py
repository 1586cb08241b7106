"""Nearly valid manifests: generated from the schemas of the CRDs, with one or two invalid fields."""

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from fulcrum_core.api import Resource
from fulcrum_core.api.crds import build_crd
from fulcrum_core.api.meta import API_VERSION, DURATION_PATTERN

Node = Mapping[str, Any]
Path = tuple[str | int, ...]

_DURATIONS = (
    *("1s", "0s", "50ms", "1.5s", "0.5ms", "1h30m", "2m", "1h1ms", "90m", "59s", "61s", "0ms", "24h"),
    *("1", "s", "-1s", "+1s", "1d", "1S", "1s1m", "1e3s", ".5s", "1.s", "١s", "1us", "1.5h"),
    *("0.000000001s", "0.0000000001s", "999999h", "1000000h", "99999999999h"),
    *("", "1 s", "1s\n", "1s" * 16, "0" * 31 + "s"),
)
_TIMES = (
    *("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.123456Z", "2026-12-31T23:59:59+01:00"),
    *("2026-01-01T00:00:00.1Z", "2026-01-01T00:00:00.123456789Z", "2026-01-01T00:00:00-23:59"),
    *("2026-01-01", "2026-01-01T00:00:00", "2026-01-01 00:00:00Z", "20260101T000000Z", "soon", ""),
    *("2026-02-30T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01T00:00:60Z", "0000-01-01T00:00:00Z"),
    *("2026-01-01t00:00:00z", "2026-01-01T00:00:00+24:00", "2026-W01-1T00:00:00Z", "0001-01-01T00:00:00Z"),
    *("2026-01-01T00:00Z", "2026-01-01T00:00:00,5Z", "9999-12-31T23:59:59Z", "2026-01-01T00:00:00+0100"),
)
_TEXTS = (
    *("a", "a-b", "a.b", "a-0", "9", "A", "a_b", "-a", "a-", ".a", "a..b", "a/b", "nvidia.com/gpu"),
    *("ä", "9Gi", "1.5Ti", "-1Gi", "0", "00", "$(A)"),
    *("", "a b", "a\n", "9Gi\n", "٩Gi", "9" * 20, "9" * 21),
)
_NAMES = (
    *("chat", "a", "9a", "a-b", "a.b", "A", "a_b", "-a", "a-", "a..b", "a.-b", "a/x", "ä"),
    *("", "a b", "a\n", "a" * 40, "a" * 41, "a" * 63, "a" * 64, "a" * 253, "a" * 254, "a" + ".b" * 100),
)
_LABELS: tuple[tuple[str, Any], ...] = (
    *(
        ("a", "b"),
        ("a", ""),
        ("x.io/a", "B_c.d"),
        ("a", "-b"),
        ("a", "b c"),
        ("", "b"),
        ("-a", "b"),
        ("a", 1),
    ),
    *(("a" * 63, "b" * 63), ("a" * 64, "b"), ("a", "b" * 64), ("X.io/a", "b"), ("/a", "b"), ("a/b/c", "d")),
)
_WRONG: tuple[Any, ...] = (None, True, 0, 1, -1, 1.5, "", "1", [], [1], {}, {"nonsense": 1})


@functools.cache
def schema_of(kind: type[Resource]) -> Node:
    """The schema of the whole object."""
    schema: Node = build_crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def near_valid_documents(kind: type[Resource]) -> Iterator[dict[str, Any]]:
    """Yield the smallest object of a kind with one field at or beyond a bound, missing or mistyped."""
    spec = schema_of(kind)["properties"]["spec"]
    for path, node in _field_paths(spec, ("spec",)):
        for value in (*_values(node), *_WRONG):
            yield _with(_smallest(kind), path, value)
        if "properties" in node:
            yield _with(_smallest(kind), (*path, "nonsense"), 1)
            yield from (_without(_smallest(kind), (*path, name)) for name in node.get("required", ()))
    for name in _NAMES:
        yield _with(_smallest(kind), ("metadata", "name"), name)
    for key, value in _LABELS:
        yield _with(_smallest(kind), ("metadata", "labels"), {key: value})
        yield _with(_smallest(kind), ("metadata", "annotations"), {key: value})
    yield _with(_smallest(kind), ("metadata", "nonsense"), 1)
    yield _with(_smallest(kind), ("nonsense",), 1)
    yield from (_without(_smallest(kind), (key,)) for key in ("spec", "metadata", "kind", "apiVersion"))


@st.composite
def documents(draw: st.DrawFn, kind: type[Resource]) -> dict[str, Any]:
    """An object of a kind: often valid, often with one or two invalid fields."""
    spec = schema_of(kind)["properties"]["spec"]
    places = tuple(_field_paths(spec, ("spec",)))
    document = _smallest(kind)
    for _ in range(draw(st.integers(0, 6))):
        path, node = draw(st.sampled_from(places))
        document = _with(document, path, draw(_good(node)))
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2)))):
        path, node = draw(st.sampled_from(places))
        document = _with(document, path, draw(st.sampled_from((*_values(node), *_WRONG))))
    return document


def _smallest(kind: type[Resource]) -> dict[str, Any]:
    spec = _least(schema_of(kind)["properties"]["spec"])
    head = {"apiVersion": API_VERSION, "kind": kind.kind_name()}
    return {**head, "metadata": {"name": "chat"}, "spec": spec}


def _with(value: Any, path: Path, new: Any) -> Any:
    """Set a nested value; missing parents are created, lists with one item."""
    if not path:
        return copy.deepcopy(new)
    key, *rest = path
    if isinstance(key, int):
        items = value if isinstance(value, list) and value else [None]
        return [_with(items[0], tuple(rest), new), *items[1:]]
    holder = value if isinstance(value, dict) else {}
    return {**holder, key: _with(holder.get(key), tuple(rest), new)}


def _without(value: Any, path: Path) -> Any:
    key, *rest = path
    if isinstance(key, int):
        return [_without(value[0], tuple(rest)), *value[1:]] if value else value
    if not isinstance(value, dict) or key not in value:
        return value
    if not rest:
        return {name: field for name, field in value.items() if name != key}
    return {**value, key: _without(value[key], tuple(rest))}


def _field_paths(node: Node, at: Path) -> Iterator[tuple[Path, Node]]:
    yield at, node
    for name, child in node.get("properties", {}).items():
        yield from _field_paths(child, (*at, name))
    if "items" in node:
        yield from _field_paths(node["items"], (*at, 0))
    if isinstance(node.get("additionalProperties"), Mapping):
        yield from _field_paths(node["additionalProperties"], (*at, "chat-0"))


def _good(node: Node) -> st.SearchStrategy[Any]:
    """Values that the schema of one field allows; rules between fields may refuse them."""
    if node["type"] == "object":
        return _good_object(node)
    if node["type"] == "array":
        return st.lists(_good(node["items"]), max_size=min(3, node.get("maxItems", 3)))
    if node["type"] == "boolean":
        return st.booleans()
    if node["type"] == "string":
        return st.sampled_from(_good_texts(node))
    low, high = node.get("minimum", 0), node.get("maximum", 1000)
    middle = (low + high) / 2 + 0.125 if node["type"] == "number" else (low + high) // 2
    lowest = (low,) if not node.get("exclusiveMinimum") else ()
    return st.sampled_from((*lowest, middle, high, min(high, low + 1)))


def _good_object(node: Node) -> st.SearchStrategy[Any]:
    if "properties" in node:
        required = node.get("required", ())
        fields = {name: _good(child) for name, child in node["properties"].items()}
        return st.fixed_dictionaries({name: fields[name] for name in required})
    if isinstance(node.get("additionalProperties"), Mapping):
        return st.dictionaries(
            st.sampled_from(("chat-0", "chat-1", "x")), _good(node["additionalProperties"]), max_size=2
        )
    return st.just({"spec": {"nodeName": "n1"}})


def _good_texts(node: Node) -> tuple[str, ...]:
    if "enum" in node:
        return tuple(node["enum"])
    if node.get("pattern") == DURATION_PATTERN:
        return ("1s", "50ms", "1.5s", "30s", "1m")
    if node.get("format") == "date-time":
        return _TIMES[:3]
    return ("a", "chat", "a-b")


def _values(node: Node) -> tuple[Any, ...]:
    """Values at and beyond the bounds of one field."""
    kind = node["type"]
    if kind == "string":
        return _texts(node)
    if kind in ("integer", "number"):
        low, high = node.get("minimum", 0), node.get("maximum", 2**31)
        return (low - 1, low, low + 1, high - 1, high, high + 1, low + 0.5, str(low), 10**20)
    if kind == "array":
        least = _least(node["items"])
        return ([], [least], [least, least], [least] * (node.get("maxItems", 4) + 1), [None], {})
    if kind == "object":
        return ({}, _least(node), {**_least(node), "nonsense": 1}, [])
    return (True, False, "true", 0)


def _texts(node: Node) -> tuple[Any, ...]:
    if "enum" in node:
        return (*node["enum"], node["enum"][0].lower(), "Nope", "", True, False)
    if node.get("pattern") == DURATION_PATTERN:
        return (*_DURATIONS, 1, 0.05)
    if node.get("format") == "date-time":
        return (*_TIMES, 1767225600)
    longest = node.get("maxLength", 300)
    return (*_TEXTS, "x" * longest, "x" * (longest + 1), "ä" * longest)


def _least(node: Node) -> Any:
    """The smallest value that the schema of one field allows."""
    kind = node["type"]
    if kind == "object":
        return {name: _least(node["properties"][name]) for name in node.get("required", ())}
    if kind == "string":
        return _good_texts(node)[0]
    return {"array": [], "boolean": False}.get(kind, node.get("minimum", 0))
