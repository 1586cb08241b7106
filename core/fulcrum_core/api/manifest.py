"""Parse manifests into kinds; every broken rule becomes an `InvalidInput` with path, value and rule.

Used by the CLI and the stores. YAML is read as kubectl reads it: times stay text, a duplicate key is an
error, and `Off` without quotes is false.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from fulcrum_core.api.env import TokenLiteral
from fulcrum_core.api.meta import EXTERNAL_INPUT, ApiModel, ObjectMeta, Resource
from fulcrum_core.api.registry import find_kind
from fulcrum_core.errors import InvalidInput
from fulcrum_core.validation_rules import describe_rule, shorten_value
from fulcrum_core.yaml_loader import load_documents

R = TypeVar("R", bound=Resource)

_YAML_BOOLEAN_SPELLINGS = {True: ("On", "Yes"), False: ("Off", "No")}
_METADATA_FIELDS = {str(field.alias) for field in ObjectMeta.model_fields.values()} | {
    "deletionGracePeriodSeconds",
    "finalizers",
    "generateName",
    "managedFields",
    "selfLink",
}


def parse_as(kind: type[R], raw: Mapping[str, Any]) -> R:
    """Parse an object of a known kind.

    Raises:
        InvalidInput: for the first broken rule.
    """
    try:
        return kind.model_validate(raw, by_alias=True, by_name=False, context=EXTERNAL_INPUT)
    except ValidationError as error:
        raise first_broken_rule(error, kind) from error


def parse_object(raw: object) -> Resource:
    """Parse one YAML document of any of our kinds."""
    if not isinstance(raw, Mapping):
        raise InvalidInput(
            "manifest", shorten_value(raw), "is not an object with apiVersion, kind, metadata and spec"
        )
    kind, metadata = find_kind(raw.get("kind")), raw.get("metadata")
    if "apiVersion" not in raw:
        raise InvalidInput("apiVersion", "nothing", "is required")
    for key, value in metadata.items() if isinstance(metadata, Mapping) else ():
        if key not in _METADATA_FIELDS:
            raise InvalidInput(
                f"metadata.{key}", shorten_value(value), _unknown_field_rule(str(key), _METADATA_FIELDS)
            )
    return parse_as(kind, raw)


def read_yaml(text: str) -> Any:
    """Return the content of one YAML document; raise `yaml.YAMLError` if the text is not YAML."""
    documents = load_documents(text)
    if len(documents) > 1:
        raise yaml.MarkedYAMLError(problem="has more than one document")
    return documents[0] if documents else None


def load_manifest(text: str, *, source: str) -> tuple[Resource, ...]:
    """Return all objects of a YAML text. Errors name `source` and the number of the document."""
    try:
        documents = [document for document in load_documents(text) if document is not None]
    except yaml.YAMLError as error:
        raise _yaml_error(error, source) from error
    if not documents:
        raise InvalidInput(source, "empty", "holds no object")
    return tuple(_parse_document(document, f"{source}[{index}]") for index, document in enumerate(documents))


def _parse_document(document: object, where: str) -> Resource:
    try:
        return parse_object(document)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.path}", error.value, error.rule) from error


def _yaml_error(error: yaml.YAMLError, source: str) -> InvalidInput:
    mark = getattr(error, "problem_mark", None)
    where = f" line {mark.line + 1}" if mark else ""
    return InvalidInput(source, f"YAML{where}", str(getattr(error, "problem", "") or "cannot be read"))


def first_broken_rule(error: ValidationError, kind: type[Resource]) -> InvalidInput:
    """Return the first error of a validation as path, value and rule.

    An unknown field goes first, as in API servers: a misspelt field often causes a missing one. The rule
    suggests the field, or the quotes, that were probably meant; a value that may be a secret is not shown.
    """
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    value = "nothing" if first["type"] == "missing" else shorten_value(first["input"])
    if isinstance(first.get("ctx", {}).get("error"), TokenLiteral):
        value = "not shown"
    if first["type"] == "extra_forbidden":
        rule = _unknown_field_rule(str(first["loc"][-1]), _fields_at(kind, first["loc"][:-1]))
    else:
        rule = describe_rule(first)
    return InvalidInput(path or "manifest", value, rule + _missing_quotes_hint(first["input"], rule))


def _unknown_field_rule(name: str, fields: Iterable[str]) -> str:
    """The rule for an unknown field, with the field that was probably meant."""
    close = get_close_matches(name, fields, n=1, cutoff=0.7)
    return f"is not a field; did you mean {close[0]}?" if close else "is not a field"


def _fields_at(kind: type[Resource], path: Sequence[int | str]) -> list[str]:
    """The known fields at a path. List indices and mapping keys in the path are skipped."""
    model: type[ApiModel] = kind
    for part in path:
        field = next((each for each in model.model_fields.values() if each.alias == part), None)
        model = (field and _find_model(field.annotation)) or model
    return [str(field.alias) for field in model.model_fields.values()]


def _find_model(annotation: object) -> type[ApiModel] | None:
    """The first model in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _find_model(part))), None)


def _missing_quotes_hint(value: object, rule: str) -> str:
    """Advice for a value that YAML reads as a boolean: `Off` without quotes is false."""
    spellings = _YAML_BOOLEAN_SPELLINGS[value] if isinstance(value, bool) else ()
    meant = next((spelling for spelling in spellings if f"'{spelling}'" in rule), None)
    return f'; without quotes YAML reads {meant} as {str(value).lower()}: write "{meant}"' if meant else ""
