"""Environment variables of engines: a literal, or a reference to a Secret, a ConfigMap or a field of the pod.

Specs are copied into PDPools, PDInstances and status, which many users may read. So a literal that looks like
a token is refused in a PDService; a reference keeps the token in its Secret.
"""

import re
from collections.abc import Iterable
from typing import Self

from pydantic import ConfigDict, Field, JsonValue, StrictBool, model_validator

from fulcrum_core.api.meta import ApiModel, cel_rule

_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"

TOKEN_NAME_PATTERN = r"(?i)(token|secrets?|passwords?|passwd|key)([-._]|$)"
"""Names of variables that hold tokens, such as HF_TOKEN; not TOKENIZERS_PARALLELISM."""
NO_TOKEN_PATTERN = r"(?i)(|true|false|yes|no|on|off|[0-9]{1,4}|/.*)"
"""Whole values of such a variable that are no token: a switch, a small number, a path."""
HUB_TOKEN_PATTERN = r"(^|[^A-Za-z0-9])hf_[A-Za-z0-9]{8}"
"""A token of the Hugging Face hub, anywhere in a text."""
_TOKEN_NAME, _NO_TOKEN, _HUB_TOKEN = map(
    re.compile, (TOKEN_NAME_PATTERN, NO_TOKEN_PATTERN, HUB_TOKEN_PATTERN)
)

TOKEN_LITERAL_MESSAGE = (
    "has a literal in engine.env that looks like a token: keep it in a Secret and write "
    "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}} instead of value"
)
TOKEN_ARGUMENT_MESSAGE = (
    "has a token in engine.args: keep it in a Secret, add a variable with valueFrom to engine.env and write "
    "$(VARIABLE) in the argument"
)


class TokenLiteral(ValueError):
    """A spec contains a token. Error messages must not repeat the value."""


class KeyReference(ApiModel):
    """A key of a Secret or ConfigMap in the service's namespace."""

    name: str = Field(min_length=1, max_length=253, description="Name of the object.")
    key: str = Field(min_length=1, max_length=253, pattern=_KEY_PATTERN, description="Key in the object.")
    optional: StrictBool | None = Field(
        default=None, description="Whether the engine starts without the object or key (default false)."
    )


class FieldReference(ApiModel):
    """A field of the engine's pod."""

    field_path: str = Field(
        min_length=1, max_length=253, description="Path of the field, such as status.hostIP or spec.nodeName."
    )


class EnvVarSource(ApiModel):
    """Where the value of a variable comes from: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(x, x)",
            "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        )
    )

    secret_key_ref: KeyReference | None = Field(default=None, description="Key of a Secret.")
    config_map_key_ref: KeyReference | None = Field(default=None, description="Key of a ConfigMap.")
    field_ref: FieldReference | None = Field(default=None, description="Field of the engine's pod.")

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        given = (self.secret_key_ref, self.config_map_key_ref, self.field_ref)
        if sum(source is not None for source in given) != 1:
            raise ValueError("needs exactly one of secretKeyRef, configMapKeyRef and fieldRef")
        return self

    def __str__(self) -> str:
        if self.field_ref is not None:
            return self.field_ref.field_path
        kind, reference = (
            ("secret", self.secret_key_ref)
            if self.secret_key_ref
            else ("config map", self.config_map_key_ref)
        )
        return "" if reference is None else f"{kind} {reference.name}, key {reference.key}"


class EnvVar(ApiModel):
    """One environment variable: a value, or a reference to where it is."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "!has(self.valueFrom) || !has(self.value) || self.value == ''",
            "has both value and valueFrom: write one of them",
        )
    )

    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$",
        description="Name of the variable.",
    )
    value: str = Field(
        default="", max_length=4096, description="Its value (default empty); never a token: see valueFrom."
    )
    value_from: EnvVarSource | None = Field(
        default=None, description="Secret, ConfigMap or field of the pod with the value."
    )

    @model_validator(mode="after")
    def _check_value_or_source(self) -> Self:
        if self.value and self.value_from is not None:
            raise ValueError("has both value and valueFrom: write one of them")
        return self


def looks_like_token(variable: EnvVar) -> bool:
    """Whether the variable's literal value is probably a token."""
    if _HUB_TOKEN.search(variable.value):
        return True
    return bool(_TOKEN_NAME.search(variable.name)) and not _NO_TOKEN.fullmatch(variable.value)


def check_no_tokens(env: Iterable[EnvVar], args: Iterable[str]) -> None:
    """Refuse literals that look like tokens.

    Raises:
        TokenLiteral: for the first one; the message names it without its value.
    """
    for variable in env:
        if looks_like_token(variable):
            raise TokenLiteral(f"{TOKEN_LITERAL_MESSAGE} (variable {variable.name})")
    if any(_HUB_TOKEN.search(argument) for argument in args):
        raise TokenLiteral(TOKEN_ARGUMENT_MESSAGE)


def cel_no_tokens(engine: str) -> list[JsonValue]:
    """CEL rules of `check_no_tokens`, where `engine` is the path of the engine in the validated object."""
    variable = (
        f"e.value.matches('{HUB_TOKEN_PATTERN}') || "
        f"(e.name.matches('{TOKEN_NAME_PATTERN}') && !e.value.matches('^{NO_TOKEN_PATTERN}$'))"
    )
    return [
        {
            "rule": f"!has({engine}.env) || {engine}.env.all(e, !has(e.value) || !({variable}))",
            "message": TOKEN_LITERAL_MESSAGE,
        },
        {
            "rule": f"!has({engine}.args) || {engine}.args.all(a, !a.matches('{HUB_TOKEN_PATTERN}'))",
            "message": TOKEN_ARGUMENT_MESSAGE,
        },
    ]
