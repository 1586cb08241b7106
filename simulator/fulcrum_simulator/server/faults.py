"""Faults that tests inject at run time: the bodies that `POST /simulator/fault` accepts.

`app` parses a body with it, and `service` carries the fault out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fulcrum_core.errors import InvalidInput


class FaultKind(StrEnum):
    """The kinds of fault. DIE and EXPIRE_LEASES happen once; the others last until NONE or until used up."""

    DIE = "die"
    HANG = "hang"
    SLOW = "slow"
    REFUSE = "refuse"
    ABORT_DRAINING = "abort_draining"
    EXPIRE_LEASES = "expire_leases"
    FAIL_TRANSFERS = "fail_transfers"
    SLOW_TRANSFERS = "slow_transfers"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `factor` multiplies step times (SLOW) or pull times (SLOW_TRANSFERS); `count` is the number
    of pulls that fail (FAIL_TRANSFERS).
    """

    kind: FaultKind
    factor: float = 1.0
    count: int = 0


_FIELDS = {
    FaultKind.SLOW: {"factor"},
    FaultKind.SLOW_TRANSFERS: {"factor"},
    FaultKind.FAIL_TRANSFERS: {"count"},
}


def parse_fault(body: Mapping[str, Any]) -> Fault:
    """Parse the fault in a request body.

    Raises:
        InvalidInput: for an unknown kind, an unknown or missing field, or a value out of range.
    """
    kind = _kind(body.get("kind"))
    allowed = {"kind"} | _FIELDS.get(kind, set())
    for field in sorted(body.keys() - allowed):
        raise InvalidInput(f"fault.{field}", body[field], f"is not a field of fault {kind}")
    if kind in (FaultKind.SLOW, FaultKind.SLOW_TRANSFERS):
        return Fault(kind, factor=_factor(body.get("factor")))
    if kind is FaultKind.FAIL_TRANSFERS:
        return Fault(kind, count=_count(body.get("count", 1)))
    return Fault(kind)


def _kind(value: object) -> FaultKind:
    for kind in FaultKind:
        if kind == value:
            return kind
    raise InvalidInput("fault.kind", value, f"is not one of {', '.join(FaultKind)}")


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1000:
        raise InvalidInput("fault.factor", value, "is not a number above 0 and up to 1000")
    return float(value)


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise InvalidInput("fault.count", value, "is not a whole number of at least 1")
    return value
