"""Quantities as Kubernetes writes them: any resource as a number, and sizes in bytes as an API field.

The kinds, the operator's manifests and doctor parse with these functions.
"""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo, WithJsonSchema

from fulcrum_core.api.meta import EXTERNAL_INPUT

_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)")
_FACTORS = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_BYTE_QUANTITY = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|K|M|G|T)?")
_PATTERN = r"^[0-9]+(Ki|Mi|Gi|Ti|K|M|G|T)?$"
_LENGTH_MAX = 20
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_quantity(text: str | int | float) -> float:
    """Return the number of a quantity of any resource: `250m`, `1.5`, `16Gi`, `2e3`.

    Raises:
        ValueError: if the text is not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if not match or match[2] not in _FACTORS:
        raise ValueError(f"{text} is not a quantity")
    return float(match[1]) * _FACTORS[match[2]]


def parse_byte_quantity(text: str) -> int:
    """Bytes of a size such as `64Gi`, `500G` or `1048576`.

    Raises:
        ValueError: if it is none.
    """
    match = _BYTE_QUANTITY.fullmatch(text)
    if not match or len(text) > _LENGTH_MAX:
        raise ValueError("is not a size such as 64Gi, 512Mi or 500G")
    number, unit = match.groups(default="")
    base = 1024 if unit.endswith("i") else 1000
    factor: int = base ** _POWERS[unit.removesuffix("i")]
    return int(number) * factor


def format_byte_quantity(size: int) -> str:
    """The shortest binary spelling that `parse_byte_quantity` reads back."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        factor = 1024 ** _POWERS[unit.removesuffix("i")]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _validate_byte_quantity(value: object, info: ValidationInfo) -> int:
    if isinstance(value, str):
        value = parse_byte_quantity(value)
    elif info.context == EXTERNAL_INPUT:
        raise ValueError("is a number: write text with a unit, such as 64Gi, 512Mi or 500G")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError("is not a size such as 64Gi, 512Mi or 500G")
    return value


_SCHEMA: dict[str, Any] = {
    "type": "string",
    "pattern": _PATTERN,
    "minLength": 1,
    "maxLength": _LENGTH_MAX,
    "x-kubernetes-validations": [{"rule": "self.matches('[1-9]')", "message": "is not greater than 0"}],
}

ByteQuantity = Annotated[
    int,
    BeforeValidator(_validate_byte_quantity),
    PlainSerializer(format_byte_quantity, return_type=str),
    WithJsonSchema(_SCHEMA),
]
"""Bytes in Python, `64Gi` in YAML."""
