"""Instances without room: a roll-out's surplus instance that fits no node, and instances on cordoned nodes.

A surplus instance without room for `SURGE_WAIT_S` makes the roll-out replace in place: one instance fewer
serves, within the floors. Instances on cordoned nodes are about to be evicted: new ones replace them first.
If a replacement does not start within `EVICTION_WAIT_S`, the disruption budget lets an eviction take one
instance away: a node must never be impossible to drain. `rollout` and `instances` act on this, and the budget
is part of the plan.
"""

from collections.abc import Iterable, Iterator

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.ports import EngineState
from fulcrum_operator.plan.instance_state import ever_served
from fulcrum_operator.plan.observed import Observed

SURGE_WAIT_S = 120.0
"""Seconds for which a roll-out waits for room, in which a node may be added to the cluster."""
EVICTION_WAIT_S = 30.0
"""Seconds for which a drain of a node waits for a replacement that cannot start."""


def on_cordoned_nodes(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """Those of the members whose node takes no new pods."""
    return tuple(
        member
        for member in members
        if (engine := observed.engines.get(member.metadata.name)) is not None and engine.node_cordoned
    )


def without_room(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """New members for which no node has had room for `SURGE_WAIT_S`."""
    return tuple(
        member
        for member in _lacking_room(observed, members)
        if observed.now_s >= created_s(observed, member) + SURGE_WAIT_S
    )


def that_cannot_start(observed: Observed, members: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """New members that something has prevented from starting for `EVICTION_WAIT_S`."""
    return tuple(
        member
        for member in _not_starting(observed, members)
        if observed.now_s >= created_s(observed, member) + EVICTION_WAIT_S
    )


def room_deadlines_s(observed: Observed, members: Iterable[PDInstance]) -> Iterator[float]:
    """Unix times at which members that find no room count as such."""
    for member in _not_starting(observed, members):
        yield created_s(observed, member) + EVICTION_WAIT_S
        yield created_s(observed, member) + SURGE_WAIT_S


def plan_min_available(
    service: PDService, *, desired: int, serving: int, can_move: bool, sees_cordons: bool
) -> int:
    """Least number of instances that evictions leave: `minAvailable` of the engines' disruption budget.

    By default one instance may be evicted at a time, and none below the floors, because new instances replace
    those on cordoned nodes first. Where that is impossible, one may be evicted in any case.

    Args:
        service: The floors, and `disruption.maxUnavailable`, which replaces them.
        desired: Desired instances of the service.
        serving: Serving instances of the service.
        can_move: Whether instances on cordoned nodes can be replaced first, or there are none.
        sees_cordons: Whether the operator may list nodes.
    """
    max_unavailable = service.spec.disruption.max_unavailable
    floors = service.spec.roles.to_floors()
    least = (
        max(floors.prefill + floors.decode, desired - 1)
        if max_unavailable is None
        else desired - max_unavailable
    )
    if not sees_cordons:
        least = min(least, desired - 1)
    if not can_move:
        least = min(least, serving - 1)
    return max(0, min(desired, least))


def created_s(observed: Observed, instance: PDInstance) -> float:
    """Creation of the instance in unix seconds; now for one that is being created."""
    at_s = instance.metadata.creation_timestamp
    return observed.now_s if at_s is None else at_s


def _lacking_room(observed: Observed, members: Iterable[PDInstance]) -> Iterator[PDInstance]:
    for member in _not_starting(observed, members):
        if observed.engines[member.metadata.name].lacks_room:
            yield member


def _not_starting(observed: Observed, members: Iterable[PDInstance]) -> Iterator[PDInstance]:
    for member in members:
        engine = observed.engines.get(member.metadata.name)
        starting = engine is not None and engine.state is EngineState.STARTING
        if starting and engine is not None and engine.reason and not ever_served(member):
            yield member
