"""Instances on departing nodes: which have to move, how many at once, and when their replacement is overdue.

A departing node is about to be drained or deleted. New instances replace its instances before they are
evicted. If a replacement is overdue, `disruption_budget` lets evictions go on without it. `rollout` counts
the instances to create for them, and `service` decides when to look again.
"""

from collections.abc import Iterable

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.ports import NodeDeparture
from fulcrum_core.values import Phase
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.start_deadlines import REPLACEMENT_WAIT_S, created_at_s

_MOVING_PHASES = (Phase.SERVING, Phase.DRAINING, Phase.TERMINATING)


def find_departing(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """The members that have to move: their nodes will be deleted, or are cordoned and that suffices."""
    cordons_count = cordons_move_instances(observed.service)
    return tuple(
        member
        for member in members
        if (found := departure_of(observed, member)) is not None and (found.is_certain or cordons_count)
    )


def cordons_move_instances(service: PDService) -> bool:
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


def is_creation_overdue(
    observed: Observed, pool: Iterable[PDInstance], departing: tuple[PDInstance, ...]
) -> bool:
    """Whether a drain has waited `REPLACEMENT_WAIT_S` for an instance that should have been created by now.

    Args:
        observed: The facts of this reconcile.
        pool: All instances of the pool, also terminating ones.
        departing: Those that have to move.
    """
    return bool(departing) and observed.now_s >= creation_deadline_s(observed, pool, departing)


def creation_deadline_s(
    observed: Observed, pool: Iterable[PDInstance], departing: tuple[PDInstance, ...]
) -> float:
    """Unix time at which a drain no longer waits for an instance to be created.

    The wait begins with the latest of: a departure, the creation of an instance, and a step of one that
    serves or leaves, since the next one is created when the last one has moved.
    """
    steps = [
        *(found.since_s for member in departing if (found := departure_of(observed, member)) is not None),
        *(created_at_s(observed, member) for member in pool),
        *(
            member.status.phase_since
            for member in pool
            if member.status.phase in _MOVING_PHASES and member.status.phase_since is not None
        ),
    ]
    return max(steps, default=observed.now_s) + REPLACEMENT_WAIT_S
