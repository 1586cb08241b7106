"""Autoscaler decisions: what a policy returns for a tick or a flip request, also when nothing is to change.

Each has an action, a reason and the numbers behind it. `loop` carries them out, `/decisions` serves them.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from fulcrum_autoscaler.policy.forecast import Rates
from fulcrum_autoscaler.policy.loads import Loads
from fulcrum_autoscaler.policy.observation import Observation
from fulcrum_core.values import Role


class DecisionAction(StrEnum):
    """The outcome of a decision."""

    FLIP = "flip"
    """One instance or several get the other role, in one write."""
    HOLD = "hold"
    """No flip is called for, or the observation is not usable."""
    ADVISE = "advise"
    """The flip that mode Auto would make; nothing is written."""
    REFUSE = "refuse"
    """The loads or the router call for a flip, and a rule forbids it."""


class Trigger(StrEnum):
    """The cause of a decision."""

    TICK = "tick"
    FLIP_REQUEST = "flip request"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedInstance:
    """An instance that was not chosen to flip, and the reason."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipDecision:
    """One decision. `instance` and `to` (the new role) are set if the action is flip or advise."""

    at_s: float
    """Time of the decision, unix seconds."""
    action: DecisionAction
    trigger: Trigger
    reason: str
    instance: str | None = None
    further_instances: tuple[str, ...] = ()
    """Instances that flip to the same role by the same write."""
    to: Role | None = None
    loads: Loads | None = None
    forecast: Rates | None = None
    """What policy balanced expects to arrive; None: not known, or another policy decided."""
    consecutive_ticks: int = 0
    """The monitor's consecutive ticks, including this decision's tick."""
    split: str = ""
    """Assigned prefill to assigned decode instances, as "5:3"."""
    generation: int = 0
    """metadata.generation of the PDAssignment on which the decision is based."""
    rejected: tuple[RejectedInstance, ...] = ()

    def dump(self) -> dict[str, Any]:
        """Return the decision as `/decisions` serves it."""
        return asdict(self)


def hold(
    observation: Observation,
    reason: str,
    *,
    trigger: Trigger = Trigger.TICK,
    loads: Loads | None = None,
    consecutive_ticks: int = 0,
    now_s: float,
) -> FlipDecision:
    """Return the decision to flip nothing, made on this observation."""
    return FlipDecision(
        at_s=now_s,
        action=DecisionAction.HOLD,
        trigger=trigger,
        reason=reason,
        loads=loads,
        consecutive_ticks=consecutive_ticks,
        split=observation.format_split(),
        generation=observation.generation,
    )
