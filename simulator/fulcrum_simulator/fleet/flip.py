"""One flip of a simulated run; whoever decides on flips records it, and `run` and the live page read it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFlip:
    """One flip: when it was decided, which instance got which role, and why."""

    at_s: float
    instance: str
    to: str
    split: str
    reason: str
