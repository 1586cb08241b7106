"""From what a PDService asks and what is observed to what shall be: pure, without clock or I/O."""

from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.service import Plan, needs_router_state, plan_removal, plan_service
from fulcrum_operator.plan.status.kv_transfer_verified import router_poll_interval_s

__all__ = [
    "Observed",
    "Plan",
    "needs_router_state",
    "plan_removal",
    "plan_service",
    "router_poll_interval_s",
]
