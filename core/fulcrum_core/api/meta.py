"""Base of all kinds: metadata, conditions, and the formats of durations and times.

Every kind is a `Resource`, and every part of a spec an `ApiModel`. Nothing here knows a single kind.
"""

import functools
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GROUP = "fulcrum.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["fulcrum.dev/v1alpha1"] = "fulcrum.dev/v1alpha1"

# CEL counts in 64 bits of nanoseconds: so many digits that any sum fits, and none that it would cut off.
DURATION_PATTERN = (
    r"^([0-9]{1,6}h)?([0-9]{1,7}m)?([0-9]{1,9}(\.[0-9]{1,9})?s)?([0-9]{1,12}(\.[0-9]{1,6})?ms)?$"
)
_DURATION = re.compile(DURATION_PATTERN)
_DURATION_LENGTH = 32
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_UNITS_S = (3600.0, 60.0, 1.0, 0.001)
TIME_PATTERN = (
    r"^[12][0-9]{3}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$"
)
_TIME = re.compile(TIME_PATTERN)
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_NAME = re.compile(NAME_PATTERN)
_QUALIFIED_NAME_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
CANNOT_CHANGE = "cannot be changed"
EXTERNAL_INPUT = "external input"
"""Validation context of input from users and other programs, in which durations and times are text."""


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `1h30m`, `10s`, `1.5s` or `50ms`.

    Raises:
        ValueError: if it is none.
    """
    if _NUMBER.fullmatch(text):
        raise ValueError(f"has no unit: write {text}s, {text}m or {text}ms")
    match = _DURATION.fullmatch(text)
    if not match or not 0 < len(text) <= _DURATION_LENGTH:
        raise ValueError("is not a duration such as 1s, 50ms or 1h30m")
    hours, minutes, seconds, _, millis, _ = match.groups()
    parts = zip((hours, minutes, seconds, millis), _UNITS_S, strict=True)
    return sum(float(part.rstrip("hms")) * unit_s for part, unit_s in parts if part)


def format_duration(seconds: float) -> str:
    """Format a duration as `parse_duration` reads it: `50ms`, `1.5s`, `1m30s`, `1h30m`.

    From one second on it is rounded to microseconds.
    """
    if seconds < 1:
        return f"{_format_number(seconds * 1000)}ms"
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    parts = (
        f"{hours:.0f}h" if hours else "",
        f"{minutes:.0f}m" if minutes else "",
        f"{_format_number(left)}s" if left else "",
    )
    return "".join(parts)


def _format_number(number: float) -> str:
    """Format a number to the nearest millionth, never with an exponent."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def _validate_duration(value: object, info: ValidationInfo) -> float:
    if isinstance(value, str):
        return parse_duration(value)
    if _is_number(value) and math.isfinite(value):
        return parse_duration(f"{value:g}") if info.context == EXTERNAL_INPUT else float(value)
    raise ValueError("is not a duration such as 1s, 50ms or 1h30m")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_BOUNDS = {
    "minimum": (">=", "is less than"),
    "exclusiveMinimum": (">", "is not greater than"),
    "maximum": ("<=", "is greater than"),
    "exclusiveMaximum": ("<", "is not less than"),
}
# What pydantic leaves in the schema of `Duration | None`, whose bounds it does not know for a number's.
_BOUNDS |= {
    short: _BOUNDS[long]
    for short, long in (
        ("ge", "minimum"),
        ("gt", "exclusiveMinimum"),
        ("le", "maximum"),
        ("lt", "exclusiveMaximum"),
    )
}


def duration_schema_with_bounds(schema: JsonSchemaValue, bounds: JsonSchemaValue) -> JsonSchemaValue:
    """A duration's schema with the bounds of its seconds as CEL rules, and no other bounds."""
    text = {key: value for key, value in schema.items() if key not in _BOUNDS}
    rules = [_cel_bound_rule(bound, bounds[bound]) for bound in _BOUNDS if bound in bounds]
    return {**text, "x-kubernetes-validations": rules} if rules else text


def _cel_bound_rule(bound: str, seconds: float) -> dict[str, str]:
    operator, message = _BOUNDS[bound]
    limit = format_duration(seconds) if seconds else "0s"
    return {"rule": f"duration(self) {operator} duration('{limit}')", "message": f"{message} {limit}"}


class _DurationSchema:
    """A duration in a CRD: text, with the bounds of its seconds as CEL rules."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        numbers = handler(schema)
        text: JsonSchemaValue = {
            "type": "string",
            "pattern": DURATION_PATTERN,
            "maxLength": _DURATION_LENGTH,
            "minLength": 2,
        }
        return duration_schema_with_bounds(text, numbers)


Duration = Annotated[
    float,
    BeforeValidator(_validate_duration),
    PlainSerializer(format_duration, return_type=str),
    _DurationSchema(),
]
"""Seconds in Python, `1s`, `50ms`, `1h30m` in YAML."""


def parse_time(text: str) -> float:
    """Unix seconds of an RFC 3339 time.

    Raises:
        ValueError: if it is none, or its year is not between 1000 and 2999.
    """
    if not _TIME.fullmatch(text):
        raise ValueError("is not an RFC 3339 time such as 2026-01-31T12:00:00Z")
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def format_time(at_s: float) -> str:
    """Format Unix seconds as RFC 3339 with microseconds, as Kubernetes' MicroTime."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def cel_rule(rule: str, message: str) -> dict[str, JsonValue]:
    """Schema extra of a model: a rule between its fields, in CEL, that API servers check.

    The model needs a validator with the same rule, because the store of a local run checks no CEL.
    """
    return cel_rules((rule, message))


def cel_rules(*rules: tuple[str, str]) -> dict[str, JsonValue]:
    """Schema extra of a model: several rules, each with its message."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _validate_time(value: object, info: ValidationInfo) -> float:
    if isinstance(value, str):
        return parse_time(value)
    if _is_number(value) and info.context != EXTERNAL_INPUT:
        return float(value)
    raise ValueError("is not an RFC 3339 time such as 2026-01-31T12:00:00Z")


Time = Annotated[
    float,
    BeforeValidator(_validate_time),
    PlainSerializer(format_time, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "format": "date-time",
            "pattern": TIME_PATTERN,
            # API servers accept a list where a format is required; a CEL rule fails on it.
            "x-kubernetes-validations": [
                {"rule": "self < timestamp('3000-01-01T00:00:00Z')", "message": "is not an RFC 3339 time"}
            ],
        }
    ),
]
"""Unix seconds in Python, RFC 3339 with microseconds in YAML."""


class ApiModel(BaseModel):
    """Base of everything in the API: frozen, camelCase outside, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _normalize_like_api_server(cls, raw: Any) -> Any:
        """Treat a null field as absent, and 2.0 as 2, as API servers do."""
        if not isinstance(raw, Mapping):
            return raw
        known = cls._field_names()
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in raw.items()
            if value is not None or key not in known
        }

    @classmethod
    @functools.cache
    def _field_names(cls) -> frozenset[str]:
        return frozenset(cls.model_fields) | {str(field.alias) for field in cls.model_fields.values()}

    def dump(self) -> dict[str, Any]:
        """As YAML shows it: camelCase, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class OwnerReference(ApiModel):
    """Reference to the owner, with whose deletion this object is deleted."""

    api_version: str = API_VERSION
    kind: str
    name: str
    uid: str
    controller: bool = False


class ObjectMeta(ApiModel):
    """The part of Kubernetes' ObjectMeta that Fulcrum reads. Other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    name: str = Field(min_length=1, max_length=253, pattern=NAME_PATTERN)
    namespace: str = "default"
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def controller(self) -> OwnerReference | None:
        """The owner that manages this object; None if nobody does."""
        return next((owner for owner in self.owner_references if owner.controller), None)

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not _is_qualified_name(key) or (value and not _QUALIFIED_NAME_PART.fullmatch(value)):
                raise ValueError(f"has {key}: {value}, which is not a valid Kubernetes label")
        return labels

    @field_validator("annotations")
    @classmethod
    def _check_annotations(cls, annotations: dict[str, str]) -> dict[str, str]:
        for key in annotations:
            if not _is_qualified_name(key.lower()):
                raise ValueError(f"has {key}, which is not a valid key of a Kubernetes annotation")
        return annotations

    @field_validator("owner_references")
    @classmethod
    def _check_single_controller(cls, owners: tuple[OwnerReference, ...]) -> tuple[OwnerReference, ...]:
        if sum(owner.controller for owner in owners) > 1:
            raise ValueError("has more than one owner that is the controller")
        return owners


def _is_qualified_name(key: str) -> bool:
    """Whether it is the key of a label: `name`, or `prefix/name` with a DNS name as prefix."""
    prefix, slash, name = key.rpartition("/")
    if slash and not (_NAME.fullmatch(prefix) and len(prefix) <= 253):
        return False
    return bool(_QUALIFIED_NAME_PART.fullmatch(name))


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(ApiModel):
    """A state that lasts, with the generation of the spec that it was computed from."""

    type: str = Field(description="Name of the condition.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: str = Field(description="Reason in one word, for programs.")
    message: str = Field(
        default="", description="For people: the object, the numbers, and what happens next."
    )
    observed_generation: int = Field(
        default=0, description="Generation of the spec that the condition was computed from."
    )
    last_transition_time: Time | None = Field(default=None, description="When the status last changed.")


class PrinterColumn(ApiModel):
    """One column of `kubectl get`."""

    name: str
    type: Literal["string", "integer", "number", "boolean", "date"]
    json_path: str
    description: str = ""
    priority: int = 0
    """1: shown by `kubectl get -o wide` only."""


class Resource(ApiModel):
    """Base of the kinds. A kind adds `spec` and `status` models and the columns of `kubectl get`.

    `immutable_fields` are the fields of the spec that cannot change after creation.
    """

    plural: ClassVar[str]
    immutable_fields: ClassVar[tuple[str, ...]] = ()
    short_name: ClassVar[str]
    printer_columns: ClassVar[tuple[PrinterColumn, ...]]

    api_version: Literal["fulcrum.dev/v1alpha1"] = API_VERSION
    kind: str
    metadata: ObjectMeta

    @classmethod
    def kind_name(cls) -> str:
        """The kind as written in manifests."""
        return cls.__name__

    def replace(self, **fields: Any) -> Self:
        """A copy with these fields, not validated again: for fields that are models already."""
        return self.model_copy(update=fields)

    def owner_reference(self) -> OwnerReference:
        """The owner reference of an object that is to be deleted with this one."""
        meta = self.metadata
        return OwnerReference(kind=self.kind, name=meta.name, uid=meta.uid, controller=True)
