"""The condition Simulated: whether instances run simulated engines, whose text is made up.

It follows the instances, not the spec: during a roll-out from one engine type to the other both exist.
`service` of this folder calls it.
"""

from fulcrum_core.api import Condition, PDInstance, PDService, conditions
from fulcrum_core.formatting import format_count
from fulcrum_operator.plan.status.condition import true_or_false


def simulated_condition(service: PDService, members: tuple[PDInstance, ...]) -> Condition:
    """The condition of a service with these instances; without instances, that of its spec."""
    simulated = sum(member.spec.engine.is_simulated for member in members)
    if simulated or (not members and service.spec.engine.is_simulated):
        instances = f"{simulated} of {format_count(len(members), 'instance')}"
        message = f"{instances} run simulated engines: the text of their responses is made up"
        return true_or_false(
            service,
            conditions.SIMULATED,
            holds=True,
            reason=conditions.SIMULATED_ENGINES,
            message=message,
        )
    return true_or_false(
        service,
        conditions.SIMULATED,
        holds=False,
        reason=conditions.REAL_ENGINES,
        message="no instance runs a simulated engine",
    )
