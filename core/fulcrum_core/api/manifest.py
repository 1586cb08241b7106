"""From YAML to kinds: every broken rule becomes one line with path, value and rule."""

from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from fulcrum_core.api.meta import Resource
from fulcrum_core.api.registry import kind_of
from fulcrum_core.errors import InvalidInput

R = TypeVar("R", bound=Resource)

_RULES = {
    "extra_forbidden": "is not a field",
    "missing": "is required",
}


def parse_as(kind: type[R], raw: Mapping[str, Any]) -> R:
    """The object that `raw` says, or `InvalidInput` for the first rule it breaks."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _first_rule(error) from error


def parse_object(raw: object) -> Resource:
    """The object that one YAML document says, whatever its kind."""
    if not isinstance(raw, Mapping):
        raise InvalidInput("manifest", raw, "is not an object with apiVersion, kind, metadata and spec")
    return parse_as(kind_of(raw.get("kind")), raw)


def load_manifest(text: str, *, source: str) -> tuple[Resource, ...]:
    """All objects of a YAML text. Errors name `source` and the number of the document."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise InvalidInput(source, f"YAML{where}", str(getattr(error, "problem", "cannot be read"))) from error
    if not documents:
        raise InvalidInput(source, "empty", "holds no object")
    return tuple(_parse_document(document, f"{source}[{index}]") for index, document in enumerate(documents))


def _parse_document(document: object, where: str) -> Resource:
    try:
        return parse_object(document)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.path}", error.value, error.rule) from error


def _first_rule(error: ValidationError) -> InvalidInput:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    rule = _RULES.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    value = "nothing" if first["type"] == "missing" else _short(first["input"])
    return InvalidInput(path or "manifest", value, rule[:1].lower() + rule[1:])


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
