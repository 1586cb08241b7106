"""The condition Degraded: each failure cause has a reason for programs and a message for people.

`service` of this folder calls it in every plan, `controller` when a reconcile itself fails. Events report the
same causes (`controller/events`). Nothing is repaired here.
"""

from collections.abc import Iterator

from fulcrum_core.api import Condition, PDInstance, conditions
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.values import FAILED_STARTS_MAX, FlipStrategy, Phase
from fulcrum_operator.plan.instance_state import engine_lost, ever_served
from fulcrum_operator.plan.observed import FailureCause, Observed
from fulcrum_operator.plan.pools import list_pool_names
from fulcrum_operator.plan.rollout import PoolView
from fulcrum_operator.plan.status.condition import true_or_false, with_transition_times

_CAUSES_LISTED_MAX = 8
"""Number of causes listed in the message."""

_MOST_SEVERE_FIRST = (
    *(conditions.RECONCILE_FAILED, conditions.NAME_TAKEN, conditions.CHILD_REFUSED),
    *(conditions.ROLLED_BACK, conditions.IMAGE_PULL_FAILED, conditions.ROUTER_START_FAILED),
    *(conditions.STATE_PORT_UNTRUSTED, conditions.ENGINE_START_FAILED),
    *(conditions.UNSCHEDULABLE, conditions.NODE_LOST, conditions.INSTANCE_LOST),
    *(conditions.INSTANCES_FAILED, conditions.RELABEL_NOT_SUPPORTED, conditions.NODES_FORBIDDEN),
    *(conditions.CRDS_OUTDATED, conditions.TEMPLATE_PROBLEM),
)
"""The condition gets the first of these reasons that was found."""


def degraded(observed: Observed, views: tuple[PoolView, ...], desired: tuple[PDInstance, ...]) -> Condition:
    """The condition Degraded, with its causes in the message, the most severe first."""
    causes = find_failure_causes(observed, views, desired)
    reason = causes[0].reason if causes else conditions.AS_EXPECTED
    message = describe_causes(causes) if causes else "no instance has failed"
    return true_or_false(
        observed.service, conditions.DEGRADED, holds=bool(causes), reason=reason, message=message
    )


def with_failed_reconcile(
    before: tuple[Condition, ...], cause: FailureCause, *, generation: int, now_s: float
) -> tuple[Condition, ...]:
    """A service's conditions after a reconcile that failed before computing them: only Degraded is new."""
    failed = Condition(
        type=conditions.DEGRADED,
        status="True",
        reason=cause.reason,
        message=cause.message,
        observed_generation=generation,
    )
    others = tuple(known for known in before if known.type != conditions.DEGRADED)
    return (*others, *with_transition_times(before, (failed,), now_s=now_s))


def find_failure_causes(
    observed: Observed, views: tuple[PoolView, ...], desired: tuple[PDInstance, ...]
) -> tuple[FailureCause, ...]:
    """All failure causes of the service, the most severe first."""
    found = [
        *find_problems(observed),
        *observed.router_failures,
        *_find_in_rollouts(views),
        *(cause for i in desired for cause in _find_in_instance(observed, i)),
    ]
    return tuple(sorted(found, key=lambda cause: _MOST_SEVERE_FIRST.index(cause.reason)))


def describe_causes(causes: tuple[FailureCause, ...]) -> str:
    """All causes in one line; a long list is shortened."""
    lines = [cause.message for cause in causes[:_CAUSES_LISTED_MAX]]
    more = len(causes) - len(lines)
    return "; ".join([*lines, f"and {more} more"] if more else lines)


def find_problems(observed: Observed) -> tuple[FailureCause, ...]:
    """Causes that no instance shows: failures of the last reconcile, names taken, problems of templates."""
    taken, needed = observed.taken_pools, list_pool_names(observed.service)
    pools = (FailureCause(conditions.NAME_TAKEN, taken[name]) for name in needed if name in taken)
    found = observed.service.spec.find_template_problems()
    templates = (FailureCause(conditions.TEMPLATE_PROBLEM, problem) for problem in found)
    return (*observed.problems, *pools, *templates)


def _find_in_rollouts(views: tuple[PoolView, ...]) -> Iterator[FailureCause]:
    for view in views:
        if view.refused is not None:
            yield FailureCause(
                conditions.ROLLED_BACK,
                f"pool {view.name}: rolled back from revision {view.refused.revision} to {view.revision} "
                f"until the spec changes: {view.refused.reason}",
            )


def _find_in_instance(observed: Observed, instance: PDInstance) -> Iterator[FailureCause]:
    name, status = instance.metadata.name, instance.status
    engine = observed.engines.get(name)
    reason = _reason(observed, instance, engine)
    if reason is not None:
        yield FailureCause(reason, f"{name}: {status.message}")
    requested = observed.service.spec.autoscaling.flip.strategy
    if requested == "Relabel" and status.flip_strategy is FlipStrategy.RESTART:
        yield FailureCause(conditions.RELABEL_NOT_SUPPORTED, f"{name}: its engine can flip only by a restart")


def _reason(observed: Observed, instance: PDInstance, engine: EngineObservation | None) -> str | None:
    status = instance.status
    if status.phase is Phase.FAILED and engine_lost(observed, _as_observed(observed, instance)):
        on_node = engine is not None and engine.node_lost
        return conditions.NODE_LOST if on_node else conditions.INSTANCE_LOST
    if engine is None or engine.state is EngineState.RUNNING:
        return None
    if engine.reason:
        return engine.reason
    never_starts = engine.exit_reason and (not ever_served(instance) or engine.restarts >= FAILED_STARTS_MAX)
    if never_starts:
        return conditions.ENGINE_START_FAILED
    return conditions.INSTANCES_FAILED if status.phase is Phase.FAILED else None


def _as_observed(observed: Observed, instance: PDInstance) -> PDInstance:
    """The instance before this reconcile: `engine_lost` depends on the phase in which the engine was lost."""
    name = instance.metadata.name
    return next((i for i in observed.instances if i.metadata.name == name), instance)
