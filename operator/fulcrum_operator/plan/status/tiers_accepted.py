"""The condition TiersAccepted: every QoSTier that the service names exists."""

from collections.abc import Collection

from fulcrum_core.api import Condition, PDService, conditions
from fulcrum_core.formatting import format_count
from fulcrum_operator.plan.status.condition import true_or_false


def tiers_accepted(service: PDService, tiers: Collection[str]) -> Condition:
    """The condition, given the names of the QoSTiers in the service's namespace."""
    missing = [name for name in service.spec.qos_tiers if name not in tiers]
    if missing:
        message = f"no QoSTier named {', '.join(missing)} in namespace {service.metadata.namespace}"
        return true_or_false(
            service, conditions.TIERS_ACCEPTED, holds=False, reason=conditions.TIER_NOT_FOUND, message=message
        )
    named = service.spec.qos_tiers
    message = format_count(len(named), "tier") if named else "the built-in tier"
    return true_or_false(
        service, conditions.TIERS_ACCEPTED, holds=True, reason=conditions.TIERS_FOUND, message=message
    )
