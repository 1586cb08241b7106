"""The status of a PDPool, and the parts of it that the status of its service needs.

`plan/service` calls it for each pool; how many instances there should be is `plan/rollout`'s.
"""

from dataclasses import dataclass

from fulcrum_core.api import Condition, PDInstance, PDPool, PDPoolStatus
from fulcrum_core.api.labels import POOL_LABEL
from fulcrum_operator.plan.instance_state import active_names, revision_of
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.rollout import PoolView
from fulcrum_operator.plan.status.condition import with_transition_times
from fulcrum_operator.plan.status.scaling_limited import scaling_limited


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A desired pool with its new status, and what the status was made from."""

    pool: PDPool
    view: PoolView
    scaling_limited: Condition
    members: tuple[PDInstance, ...]


def report_pool(
    observed: Observed, view: PoolView, desired: tuple[PDInstance, ...], blocked_by: str | None
) -> PoolReport:
    """The pool with its new status, given the desired instances of the service."""
    pool, leaving = view.pool, {i.metadata.name for i in observed.instances} - active_names(observed)
    members = tuple(i for i in desired if i.spec.pool == view.name and i.metadata.name not in leaving)
    limited = scaling_limited(pool, blocked_by)
    status = PDPoolStatus(
        replicas=len(members),
        ready_replicas=sum(member.is_serving for member in members),
        selector=f"{POOL_LABEL}={view.name}",
        revision=view.revision,
        updated_replicas=sum(revision_of(member) == view.revision for member in members),
        last_good=view.last_good,
        refused=view.refused,
        conditions=with_transition_times(pool.status.conditions, (limited,), now_s=observed.now_s),
        observed_generation=pool.metadata.generation,
    )
    return PoolReport(pool.replace(status=status), view, limited, members)
