"""One condition of an object's status; when it came to be so is found out by `with_transition_times`."""

from collections.abc import Iterable

from fulcrum_core.api import Condition, PDService, Resource
from fulcrum_core.api.meta import ConditionStatus


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


def true_or_false(
    service: PDService, condition_type: str, *, holds: bool, reason: str, message: str
) -> Condition:
    return make_condition(service, condition_type, "True" if holds else "False", reason, message)


def with_transition_times(
    before: Iterable[Condition], now: Iterable[Condition], *, now_s: float
) -> tuple[Condition, ...]:
    """`now` with the times of transition: kept where the status stays, else this moment."""
    known = {one.type: one for one in before}
    return tuple(_with_transition_time(one, known.get(one.type), now_s) for one in now)


def _with_transition_time(now: Condition, before: Condition | None, now_s: float) -> Condition:
    same = before is not None and before.status == now.status
    at_s = before.last_transition_time if before and same else now_s
    return now.model_copy(update={"last_transition_time": at_s})
