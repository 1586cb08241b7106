"""What does not work in a service, in one word for programs and in words for people.

A runtime says why an engine does not run as `Reason: words`, with the cluster's own reason in front.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fulcrum_core.api import PDInstance, conditions
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.values import FlipStrategy, Phase
from fulcrum_operator.plan.observed import Observed, ever_served
from fulcrum_operator.plan.rollout import HOPELESS_STARTS, PoolView

PULL_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
"""What a container that waits for its image says."""
_SCHEDULING = frozenset({"Unschedulable", "SchedulerError"})
_MOST_TOLD = 8
"""So many troubles are told one by one."""

_ORDER = (
    *(conditions.ROLLED_BACK, conditions.IMAGE_PULL_FAILED, conditions.ENGINE_DOES_NOT_START),
    *(conditions.UNSCHEDULABLE, conditions.NODE_LOST, conditions.INSTANCE_LOST),
    *(conditions.INSTANCES_FAILED, conditions.RELABEL_NOT_OFFERED),
)
"""The first of these that is there names the condition."""


class Trouble(NamedTuple):
    """Something that does not work."""

    reason: str
    message: str


def troubles_of(
    seen: Observed, views: tuple[PoolView, ...], desired: tuple[PDInstance, ...]
) -> tuple[Trouble, ...]:
    """All that does not work, the gravest first."""
    found = [*_of_rollouts(views), *(t for i in desired for t in _of_instance(seen, i))]
    return tuple(sorted(found, key=lambda trouble: _ORDER.index(trouble.reason)))


def told(troubles: tuple[Trouble, ...]) -> str:
    """All of them in one line, a long list cut short."""
    lines = [trouble.message for trouble in troubles[:_MOST_TOLD]]
    more = len(troubles) - len(lines)
    return "; ".join([*lines, f"and {more} more"] if more else lines)


def _of_rollouts(views: tuple[PoolView, ...]) -> Iterator[Trouble]:
    for view in views:
        if view.refused is not None:
            yield Trouble(
                conditions.ROLLED_BACK,
                f"pool {view.name}: revision {view.refused.revision} was given up for {view.revision}, "
                f"until the spec changes: {view.refused.reason}",
            )


def _of_instance(seen: Observed, instance: PDInstance) -> Iterator[Trouble]:
    name, status = instance.metadata.name, instance.status
    engine = seen.engines.get(name)
    reason = _reason(seen, instance, engine)
    if reason is not None:
        yield Trouble(reason, f"{name}: {status.message}")
    asked = seen.service.spec.autoscaling.flip.strategy
    if asked == "Relabel" and status.strategy is FlipStrategy.RESTART:
        yield Trouble(conditions.RELABEL_NOT_OFFERED, f"{name}: its engine flips by a restart only")


def _reason(seen: Observed, instance: PDInstance, engine: EngineObservation | None) -> str | None:
    status = instance.status
    if status.phase is Phase.FAILED and seen.taken(_before(seen, instance)):
        on_node = engine is not None and engine.node_lost
        return conditions.NODE_LOST if on_node else conditions.INSTANCE_LOST
    if engine is None or engine.state is EngineState.RUNNING:
        return None
    hindered = hindrance_reason(engine)
    if hindered is not None:
        return hindered
    futile = engine.exit_reason and (not ever_served(instance) or engine.restarts >= HOPELESS_STARTS)
    if futile:
        return conditions.ENGINE_DOES_NOT_START
    return conditions.INSTANCES_FAILED if status.phase is Phase.FAILED else None


def hindrance_reason(engine: EngineObservation) -> str | None:
    """What keeps it from starting, as a condition's reason; a message in plain words is none."""
    word = engine.message.partition(":")[0]
    if engine.state is not EngineState.STARTING or not word or " " in word:
        return None
    if word in PULL_FAILURES:
        return conditions.IMAGE_PULL_FAILED
    return conditions.UNSCHEDULABLE if word in _SCHEDULING else conditions.ENGINE_DOES_NOT_START


def _before(seen: Observed, instance: PDInstance) -> PDInstance:
    """The instance as it was seen: what was taken away is judged by the phase it was in."""
    name = instance.metadata.name
    return next((i for i in seen.instances if i.metadata.name == name), instance)
