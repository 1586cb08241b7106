"""Build conditions. `with_transition_times` adds the time since which each has its status.

The modules of this folder decide status, reason and message, and call these functions.
"""

from collections.abc import Iterable

from fulcrum_core.api import Condition, PDService, Resource
from fulcrum_core.api.meta import ConditionStatus


def make_condition(
    subject: Resource, condition_type: str, status: ConditionStatus, reason: str, message: str
) -> Condition:
    """A condition for the current generation of `subject`, without a transition time."""
    return Condition.model_validate(
        {
            "type": condition_type,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": subject.metadata.generation,
        }
    )


def true_or_false(
    service: PDService, condition_type: str, *, holds: bool, reason: str, message: str
) -> Condition:
    """A condition of the service with status True or False."""
    return make_condition(service, condition_type, "True" if holds else "False", reason, message)


def with_transition_times(
    before: Iterable[Condition], now: Iterable[Condition], *, now_s: float
) -> tuple[Condition, ...]:
    """`now` with transition times: the previous time if the status is unchanged, else `now_s`."""
    known = {one.type: one for one in before}
    return tuple(_with_transition_time(one, known.get(one.type), now_s) for one in now)


def _with_transition_time(now: Condition, before: Condition | None, now_s: float) -> Condition:
    same = before is not None and before.status == now.status
    at_s = before.last_transition_time if before and same else now_s
    return now.model_copy(update={"last_transition_time": at_s})
