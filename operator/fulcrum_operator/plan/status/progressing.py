"""The condition Progressing: instances change their phase or number, leave nodes, or are rolled out.

`service` of this folder calls it. What cannot go on is in Degraded or ScalingLimited.
"""

from fulcrum_core.api import Condition, PDInstance, PDPool, PDService, conditions
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Phase
from fulcrum_operator.plan.rollout import PoolView
from fulcrum_operator.plan.status.condition import true_or_false
from fulcrum_operator.plan.status.pool import PoolReport

_CHANGING_PHASES = (
    *(Phase.PENDING, Phase.STARTING, Phase.SWITCHING, Phase.VERIFYING),
    *(Phase.DRAINING, Phase.TERMINATING),
)


def progressing(
    service: PDService, desired: tuple[PDInstance, ...], pools: tuple[PoolReport, ...], desired_replicas: int
) -> Condition:
    """The condition Progressing. The message names a roll-out's revision, else the changing instances."""
    changing = [f"{i.metadata.name} {i.status.phase}" for i in desired if i.status.phase in _CHANGING_PHASES]
    rolling = [report.pool for report in pools if report.view.rolling_out]
    paused_pools = [report.view.name for report in pools if report.view.held_by_pause]
    moving = [report.view for report in pools if report.view.departing]
    if rolling:
        in_place = [report.view for report in pools if report.view.in_place]
        reason = conditions.ROLLING_OUT_IN_PLACE if in_place else conditions.ROLLOUT_PROGRESSING
        message = "; ".join((*map(_describe_rollout, rolling), *map(_describe_in_place, in_place)))
    elif moving:
        can_replace_departing = all(view.can_replace_departing for view in moving)
        reason = conditions.MOVING_INSTANCES if can_replace_departing else conditions.EVICTION_ALLOWED
        message = "; ".join(map(_describe_moving, moving))
    elif changing or len(desired) != desired_replicas:
        reason, message = (
            conditions.INSTANCES_CHANGING,
            f"{len(desired)} of {format_count(desired_replicas, 'instance')}",
        )
    elif paused_pools:
        message = f"paused: a new revision is waiting for {', '.join(paused_pools)}"
        return true_or_false(
            service, conditions.PROGRESSING, holds=False, reason=conditions.ROLLOUT_PAUSED, message=message
        )
    else:
        message = f"{format_count(desired_replicas, 'instance')}, none changing"
        return true_or_false(
            service, conditions.PROGRESSING, holds=False, reason=conditions.SETTLED, message=message
        )
    names = ", ".join(changing)
    message = f"{message}; {names}" if names else message
    return true_or_false(service, conditions.PROGRESSING, holds=True, reason=reason, message=message)


def _describe_rollout(pool: PDPool) -> str:
    status = pool.status
    have = format_count(status.replicas, "instance has", "instances have")
    return f"pool {pool.metadata.name}: {status.updated_replicas} of {have} revision {status.revision}"


def _describe_in_place(view: PoolView) -> str:
    return f"no node has room for {_list_names(view.without_room)}: one instance fewer serves meanwhile"


def _describe_moving(view: PoolView) -> str:
    where = f"{_list_names(view.departing)} on nodes to be drained ({', '.join(view.departure_causes)})"
    if view.can_replace_departing:
        return f"{where}: new instances replace them first"
    names = _list_names(view.cannot_start)
    obstacle = f"{names} cannot start instead" if names else "no new instance can be created instead"
    return f"{where}: {obstacle}, so an eviction may take one away"


def _list_names(instances: tuple[PDInstance, ...]) -> str:
    return ", ".join(instance.metadata.name for instance in instances)
