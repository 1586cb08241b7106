"""The operator's decisions: from a PDService and what is observed to the objects and engines it should have.

Pure: no clock and no I/O. `controller/` observes, calls `plan_service` and applies the result."""

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
