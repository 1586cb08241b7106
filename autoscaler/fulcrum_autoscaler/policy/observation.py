"""The input of a decision: the settings of the service, its assignment, and what operator and router report.

Also judges whether the router's state may be used: it must be recent, and the last assignment applied. `loop`
and the simulation build it in each decision; a policy reads nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.assignment import AssignmentRules, list_assigned
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import AutoscalingMode, FlipPolicy, Role, Slo

STALE_AFTER_INTERVALS = 3
"""No flip is decided on router state older than this many tick intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingRules:
    """The autoscaling settings of a PDService, in the units of the policy."""

    mode: AutoscalingMode
    policy: FlipPolicy
    paused: bool
    slo: Slo
    expand: float
    shrink: float
    consecutive_ticks: int
    interval_s: float
    assignment_rules: AssignmentRules
    deflects: bool
    """Whether the router lets decode instances compute prompts in their spare time."""

    @classmethod
    def from_spec(cls, spec: PDServiceSpec, *, assignment_rules: AssignmentRules) -> "AutoscalingRules":
        """Build the rules of one service.

        `assignment_rules` are the rules by which `may_apply` judges its flips.
        """
        scaling = spec.autoscaling
        return cls(
            mode=scaling.mode,
            policy=scaling.policy,
            paused=scaling.flip.paused,
            slo=spec.slo.to_slo(),
            expand=scaling.arrow.expand,
            shrink=scaling.arrow.shrink,
            consecutive_ticks=scaling.arrow.consecutive_ticks,
            interval_s=scaling.arrow.interval,
            assignment_rules=assignment_rules,
            deflects=spec.router.dispatch.deflect,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of one service at one time."""

    assignment: PDAssignmentSpec
    generation: int
    """metadata.generation of the assignment. Router state is usable once the router has applied it."""
    serving_by_phase: frozenset[str]
    """Names of the instances whose phase is Serving; the router may not use all of them."""
    router: RouterState | None
    """None: the router did not respond."""
    _by_name: Mapping[str, InstanceState] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        states = self.router.instances if self.router else ()
        object.__setattr__(self, "_by_name", {state.name: state for state in states})

    @property
    def confirmed_serving(self) -> frozenset[str]:
        """Names of the instances that both the operator and the router report as serving."""
        return frozenset(
            name for name in self.serving_by_phase if name in self._by_name and self._by_name[name].serving
        )

    def serving_states(self, role: Role) -> tuple[InstanceState, ...]:
        """Return the router's state of each serving instance of `role` that is not cordoned, sorted by
        name.

        CPU instances beside accelerators are left out: they get only what accelerators would do too late.
        """
        serving = self.confirmed_serving
        if not all(self._by_name[name].on_cpu for name in serving):
            serving = frozenset(name for name in serving if not self._by_name[name].on_cpu)
        return tuple(self._by_name[name] for name in list_assigned(self.assignment.roles, serving, role))

    def format_split(self) -> str:
        """Format the assigned prefill and decode instances, as "5:3"."""
        roles = [entry.role for entry in self.assignment.roles.values()]
        return f"{roles.count(Role.PREFILL)}:{roles.count(Role.DECODE)}"


def why_unusable(observation: Observation, rules: AutoscalingRules, *, now_s: float) -> str | None:
    """Return why no decision may be based on this observation; None if one may.

    Missing or stale state is never taken for an idle service.
    """
    state = observation.router
    if state is None:
        return "the router did not respond"
    age_s = now_s - state.at_s
    if not abs(age_s) <= STALE_AFTER_INTERVALS * rules.interval_s:
        age = f"{age_s:.1f} s old" if age_s > 0 else f"dated {-age_s:.1f} s ahead"
        return f"the router's state is {age}; the limit is {STALE_AFTER_INTERVALS * rules.interval_s:.1f} s"
    if state.generation < observation.generation:
        return (
            f"the router has applied generation {state.generation} of the assignment, "
            f"not yet {observation.generation}"
        )
    return None
