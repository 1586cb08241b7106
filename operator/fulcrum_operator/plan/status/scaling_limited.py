"""The condition ScalingLimited of a pool and of its service: more or fewer instances than requested.

`pool` and `service` of this folder call it; the limits themselves are applied in `plan/pools` and
`plan/assignment`.
"""

from collections.abc import Mapping

from fulcrum_core.api import Condition, PDPool, PDService, conditions
from fulcrum_core.formatting import format_count
from fulcrum_operator.plan.pools import desired_replicas
from fulcrum_operator.plan.status.condition import make_condition, true_or_false


def service_scaling_limited(service: PDService, pools: Mapping[str, Condition]) -> Condition:
    """The condition of the service, given the conditions of its pools by name."""
    limited = {name: condition for name, condition in pools.items() if condition.status == "True"}
    if not limited:
        message = "all pools have as many instances as requested"
        return true_or_false(
            service,
            conditions.SCALING_LIMITED,
            holds=False,
            reason=conditions.DESIRED_WITHIN_RANGE,
            message=message,
        )
    message = "; ".join(f"pool {name}: {condition.message}" for name, condition in limited.items())
    reason = next(iter(limited.values())).reason
    return true_or_false(service, conditions.SCALING_LIMITED, holds=True, reason=reason, message=message)


def scaling_limited(pool: PDPool, blocked_by: str | None) -> Condition:
    """The condition of a pool: True if its bounds or the roles' floors prevent the requested replicas.

    `blocked_by` is the floor that blocks a removal, or None.
    """
    requested, allowed = pool.spec.replicas, desired_replicas(pool)
    request_text = f"{format_count(requested, 'instance')} requested"
    if requested != allowed:
        reason = conditions.TOO_MANY_REPLICAS if requested > allowed else conditions.TOO_FEW_REPLICAS
        bounds = pool.spec.instances
        message = f"{request_text}; the bounds {bounds.min} to {bounds.effective_max} allow {allowed}"
    elif blocked_by:
        reason, message = conditions.LIMITED_BY_FLOORS, f"{request_text}: {blocked_by}"
    else:
        message = f"{format_count(allowed, 'instance')}, as requested"
        return make_condition(
            pool, conditions.SCALING_LIMITED, "False", conditions.DESIRED_WITHIN_RANGE, message
        )
    return make_condition(pool, conditions.SCALING_LIMITED, "True", reason, message)
