"""How long a roll-out and the drain of a node wait for a new instance to serve.

A roll-out waits `SURGE_WAIT_S` for room on a node; then it replaces instances in place: one instance fewer
serves, within the floors. The drain of a node waits `REPLACEMENT_WAIT_S` for a replacement that cannot start.
For any other new instance both wait as long as `progress_timeout_s` says. `rollout`, `departing_nodes` and
`service` ask; nothing is stopped or created here.
"""

import math
from collections.abc import Iterable, Iterator

from fulcrum_core.api import PDInstance
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.values import Phase
from fulcrum_operator.plan.instance_state import ever_served, startup_s
from fulcrum_operator.plan.observed import Observed

SURGE_WAIT_S = 120.0
"""Seconds for which a roll-out waits for room, in which a node may be added to the cluster."""
REPLACEMENT_WAIT_S = 30.0
"""Seconds for which a drain of a node waits for a replacement that cannot be created, or cannot start."""
PROGRESS_TIMEOUT_MIN_S = 120.0
PROGRESS_TIMEOUT_FACTOR = 10
"""A new instance must serve within two minutes plus ten times its start-up time."""

_NOT_YET_SERVING = (Phase.PENDING, Phase.STARTING, Phase.FAILED)


def never_served(instance: PDInstance) -> bool:
    """Whether the instance is new: no run of its engine has served yet."""
    return instance.status.phase in _NOT_YET_SERVING and not ever_served(instance)


def created_at_s(observed: Observed, instance: PDInstance) -> float:
    """Creation of the instance in unix seconds; now for one that is being created."""
    at_s = instance.metadata.creation_timestamp
    return observed.now_s if at_s is None else at_s


def progress_timeout_s(observed: Observed, instance: PDInstance) -> float:
    """Seconds from an instance's creation in which it must first serve, else its revision is rolled back."""
    requested = observed.service.spec.rollout.progress_deadline
    return (
        PROGRESS_TIMEOUT_MIN_S + PROGRESS_TIMEOUT_FACTOR * startup_s(observed, instance)
        if requested is None
        else requested
    )


def find_without_room(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """New members for which no node has had room for `SURGE_WAIT_S`."""
    return tuple(
        member
        for member in members
        if (engine := _blocked_start(observed, member)) is not None
        and engine.lacks_room
        and observed.now_s >= created_at_s(observed, member) + SURGE_WAIT_S
    )


def find_overdue_starts(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """Return the new members that should serve by now, for which the drain of a node waits no longer.

    The drain waits `REPLACEMENT_WAIT_S` for a member that has exited or that something keeps from starting,
    and for any other as long as a roll-out does.
    """
    return tuple(member for member in members if observed.now_s >= _serving_deadline_s(observed, member))


def list_start_deadlines_s(
    observed: Observed, updated: Iterable[PDInstance], *, nodes_depart: bool
) -> Iterator[float]:
    """Unix times at which `updated` count as without room and, if nodes depart, as overdue."""
    for member in updated:
        if _blocked_start(observed, member) is not None:
            yield created_at_s(observed, member) + SURGE_WAIT_S
        if nodes_depart:
            yield _serving_deadline_s(observed, member)


def _blocked_start(observed: Observed, member: PDInstance) -> EngineObservation | None:
    """The engine of a new member that something keeps from starting; None for any other member."""
    engine = observed.engines.get(member.metadata.name)
    starting = engine is not None and engine.state is EngineState.STARTING
    return engine if starting and engine is not None and engine.reason and never_served(member) else None


def _serving_deadline_s(observed: Observed, member: PDInstance) -> float:
    """Unix time at which a drain no longer waits for a new member; infinity if it has served."""
    if not never_served(member):
        return math.inf
    engine = observed.engines.get(member.metadata.name)
    exited = engine is not None and (engine.restarts > 0 or engine.state is EngineState.EXITED)
    fails = exited or _blocked_start(observed, member) is not None
    return created_at_s(observed, member) + (
        REPLACEMENT_WAIT_S if fails else progress_timeout_s(observed, member)
    )
