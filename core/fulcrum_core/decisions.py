"""The result of a check: allowed or not, and why."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something may be done. `reason` is for people and is set for both results."""

    allowed: bool
    reason: str
