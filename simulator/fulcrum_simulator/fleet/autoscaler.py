"""The simulated autoscaler: the shipped flip policy at ticks and on flip requests, late by a stated time.

It follows the shipped control loop: flip requests from before a flip are skipped, and a refused flip request
is followed by the newest for the other role, if there is one, and then by a short pause. The router's state
is read at a tick or a flip request, and the policy decides `state_age_s` later. The router applies a written
flip after `flip_latency_s`. `run` starts it, except for policies that are planners.
"""

from collections.abc import Callable, Collection
from functools import partial

from fulcrum_autoscaler.policy import (
    AutoscalingRules,
    DecisionAction,
    FlipDecision,
    Observation,
    PolicyState,
    decide_on_flip_request,
    decide_on_tick,
    propose_assignment,
)
from fulcrum_autoscaler.policy.intervals import ACKNOWLEDGEMENT_TIMEOUT_S, REFUSAL_PAUSE_S
from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.router_state import FlipRequest, RouterState
from fulcrum_simulator.fleet.flip import SimulatedFlip
from fulcrum_simulator.fleet.router import SimulatedRouter


class SimulatedAutoscaler:
    """Decides for one service from its start on. `serving` returns the instances that serve."""

    def __init__(
        self,
        router: SimulatedRouter,
        assignment: PDAssignmentSpec,
        rules: AutoscalingRules,
        *,
        serving: Callable[[], Collection[str]],
        state_age_s: float,
        flip_latency_s: float,
    ) -> None:
        self.flips: list[SimulatedFlip] = []
        self.refused = 0
        """Decisions that called for a flip which a rule forbade."""
        self._router, self._assignment, self._rules, self._serving = router, assignment, rules, serving
        self._state_age_s, self._flip_latency_s = state_age_s, flip_latency_s
        self._generation = router.generation
        self._policy_state = PolicyState()
        self._handled_seq = 0
        self._handling = False
        router.on_flip_request = self._read_flip_request
        self._schedule(rules.interval_s, self._tick)

    def _schedule(self, after_s: float, action: Callable[[], None]) -> None:
        self._router.events.schedule(self._router.events.now_s + after_s, action)

    # Ticks

    def _tick(self) -> None:
        state = self._router.report()
        self._schedule(self._state_age_s, partial(self._decide_on_tick, state))
        self._schedule(self._rules.interval_s, self._tick)

    def _decide_on_tick(self, state: RouterState) -> None:
        self._policy_state, decision = decide_on_tick(
            self._policy_state, self._observe(state), self._rules, now_s=self._router.events.now_s
        )
        self._carry_out(decision)

    # Flip requests

    def _read_flip_request(self) -> None:
        """Handle the new flip requests, unless others are being handled."""
        request = self._router.flip_requests.find_after(self._handled_seq)
        if self._handling or request is None:
            return
        self._handling = True
        self._schedule(self._state_age_s, partial(self._decide_on_request, request, self._router.report()))

    def _decide_on_request(self, request: FlipRequest, state: RouterState) -> None:
        self._policy_state, decision = decide_on_flip_request(
            self._policy_state, request, self._observe(state), self._rules, now_s=self._router.events.now_s
        )
        self._carry_out(decision)
        if decision.action is DecisionAction.FLIP:
            wait_s = min(self._flip_latency_s, ACKNOWLEDGEMENT_TIMEOUT_S)
            self._schedule(wait_s, partial(self._finish_request, skip_all=True))
            return
        self._handled_seq = max(self._handled_seq, request.seq)
        if request.other is not None:
            report = self._router.report()
            self._schedule(self._state_age_s, partial(self._decide_on_request, request.other, report))
        else:
            self._schedule(REFUSAL_PAUSE_S, partial(self._finish_request, skip_all=False))

    def _finish_request(self, *, skip_all: bool) -> None:
        """Wait for the next flip request; after a flip, skip those that were sent before it."""
        if skip_all:
            self._handled_seq = self._router.flip_requests.seq
        self._handling = False
        self._read_flip_request()

    # Flips

    def _observe(self, state: RouterState) -> Observation:
        return Observation(
            assignment=self._assignment,
            generation=self._generation,
            serving_by_phase=frozenset(self._serving()),
            router=state,
        )

    def _carry_out(self, decision: FlipDecision) -> None:
        if decision.action is DecisionAction.REFUSE:
            self.refused += 1
        if decision.action is not DecisionAction.FLIP or decision.instance is None or decision.to is None:
            return
        self._assignment = propose_assignment(self._assignment, decision)
        self._generation += 1
        self.flips.extend(
            SimulatedFlip(
                at_s=decision.at_s,
                instance=instance,
                to=str(decision.to),
                split=decision.split,
                reason=decision.reason,
            )
            for instance in (decision.instance, *decision.further_instances)
        )
        self._schedule(self._flip_latency_s, partial(self._router.apply, self._assignment, self._generation))
