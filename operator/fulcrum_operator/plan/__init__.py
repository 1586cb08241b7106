"""From what a PDService asks and what is observed to what shall be: pure, without clock or I/O."""

from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.service import Plan, asks_router, plan_removal, plan_service
from fulcrum_operator.plan.status.kv_transfer_verified import look_every_s

__all__ = [
    "Observed",
    "Plan",
    "asks_router",
    "look_every_s",
    "plan_removal",
    "plan_service",
]
