"""One condition of an object's status; when it came to be so is found out by `judged`."""

from typing import Literal

from fulcrum_core.api import Condition, Resource

Standing = Literal["True", "False", "Unknown"]


def condition(about: Resource, kind: str, status: Standing, reason: str, message: str) -> Condition:
    """A condition that speaks of the spec as it is."""
    return Condition.model_validate(
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": about.metadata.generation,
        }
    )
