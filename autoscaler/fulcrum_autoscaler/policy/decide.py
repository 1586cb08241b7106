"""Calls the policy that the service has chosen, for the loop and for the simulation."""

from dataclasses import dataclass, field, replace

from fulcrum_autoscaler.policy import arrow
from fulcrum_autoscaler.policy.arrow import MonitorState, hold_if_blocked
from fulcrum_autoscaler.policy.balanced import BalanceState, decide_balance, reset_sums
from fulcrum_autoscaler.policy.decisions import DecisionAction, FlipDecision, Trigger, hold
from fulcrum_autoscaler.policy.observation import AutoscalingRules, Observation
from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import FlipPolicy


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the policies pass from decision to decision. A restart loses it, which costs a few ticks."""

    monitor: MonitorState = field(default_factory=MonitorState)
    """State of the policy arrow."""
    balance: BalanceState = field(default_factory=BalanceState)
    """State of the policy balanced."""


def decide_on_tick(
    state: PolicyState, observation: Observation, rules: AutoscalingRules, *, now_s: float
) -> tuple[PolicyState, FlipDecision]:
    """Decide at a tick; returns the next state and the decision."""
    if rules.policy is FlipPolicy.ARROW:
        monitor, decision = arrow.decide_on_tick(state.monitor, observation, rules, now_s=now_s)
        return PolicyState(monitor=monitor), decision
    blocked = hold_if_blocked(observation, rules, Trigger.TICK, now_s=now_s)
    if blocked:
        return replace(state, balance=reset_sums(state.balance)), blocked
    balance, decision = decide_balance(state.balance, observation, rules, now_s=now_s)
    return PolicyState(balance=balance), decision


def decide_on_flip_request(
    state: PolicyState,
    request: FlipRequest,
    observation: Observation,
    rules: AutoscalingRules,
    *,
    now_s: float,
) -> tuple[PolicyState, FlipDecision]:
    """Decide on a flip request of the router; returns the next state and the decision.

    A flip by arrow resets the monitor: its consecutive ticks were counted under the old split. With balanced
    a router sends no flip requests; one that it sent before the policy changed is refused.
    """
    if rules.policy is FlipPolicy.ARROW:
        decision = arrow.decide_on_flip_request(request, observation, rules, now_s=now_s)
        return (PolicyState() if decision.action is DecisionAction.FLIP else state), decision
    blocked = hold_if_blocked(observation, rules, Trigger.FLIP_REQUEST, now_s=now_s)
    if blocked:
        return state, blocked
    reason = "the policy balanced decides at ticks, not on flip requests"
    held = hold(observation, reason, trigger=Trigger.FLIP_REQUEST, now_s=now_s)
    return state, replace(held, action=DecisionAction.REFUSE)
