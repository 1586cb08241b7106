"""From what a PDService asks and what is observed to what shall be: pure, without clock or I/O."""

from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.plan import Plan, asks_router, plan_removal, plan_service
from fulcrum_operator.plan.references import check_references
from fulcrum_operator.plan.transfer import KV_LOOK_S

__all__ = [
    "KV_LOOK_S",
    "Observed",
    "Plan",
    "asks_router",
    "check_references",
    "plan_removal",
    "plan_service",
]
