"""What a judgement says: yes or no, and why."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something may be done. `reason` is in words and is there for yes, too."""

    allowed: bool
    reason: str
