"""What the autoscaler decides, also to do nothing: a frozen value with its reason and numbers."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from fulcrum_autoscaler.policy.loads import Loads
from fulcrum_core.values import Role


class Action(StrEnum):
    """What is done."""

    FLIP = "flip"
    """One instance gets the other role."""
    HOLD = "hold"
    """Nothing asks for a flip, or nothing can be told."""
    ADVISE = "advise"
    """The flip that mode Auto would make."""
    REFUSE = "refuse"
    """A flip was asked for, by the loads or by the router, and a rule forbids it."""


class Trigger(StrEnum):
    """What woke the decision."""

    TICK = "tick"
    FLIP_REQUEST = "flip request"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedInstance:
    """An instance that was not chosen, and why."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipDecision:
    """One answer of the policy. `instance` and `to` are there for flip and advise."""

    at_s: float
    action: Action
    trigger: Trigger
    reason: str
    instance: str | None = None
    to: Role | None = None
    loads: Loads | None = None
    consecutive_ticks: int = 0
    split: str = ""
    generation: int = 0
    rejected: tuple[RejectedInstance, ...] = ()

    def dump(self) -> dict[str, Any]:
        """As `/decisions` shows it."""
        return asdict(self)
