"""The flip policy: Arrow's Algorithms 2 and 3 as pure functions.

Used by the autoscaler's loop in production and by the tests of the whole control loop. No I/O, no clock.
"""

from fulcrum_autoscaler.policy.arrow import (
    MonitorState,
    decide_on_flip_request,
    decide_on_tick,
    propose_assignment,
)
from fulcrum_autoscaler.policy.decisions import DecisionAction, FlipDecision, RejectedInstance, Trigger
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
    "RejectedInstance",
    "Trigger",
    "Victim",
    "choose_victim",
    "decide_on_flip_request",
    "decide_on_tick",
    "measure_loads",
    "propose_assignment",
]
