"""Sizes as Kubernetes writes them: `64Gi`, `500G`."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo, WithJsonSchema

from fulcrum_core.api.meta import EXTERNAL_INPUT

_QUANTITY = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|K|M|G|T)?")
_PATTERN = r"^[0-9]+(Ki|Mi|Gi|Ti|K|M|G|T)?$"
_LENGTH_MAX = 20
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_byte_quantity(text: str) -> int:
    """Bytes of a size such as `64Gi`, `500G` or `1048576`.

    Raises:
        ValueError: if it is none.
    """
    match = _QUANTITY.fullmatch(text)
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
        raise ValueError("is not a size such as 64Gi, 512Mi or 500G, which is text")
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
