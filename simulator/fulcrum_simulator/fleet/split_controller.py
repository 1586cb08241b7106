"""Carries out the splits of a planner: flips the instances with the least work, without a cooldown.

`run` uses it in the place of the simulated autoscaler if the policy is a planner.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import fmean
from typing import TypeVar

from fulcrum_autoscaler.policy import AutoscalingRules, NoVictim, Observation, choose_victim
from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.assignment import build_flip
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Actor, Role
from fulcrum_simulator.fleet.flip import SimulatedFlip
from fulcrum_simulator.fleet.planners import (
    TRAFFIC_WINDOW_S,
    PlannerView,
    RecentTraffic,
    SplitPlanner,
    measure_traffic,
)
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.router import SimulatedRouter

Model = TypeVar("Model", PrefillModel, DecodeModel)


class SplitController:
    """Asks the planner at its intervals, and flips until the split is the planned one.

    The planner sees state of `state_age_s`; the router applies what was written after `flip_latency_s`.
    `records` are the requests so far. Planners know how many answer tokens a request got when it has ended.
    """

    def __init__(
        self,
        planner: SplitPlanner,
        router: SimulatedRouter,
        assignment: PDAssignmentSpec,
        rules: AutoscalingRules,
        *,
        records: Sequence[RequestResult],
        serving: Callable[[], Collection[str]],
        kv_capacity_tokens: int,
        state_age_s: float,
        flip_latency_s: float,
    ) -> None:
        self.flips: list[SimulatedFlip] = []
        self.refused = 0
        self._planner, self._router, self._assignment, self._records = planner, router, assignment, records
        cooldown = replace(rules.assignment_rules, prefill_to_decode_cooldown_s=0.0)
        self._rules, self._serving = replace(rules, assignment_rules=cooldown), serving
        self._kv_capacity_tokens = kv_capacity_tokens
        self._state_age_s, self._flip_latency_s = state_age_s, flip_latency_s
        self._generation = router.generation
        self._schedule(planner.interval_s, self._tick)

    def _schedule(self, after_s: float, action: Callable[[], None]) -> None:
        self._router.events.schedule(self._router.events.now_s + after_s, action)

    def _tick(self) -> None:
        self._schedule(self._state_age_s, partial(self._plan, self._router.report()))
        self._schedule(self._planner.interval_s, self._tick)

    def _plan(self, state: RouterState) -> None:
        planned, reason = self._planner.plan(self._view(state))
        for _ in state.instances:
            roles = [entry.role for entry in self._assignment.roles.values()]
            current = roles.count(Role.PREFILL)
            to = Role.PREFILL if planned > current else Role.DECODE
            if planned == current or not self._flip(to, state, reason):
                return

    def _view(self, state: RouterState) -> PlannerView:
        instances = self._router.fleet.instances
        return PlannerView(
            now_s=self._router.events.now_s,
            state=state,
            traffic=self._measure_traffic(),
            prefill_model=_average([routed.record.prefill_model for routed in instances]),
            decode_model=_average([routed.record.decode_model for routed in instances]),
            kv_capacity_tokens=self._kv_capacity_tokens,
            slo=self._router.slo,
        )

    def _measure_traffic(self) -> RecentTraffic:
        now_s = self._router.events.now_s
        since_s = max(0.0, now_s - TRAFFIC_WINDOW_S)
        arrivals: list[tuple[float, int]] = []
        outputs: list[int] = []
        for record in reversed(self._records):
            if record.request.arrival_s < since_s:
                break
            arrivals.append((record.request.arrival_s, record.request.input_tokens))
            if record.last_token_s is not None:
                outputs.append(record.output_tokens)
        return measure_traffic(arrivals, outputs, window_s=now_s - since_s)

    def _flip(self, to: Role, state: RouterState, reason: str) -> bool:
        """Flip the instance with the least work; False if none may flip."""
        now_s = self._router.events.now_s
        observation = Observation(
            assignment=self._assignment,
            generation=self._generation,
            serving_by_phase=frozenset(self._serving()),
            router=state,
        )
        victim = choose_victim(observation, to, self._rules, now_s=now_s)
        if isinstance(victim, NoVictim):
            self.refused += 1
            return False
        self.flips.append(
            SimulatedFlip(
                at_s=now_s,
                instance=victim.instance,
                to=str(to),
                split=observation.format_split(),
                reason=reason,
            )
        )
        self._assignment = build_flip(
            self._assignment, victim.instance, to, by=Actor.AUTOSCALER, reason=reason, now_s=now_s
        )
        self._generation += 1
        self._schedule(self._flip_latency_s, partial(self._router.apply, self._assignment, self._generation))
        return True


def _average(models: Sequence[Model]) -> Model:
    """Return the model with the mean of each coefficient."""
    names = [field.name for field in fields(models[0])]
    return replace(models[0], **{name: fmean(getattr(model, name) for model in models) for name in names})
