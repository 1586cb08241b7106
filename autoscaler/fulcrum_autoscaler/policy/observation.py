"""What a decision is made from: the wish, who can serve it, and what the router says."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.assignment import AssignmentRules, list_serving
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import AutoscalingMode, Role, Slo

STALE_AFTER_INTERVALS = 3
"""A picture of the router older than this many ticks is no ground for a flip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingRules:
    """What a PDService says about its flips, in the policy's words."""

    mode: AutoscalingMode
    paused: bool
    slo: Slo
    expand: float
    shrink: float
    consecutive_ticks: int
    interval_s: float
    assignment_rules: AssignmentRules

    @classmethod
    def from_spec(cls, spec: PDServiceSpec, *, assignment_rules: AssignmentRules) -> "AutoscalingRules":
        """The rules of one service; `assignment_rules` is what judges its PDAssignment."""
        scaling = spec.autoscaling
        return cls(
            mode=scaling.mode,
            paused=scaling.flip.paused,
            slo=spec.slo.to_slo(),
            expand=scaling.arrow.expand,
            shrink=scaling.arrow.shrink,
            consecutive_ticks=scaling.arrow.consecutive_ticks,
            interval_s=scaling.arrow.interval,
            assignment_rules=assignment_rules,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One consistent reading of the world. `router` is None where the router did not answer."""

    assignment: PDAssignmentSpec
    generation: int
    """metadata.generation of the assignment; loads speak of it once the router has applied it."""
    ready: frozenset[str]
    """Instances whose phase is Serving."""
    router: RouterState | None
    _by_name: Mapping[str, InstanceState] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        states = self.router.instances if self.router else ()
        object.__setattr__(self, "_by_name", {state.name: state for state in states})

    @property
    def confirmed_serving(self) -> frozenset[str]:
        """Instances that both the operator and the router hold to be serving."""
        return frozenset(name for name in self.ready if name in self._by_name and self._by_name[name].serving)

    def serving_states(self, role: Role) -> tuple[InstanceState, ...]:
        """The router's ledger of every serving, not cordoned instance of `role`, by name."""
        return tuple(
            self._by_name[name] for name in list_serving(self.assignment.roles, self.confirmed_serving, role)
        )

    def format_split(self) -> str:
        """Assigned prefill to assigned decode instances, as 5:3."""
        roles = [entry.role for entry in self.assignment.roles.values()]
        return f"{roles.count(Role.PREFILL)}:{roles.count(Role.DECODE)}"


def why_unusable(observation: Observation, rules: AutoscalingRules, *, now_s: float) -> str | None:
    """Why nothing may be decided from this observation; None if it may. Missing or stale never means idle."""
    state = observation.router
    if state is None:
        return "the router did not answer"
    age_s = now_s - state.at_s
    if not abs(age_s) <= STALE_AFTER_INTERVALS * rules.interval_s:
        age = f"{age_s:.1f} s old" if age_s > 0 else f"dated {-age_s:.1f} s ahead"
        return f"the router's state is {age}; the limit is {STALE_AFTER_INTERVALS * rules.interval_s:.1f} s"
    if state.generation < observation.generation:
        return (
            f"the router has applied generation {state.generation}, the wish is at {observation.generation}"
        )
    return None
