"""Arrow's Algorithms 2 and 3 as pure functions: what the fast loop and the simulator both run."""

from fulcrum_autoscaler.policy.arrow import Memory, answer, monitor, proposal
from fulcrum_autoscaler.policy.decisions import Action, Decision, Rejected, Trigger
from fulcrum_autoscaler.policy.loads import Load, Loads, measure_loads
from fulcrum_autoscaler.policy.observation import FlipRules, Observation
from fulcrum_autoscaler.policy.victims import NoVictim, Victim, choose_victim

__all__ = [
    "Action",
    "Decision",
    "FlipRules",
    "Load",
    "Loads",
    "Memory",
    "NoVictim",
    "Observation",
    "Rejected",
    "Trigger",
    "Victim",
    "answer",
    "choose_victim",
    "measure_loads",
    "monitor",
    "proposal",
]
