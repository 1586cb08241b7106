"""One condition of an object's status; when it came to be so is found out by `with_transition_times`."""

from typing import Literal

from fulcrum_core.api import Condition, Resource

ConditionStatus = Literal["True", "False", "Unknown"]


def make_condition(
    subject: Resource, condition_type: str, status: ConditionStatus, reason: str, message: str
) -> Condition:
    """A condition that speaks of the spec as it is."""
    return Condition.model_validate(
        {
            "type": condition_type,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": subject.metadata.generation,
        }
    )
