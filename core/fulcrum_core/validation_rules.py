"""Texts for pydantic's validation errors in the form of `InvalidInput`: a rule for a user, on one line.

Used wherever input of users or other programs is parsed: manifests, stored objects, engine profiles. The
rules themselves are in the models.
"""

import json
import re
from typing import Any

import yaml
from pydantic_core import ErrorDetails

_RULES = {
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "dict_type": "is not an object",
    "enum": "is not one of {expected}",
    "finite_number": "is not a finite number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "greater_than": "is not greater than {gt:g}",
    "greater_than_equal": "is less than {ge:g}",
    "int_from_float": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "less_than_equal": "is greater than {le:g}",
    "literal_error": "is not one of {expected}",
    "missing": "is required",
    "model_type": "is not an object",
    "string_pattern_mismatch": "does not match {pattern}",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is shorter than {min_length} characters",
    "string_type": "is not text",
    "too_long": "has more than {max_length} items",
    "tuple_type": "is not a list",
}
_ENUM_MEMBER = re.compile(r"<\w+\.\w+: ('[^']*')>")


def describe_rule(error: ErrorDetails) -> str:
    """Return the rule that an error of pydantic reports, such as `is not a whole number`."""
    context: dict[str, Any] = error.get("ctx", {})
    if isinstance(raised := context.get("error"), ValueError):  # raised by a validator of ours
        text = str(raised)
        return text[:1].lower() + text[1:]
    if error["type"] not in _RULES:
        return error["msg"][:1].lower() + error["msg"][1:]
    rule = _ENUM_MEMBER.sub(r"\1", _RULES[error["type"]].format_map(context))
    return rule if " or " in rule else rule.replace("is not one of", "is not")


def shorten_value(value: object) -> str:
    """Format a value as YAML on one line, in at most 80 characters."""
    if isinstance(value, str):
        text = " ".join(value.split())
    else:
        plain = json.loads(json.dumps(value, default=str))
        text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6)
        text = text.removesuffix("\n...\n").strip()
    return text if len(text) <= 80 else text[:77] + "..."
