"""The page of the kinds: every field of every kind, from the CRDs that the API server gets.

`__main__` writes it.
"""

import json
from collections.abc import Iterator
from typing import Any

from fulcrum_core.api.crds import build_crd
from fulcrum_core.api.registry import KINDS
from tools.reference.markdown import code, table

_INTRODUCTION = """# Kinds

All kinds are in the API group `fulcrum.dev`, version `v1alpha1`. `kubectl explain pds.spec` shows the
same texts. `[]` marks the items of a list, `{}` the values of a map.
"Errors" are the messages with which the API server refuses a value.

"""


def render_page() -> str:
    """Return the page: a section for each kind, with a table of its fields."""
    return _INTRODUCTION + "\n".join(_render_kind(crd) for crd in map(build_crd, KINDS))


def _render_kind(crd: dict[str, Any]) -> str:
    names = crd["spec"]["names"]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    short = ", ".join(code(name) for name in names.get("shortNames", []))
    rows = [
        row
        for part in ("spec", "status")
        if part in schema["properties"]
        for row in _list_fields(part, schema["properties"][part])
    ]
    head = f"## {names['kind']}\n\n{schema['description']} Short name: {short}.\n\n"
    return head + table(("field", "type", "default", "meaning"), rows)


def _list_fields(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        inner_path = f"{path}.{name}"
        default = "required" if name in required else _format_default(field)
        yield code(inner_path), _describe_type(field), default, _describe(field)
        yield from _list_inner(inner_path, field)


def _list_inner(path: str, field: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    if "properties" in field:
        yield from _list_fields(path, field)
    elif "items" in field:
        yield from _list_fields(f"{path}[]", field["items"])
    elif isinstance(field.get("additionalProperties"), dict):
        yield from _list_fields(f"{path}{{}}", field["additionalProperties"])


def _format_default(field: dict[str, Any]) -> str:
    return code(json.dumps(field["default"])) if "default" in field else ""


def _describe_type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(code(str(value)) for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_describe_type(field['items'])}"
    return kind + _describe_limits(field)


def _describe_limits(field: dict[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is None and high is None:
        return ""
    if high is None:
        return f", at least {low:g}"
    return f", at most {high:g}" if low is None else f", {low:g} to {high:g}"


def _describe(field: dict[str, Any]) -> str:
    description = str(field.get("description", ""))
    errors = ", ".join(f'"{rule["message"]}"' for rule in field.get("x-kubernetes-validations", ()))
    return f"{description} Errors: {errors}." if errors else description
