"""The condition Ready: every role has its floor of serving instances, and the router has an address.

A service of one desired instance is Ready without the floors, as soon as that instance serves: it plays both
roles. `service` of this folder calls it.
"""

from collections.abc import Mapping

from fulcrum_core.api import Condition, Floors, PDAssignmentSpec, PDInstance, RoleStatus, conditions
from fulcrum_core.assignment import list_assigned
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Role
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.status.condition import true_or_false

_ROLES = (Role.PREFILL, Role.DECODE)


def count_ready(
    assignment: PDAssignmentSpec, desired: tuple[PDInstance, ...], prefill: RoleStatus, decode: RoleStatus
) -> dict[Role, int]:
    """Count the serving instances of each role.

    If a single instance serves, it plays both roles; here it counts for its assigned role only.
    """
    ready = [i.metadata.name for i in desired if i.is_serving]
    if len(ready) == 1:
        return {role: len(list_assigned(assignment.roles, ready, role)) for role in _ROLES}
    return {Role.PREFILL: prefill.ready, Role.DECODE: decode.ready}


def ready_condition(
    observed: Observed, members: int, desired_replicas: int, ready: int, counts: Mapping[Role, int]
) -> Condition:
    """Build the condition Ready of a service.

    Args:
        observed: Observed state of the service.
        members: Active instances.
        desired_replicas: Desired number of instances.
        ready: Instances that serve.
        counts: Serving instances of each role; see `count_ready`.
    """
    service, endpoint = observed.service, observed.endpoint
    floors = service.spec.roles.to_floors()
    missing = [role for role in _ROLES if counts[role] < floors.for_role(role)]
    if missing and not (desired_replicas == 1 and ready):
        reason, message = _too_few(floors, missing, desired_replicas, counts)
    elif endpoint is None:
        reason, message = conditions.ROUTER_STARTING, _waiting_for_router(observed)
    else:
        instances_serve = format_count(members, "instance serves", "instances serve")
        reason, message = conditions.INSTANCES_SERVING, f"{ready} of {instances_serve} at {endpoint}"
    return true_or_false(
        service,
        conditions.READY,
        holds=reason == conditions.INSTANCES_SERVING,
        reason=reason,
        message=message,
    )


def _waiting_for_router(observed: Observed) -> str:
    causes = "; ".join(cause.message for cause in observed.router_failures[:1])
    return f"waiting for the router: {causes}" if causes else "waiting for the router"


def _too_few(
    floors: Floors, missing: list[Role], desired_replicas: int, counts: Mapping[Role, int]
) -> tuple[str, str]:
    if 1 < desired_replicas < floors.prefill + floors.decode:
        floor_text = f"{floors.prefill} Prefill and {floors.decode} Decode"
        return (
            conditions.FLOORS_TOO_HIGH,
            f"{desired_replicas} instances cannot satisfy the floors of {floor_text}",
        )
    shortfalls = [f"{counts[role]} of {floors.for_role(role)} needed {role} instances" for role in missing]
    return conditions.TOO_FEW_INSTANCES, f"{' and '.join(shortfalls)} serve; waiting for more"
