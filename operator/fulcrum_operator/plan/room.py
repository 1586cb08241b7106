"""Instances without room: a roll-out's surplus instance that fits no node, and instances on departing nodes.

A surplus instance without room for `SURGE_WAIT_S` makes the roll-out replace in place: one instance fewer
serves, within the floors. Instances on departing nodes are about to be evicted: new ones replace them first.
If no replacement can be created or serve, the disruption budget lets an eviction take one instance away: a
node must never be impossible to drain. `rollout` and `instances` act on this, and the budget is part of the
plan.
"""

import math
from collections.abc import Iterable, Iterator

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.ports import EngineObservation, EngineState, NodeDeparture
from fulcrum_core.values import Phase
from fulcrum_operator.plan.instance_state import ever_served, startup_s
from fulcrum_operator.plan.observed import Observed

SURGE_WAIT_S = 120.0
"""Seconds for which a roll-out waits for room, in which a node may be added to the cluster."""
EVICTION_WAIT_S = 30.0
"""Seconds for which a drain of a node waits for a replacement that cannot be created, or cannot start."""
PROGRESS_TIMEOUT_MIN_S = 120.0
PROGRESS_TIMEOUT_FACTOR = 10
"""A new instance must serve within two minutes plus ten times its start-up time."""

_NOT_YET_SERVING = (Phase.PENDING, Phase.STARTING, Phase.FAILED)
_MOVING_PHASES = (Phase.SERVING, Phase.DRAINING, Phase.TERMINATING)


def on_departing_nodes(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """Those of the members that have to move: their nodes are about to be drained or deleted."""
    cordons_count = moves_from_cordoned_nodes(observed.service)
    return tuple(
        member
        for member in members
        if (found := departure_of(observed, member)) is not None and (found.is_certain or cordons_count)
    )


def moves_from_cordoned_nodes(service: PDService) -> bool:
    """Whether a cordon alone makes instances move to other nodes."""
    return service.spec.disruption.cordoned_nodes == "Move"


def departure_of(observed: Observed, member: PDInstance) -> NodeDeparture | None:
    """The departure of the instance's node; None if the node stays, or there is none yet."""
    engine = observed.engines.get(member.metadata.name)
    return None if engine is None else engine.node_departure


def count_moving_at_once(observed: Observed, departing: Iterable[PDInstance]) -> int:
    """How many instances may exist beyond the desired number because their nodes depart.

    All those whose nodes will be deleted: the time until then is short. Of those on nodes that are only
    cordoned, as many as evictions may take away at a time, by default one.
    """
    departures = [departure_of(observed, member) for member in departing]
    certain = sum(found is not None and found.is_certain for found in departures)
    at_once = observed.service.spec.disruption.max_unavailable or 1
    return certain + min(at_once, len(departures) - certain)


def without_room(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """New members for which no node has had room for `SURGE_WAIT_S`."""
    return tuple(
        member
        for member in members
        if (engine := _blocked_start(observed, member)) is not None
        and engine.lacks_room
        and observed.now_s >= created_s(observed, member) + SURGE_WAIT_S
    )


def find_overdue(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """Return the new members that should serve by now, for which the drain of a node waits no longer.

    The drain waits `EVICTION_WAIT_S` for a member that has exited or that something keeps from starting, and
    for any other as long as a roll-out does.
    """
    return tuple(member for member in members if observed.now_s >= _serving_deadline_s(observed, member))


def misses_replacement(
    observed: Observed, pool: Iterable[PDInstance], departing: tuple[PDInstance, ...]
) -> bool:
    """Whether a drain has waited `EVICTION_WAIT_S` for an instance that should have been created by now.

    Args:
        observed: The facts of this reconcile.
        pool: All instances of the pool, also terminating ones.
        departing: Those that have to move.
    """
    return bool(departing) and observed.now_s >= _creation_deadline_s(observed, pool, departing)


def room_deadlines_s(
    observed: Observed,
    pool: Iterable[PDInstance],
    updated: Iterable[PDInstance],
    departing: tuple[PDInstance, ...],
) -> Iterator[float]:
    """Unix times at which `updated` count as without room, and at which a drain no longer waits."""
    for member in updated:
        if _blocked_start(observed, member) is not None:
            yield created_s(observed, member) + SURGE_WAIT_S
        if departing:
            yield _serving_deadline_s(observed, member)
    if departing:
        yield _creation_deadline_s(observed, pool, departing)


def progress_timeout_s(observed: Observed, instance: PDInstance) -> float:
    """Seconds from an instance's creation in which it must first serve, else its revision is rolled back."""
    requested = observed.service.spec.rollout.progress_deadline
    return (
        PROGRESS_TIMEOUT_MIN_S + PROGRESS_TIMEOUT_FACTOR * startup_s(observed, instance)
        if requested is None
        else requested
    )


def never_served(instance: PDInstance) -> bool:
    """Whether the instance is new: no run of its engine has served yet."""
    return instance.status.phase in _NOT_YET_SERVING and not ever_served(instance)


def plan_min_available(
    service: PDService,
    *,
    desired: int,
    serving: int,
    can_move: bool,
    sees_nodes: bool,
    deletion_announced: bool = False,
) -> int:
    """Least number of instances that evictions leave: `minAvailable` of the engines' disruption budget.

    By default one instance may be evicted at a time, and none below the floors, because new instances replace
    those on departing nodes first. Where that is impossible, one may be evicted in any case.

    Node autoscalers announce the deletion of a node only if the budget allows an eviction. So with
    `disruption.maxUnavailable` the floors hold from the announcement until replacements serve.

    Args:
        service: The floors, and `disruption`, which replaces them.
        desired: Desired instances of the service.
        serving: Serving instances of the service.
        can_move: Whether instances on departing nodes can be replaced first, or there are none.
        sees_nodes: Whether the operator may watch nodes.
        deletion_announced: Whether a node with instances will be deleted.
    """
    max_unavailable = service.spec.disruption.max_unavailable
    floors = service.spec.roles.to_floors()
    in_floors = floors.prefill + floors.decode
    if max_unavailable is None:
        least = max(in_floors, desired - 1)
    else:
        least = max(in_floors if deletion_announced else 0, desired - max_unavailable)
    if not (sees_nodes and moves_from_cordoned_nodes(service)):
        least = min(least, desired - 1)
    if not can_move:
        least = min(least, serving - 1)
    return max(0, min(desired, least))


def created_s(observed: Observed, instance: PDInstance) -> float:
    """Creation of the instance in unix seconds; now for one that is being created."""
    at_s = instance.metadata.creation_timestamp
    return observed.now_s if at_s is None else at_s


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
    return created_s(observed, member) + (EVICTION_WAIT_S if fails else progress_timeout_s(observed, member))


def _creation_deadline_s(
    observed: Observed, pool: Iterable[PDInstance], departing: tuple[PDInstance, ...]
) -> float:
    """Unix time at which a drain no longer waits for an instance to be created.

    The wait begins with the latest of: a departure, the creation of an instance, and a step of one that
    serves or leaves, since the next one is created when the last one has moved.
    """
    steps = [
        *(found.since_s for member in departing if (found := departure_of(observed, member)) is not None),
        *(created_s(observed, member) for member in pool),
        *(
            member.status.phase_since
            for member in pool
            if member.status.phase in _MOVING_PHASES and member.status.phase_since is not None
        ),
    ]
    return max(steps, default=observed.now_s) + EVICTION_WAIT_S
