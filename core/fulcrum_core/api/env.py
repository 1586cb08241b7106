"""Environment variables of engines: a literal, or a reference to a Secret, a ConfigMap or a field of the pod.

Specs are copied into PDPools, PDInstances and status, which many users may read. So a literal that looks like
a token is refused in a PDService; a reference keeps the token in its Secret. `engine` and `pdpool` use these
types, and the operator's manifests turn them into Kubernetes' own.
"""

import re
from collections.abc import Iterable
from typing import Self

from pydantic import ConfigDict, Field, JsonValue, StrictBool, model_validator

from fulcrum_core.api.meta import ApiModel, cel_rule

_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"

TOKEN_NAME_PATTERN = (
    r"(?i)(token|secrets?|passwords?|passwd|passphrase|"
    r"(api|access|secret|private|auth|account|signing|encryption)[-._]?key)$"
)
"""Names of variables that hold tokens, such as HF_TOKEN; not VLLM_MAX_TOKEN_BUDGET or SORT_KEY."""
NO_TOKEN_PATTERN = (
    r"(?i)(|true|false|yes|no|on|off|auto|none|[0-9]+(\.[0-9]+)?|/.*|<.*>|.*\$\([-._a-zA-Z0-9]+\).*)"
)
"""Whole values of such a variable that are no token: a switch, a number, a path, `<pad>`, `$(VARIABLE)`."""
HUB_TOKEN_PATTERN = r"(^|[^A-Za-z0-9])hf_[A-Za-z0-9]{30}"
"""A token of the Hugging Face hub, anywhere in a text."""
KEY_ARGUMENT_PATTERN = r"^--api[-_]key(=.*)?$"
"""An argument that is a key of the engine, or is followed by one."""
REFERENCE_ARGUMENT_PATTERN = r"^[^=]*=\$\([-._a-zA-Z0-9]+\)$"
"""An argument whose value is that of a variable."""
_TOKEN_NAME, _NO_TOKEN, _HUB_TOKEN, _KEY_ARGUMENT, _REFERENCE_ARGUMENT = map(
    re.compile,
    (
        TOKEN_NAME_PATTERN,
        NO_TOKEN_PATTERN,
        HUB_TOKEN_PATTERN,
        KEY_ARGUMENT_PATTERN,
        REFERENCE_ARGUMENT_PATTERN,
    ),
)

TOKEN_LITERAL_MESSAGE = (
    "has a literal in engine.env that looks like a token: keep it in a Secret and write "
    "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}} instead of value"
)
TOKEN_ARGUMENT_MESSAGE = (
    "has a token in engine.args: keep it in a Secret, add a variable with valueFrom to engine.env and write "
    "$(VARIABLE) in the argument"
)
KEY_ARGUMENT_MESSAGE = (
    "has --api-key in engine.args: keep the key in a Secret and add the variable VLLM_API_KEY with valueFrom "
    "to engine.env, or write --api-key=$(VARIABLE)"
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
        default="", max_length=4096, description="Value (default: empty). For secrets use valueFrom."
    )
    value_from: EnvVarSource | None = Field(
        default=None, description="Secret, ConfigMap or field of the pod with the value."
    )

    @model_validator(mode="after")
    def _check_value_or_source(self) -> Self:
        if self.value and self.value_from is not None:
            raise ValueError("has both value and valueFrom: write one of them")
        return self


def looks_like_token(name: str, value: str) -> bool:
    """Whether a variable's literal value is probably a token."""
    if _HUB_TOKEN.search(value):
        return True
    return bool(_TOKEN_NAME.search(name)) and not _NO_TOKEN.fullmatch(value)


def find_token_argument(args: Iterable[str]) -> str | None:
    """The message about the first argument that contains a token or a key; None if there is none."""
    for argument in args:
        if _HUB_TOKEN.search(argument):
            return TOKEN_ARGUMENT_MESSAGE
        if _KEY_ARGUMENT.search(argument) and not _REFERENCE_ARGUMENT.search(argument):
            return KEY_ARGUMENT_MESSAGE
    return None


def check_no_tokens(env: Iterable[EnvVar], args: Iterable[str]) -> None:
    """Refuse literals that look like tokens.

    Raises:
        TokenLiteral: for the first one; the message names it without its value.
    """
    for variable in env:
        if looks_like_token(variable.name, variable.value):
            raise TokenLiteral(f"{TOKEN_LITERAL_MESSAGE} (variable {variable.name})")
    if message := find_token_argument(args):
        raise TokenLiteral(message)


def cel_no_tokens() -> dict[str, JsonValue]:
    """CEL rules of `check_no_tokens`, for the schema of an engine.

    They are rules of the engine alone, so that the API server applies them only to changes of the engine
    (CRD validation ratcheting): a service from before a rule can still be scaled.
    """
    variable = (
        f"e.value.matches('{HUB_TOKEN_PATTERN}') || "
        f"(e.name.matches('{TOKEN_NAME_PATTERN}') && !e.value.matches('^{_in_cel(NO_TOKEN_PATTERN)}$'))"
    )
    key = f"a.matches('{KEY_ARGUMENT_PATTERN}') && !a.matches('{_in_cel(REFERENCE_ARGUMENT_PATTERN)}')"
    no_token = f"self.args.all(a, !a.matches('{HUB_TOKEN_PATTERN}'))"
    rules: list[JsonValue] = [
        {
            "rule": f"!has(self.env) || self.env.all(e, !has(e.value) || !({variable}))",
            "message": TOKEN_LITERAL_MESSAGE,
        },
        {"rule": f"!has(self.args) || {no_token}", "message": TOKEN_ARGUMENT_MESSAGE},
        {"rule": f"!has(self.args) || self.args.all(a, !({key}))", "message": KEY_ARGUMENT_MESSAGE},
    ]
    return {"x-kubernetes-validations": rules}


def _in_cel(pattern: str) -> str:
    """The pattern inside a CEL string, where a backslash is written twice."""
    return pattern.replace("\\", "\\\\")
