"""Verdict: the result of `may_apply` and `can_transfer`, allowed or not, with the reason for people."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something may be done. `reason` is for people and is set for both results."""

    allowed: bool
    reason: str
