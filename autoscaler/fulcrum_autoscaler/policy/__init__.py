"""The flip policies, arrow (its Algorithms 2 and 3) and balanced, as pure functions.

The autoscaler's loop and the simulator call `decide_on_tick` and `decide_on_flip_request`. No I/O, no clock.
"""

from fulcrum_autoscaler.policy.arrow import MonitorState, propose_assignment
from fulcrum_autoscaler.policy.decide import PolicyState, decide_on_flip_request, decide_on_tick
from fulcrum_autoscaler.policy.decisions import DecisionAction, FlipDecision, RejectedInstance, Trigger
from fulcrum_autoscaler.policy.forecast import Rates
from fulcrum_autoscaler.policy.loads import Load, Loads, measure_loads
from fulcrum_autoscaler.policy.observation import AutoscalingRules, Observation
from fulcrum_autoscaler.policy.victims import NoVictim, Victim, choose_victim

__all__ = [
    "AutoscalingRules",
    "DecisionAction",
    "FlipDecision",
    "Load",
    "Loads",
    "MonitorState",
    "NoVictim",
    "Observation",
    "PolicyState",
    "Rates",
    "RejectedInstance",
    "Trigger",
    "Victim",
    "choose_victim",
    "decide_on_flip_request",
    "decide_on_tick",
    "measure_loads",
    "propose_assignment",
]
