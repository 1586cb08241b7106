"""The condition Progressing: instances start, switch, drain or stop, or a roll-out is in progress."""

from fulcrum_core.api import Condition, PDInstance, PDPool, PDService, conditions
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Phase
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
    if rolling:
        reason, message = (
            conditions.ROLLOUT_PROGRESSING,
            "; ".join(_describe_rollout(pool) for pool in rolling),
        )
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
