"""Kubernetes' quantities as numbers: `250m`, `1.5`, `16Gi`, `2e3`."""

import re
from collections.abc import Mapping

_QUANTITY = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)$")
_SUFFIXES = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip

Resources = Mapping[str, float]
"""Amounts by resource name: cores, bytes, devices."""


def parse_quantity(text: str | int | float) -> float:
    """The number of a quantity.

    Raises:
        ValueError: if it is none.
    """
    match = _QUANTITY.match(str(text))
    if not match or match[2] not in _SUFFIXES:
        raise ValueError(f"{text} is no quantity")
    return float(match[1]) * _SUFFIXES[match[2]]


def parse_resources(quantities: Mapping[str, str | int | float] | None) -> dict[str, float]:
    """Amounts by resource name."""
    return {name: parse_quantity(amount) for name, amount in (quantities or {}).items()}


def format_amount(resource: str, amount: float) -> str:
    """An amount for people: `16Gi memory`, `4 nvidia.com/gpu`."""
    if resource == "memory" or resource.endswith("storage"):
        for suffix in ("Ti", "Gi", "Mi", "Ki"):
            if amount >= _SUFFIXES[suffix]:
                return f"{amount / _SUFFIXES[suffix]:.4g}{suffix} {resource}"
    return f"{amount:.4g} {resource}"
