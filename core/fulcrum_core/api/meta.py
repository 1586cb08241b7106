"""What every kind shares: metadata, conditions, and the spelling of durations and times."""

import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GROUP = "fulcrum.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["fulcrum.dev/v1alpha1"] = "fulcrum.dev/v1alpha1"

_DURATION = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?$")
DURATION_PATTERN = r"^([0-9]+h)?([0-9]+m)?([0-9]+(\.[0-9]+)?s)?([0-9]+(\.[0-9]+)?ms)?$"


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `1h30m`, `10s`, `1.5s` or `50ms`.

    Raises:
        ValueError: if it is none.
    """
    match = _DURATION.match(text)
    if not match or not text:
        raise ValueError("is not a duration such as 1s, 50ms or 1h30m")
    hours, minutes, seconds, millis = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds + millis / 1000


def format_duration(seconds: float) -> str:
    """The shortest spelling that `parse_duration` reads back: `50ms`, `1.5s`, `2m`, `1h30m`."""
    if seconds < 1:
        return f"{_plain(seconds * 1000)}ms"
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    parts = (
        f"{hours:.0f}h" if hours else "",
        f"{minutes:.0f}m" if minutes else "",
        f"{_plain(left)}s" if left else "",
    )
    return "".join(parts)


def _plain(number: float) -> str:
    """To the nearest millionth, never with an exponent."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def _duration(value: object) -> float:
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError("is not a duration such as 1s, 50ms or 1h30m")


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


def bounded_duration(schema: JsonSchemaValue, bounds: JsonSchemaValue) -> JsonSchemaValue:
    """A duration's schema with the bounds of its seconds as CEL rules, and no other bounds."""
    text = {key: value for key, value in schema.items() if key not in _BOUNDS}
    rules = [_bound_rule(bound, bounds[bound]) for bound in _BOUNDS if bound in bounds]
    return {**text, "x-kubernetes-validations": rules} if rules else text


def _bound_rule(bound: str, seconds: float) -> dict[str, str]:
    operator, words = _BOUNDS[bound]
    limit = format_duration(seconds) if seconds else "0s"
    return {"rule": f"duration(self) {operator} duration('{limit}')", "message": f"{words} {limit}"}


class _DurationSchema:
    """A duration in a CRD: text, with the bounds of its seconds as CEL rules."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        numbers = handler(schema)
        text: JsonSchemaValue = {
            "type": "string",
            "pattern": DURATION_PATTERN,
            "maxLength": 32,
            "minLength": 2,
        }
        return bounded_duration(text, numbers)


Duration = Annotated[
    float, BeforeValidator(_duration), PlainSerializer(format_duration, return_type=str), _DurationSchema()
]
"""Seconds in Python, `1s`, `50ms`, `1h30m` in YAML."""


def parse_time(text: str) -> float:
    """Unix seconds of an RFC 3339 time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def format_time(at_s: float) -> str:
    """RFC 3339 with microseconds, as Kubernetes' MicroTime."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def between_fields(rule: str, message: str) -> dict[str, JsonValue]:
    """Schema extra of a model: a rule between its fields, in CEL, for API servers. A validator repeats it."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message}]}


def _time(value: object) -> float:
    if isinstance(value, str):
        return parse_time(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError("is not an RFC 3339 time")


Time = Annotated[
    float,
    BeforeValidator(_time),
    PlainSerializer(format_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Unix seconds in Python, RFC 3339 with microseconds in YAML."""


class Model(BaseModel):
    """Base of everything in the API: frozen, camelCase outside, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    def dump(self) -> dict[str, Any]:
        """As YAML shows it: camelCase, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class OwnerReference(Model):
    """The object that this one is deleted with."""

    api_version: str = API_VERSION
    kind: str
    name: str
    uid: str
    controller: bool = True


class ObjectMeta(Model):
    """The part of Kubernetes' ObjectMeta that Fulcrum reads. An API server's other fields are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    namespace: str = "default"
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()


class Condition(Model):
    """A state that lasts, with the generation it was judged on."""

    type: str = Field(description="Name of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(description="One word for programs.")
    message: str = Field(default="", description="Object, numbers, what happens next.")
    observed_generation: int = Field(default=0, description="Generation of the spec this was judged on.")
    last_transition_time: Time | None = Field(default=None, description="When the status last changed.")


class Printer(Model):
    """One column of `kubectl get`."""

    name: str
    type: Literal["string", "integer", "number", "date"]
    json_path: str
    description: str = ""


class Resource(Model):
    """Base of the kinds. A kind adds `spec` and `status` models and says how it is listed."""

    plural: ClassVar[str]
    short: ClassVar[str]
    printers: ClassVar[tuple[Printer, ...]]

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
        """What an object made for this one carries, so that it is deleted with it."""
        return OwnerReference(kind=self.kind, name=self.metadata.name, uid=self.metadata.uid)
