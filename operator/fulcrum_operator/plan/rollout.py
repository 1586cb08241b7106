"""Target revision of each pool, and the number of instances to create now.

A revision is the hash of an instance's launch spec. All state is in the objects: the pool has the requested
and the last good launch spec, each instance has its revision. A roll-out therefore continues after a crash,
a scale or a pause.

New instances are created first, up to maxSurge; then `instances` removes outdated ones while enough others
serve. A revision that exits repeatedly or does not serve in time is rolled back to the last good one until
the spec changes. `service` calls `view_pool` in every reconcile; the rest of the plan reads the `PoolView`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fulcrum_core.api import LaunchSpec, PDInstance, PDPool, RefusedRevision
from fulcrum_core.ports import EngineState
from fulcrum_core.values import FAILED_STARTS_MAX
from fulcrum_operator.plan.departing_nodes import (
    count_moving_at_once,
    departure_of,
    find_departing,
    is_creation_overdue,
)
from fulcrum_operator.plan.instance_state import (
    active_instances,
    engine_lost,
    members_of,
    revision_of,
)
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.pools import desired_replicas
from fulcrum_operator.plan.start_deadlines import (
    created_at_s,
    find_overdue_starts,
    find_without_room,
    never_served,
    progress_timeout_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """Desired and actual instances of one pool at the time of a reconcile."""

    pool: PDPool
    desired_replicas: int
    """Desired number of instances, from the PDPool."""
    target: LaunchSpec
    """Launch spec for new instances: the requested one; the last good one while paused or rolled back."""
    revision: str
    """Hash of `target`."""
    members: tuple[PDInstance, ...]
    """Active instances, by number."""
    updated: tuple[PDInstance, ...]
    """Members with the target revision."""
    outdated: tuple[PDInstance, ...]
    """Members with another revision, which a roll-out replaces."""
    lost: int
    """Number of instances whose engine is lost and whose PDInstance still exists."""
    departing: tuple[PDInstance, ...]
    """Members whose nodes are about to be drained or deleted: new instances replace them."""
    departure_causes: tuple[str, ...]
    """How that is known: `cordoned`, and keys of taints."""
    moving_at_once: int
    """Instances beyond the desired number that may exist because of `departing`."""
    without_room: tuple[PDInstance, ...]
    """New members of the target revision for which no node has had room for `SURGE_WAIT_S`."""
    cannot_start: tuple[PDInstance, ...]
    """New members for which a drain of a node no longer waits."""
    creation_overdue: bool
    """Whether replacements of `departing`, if any are due, were not created for `REPLACEMENT_WAIT_S`."""
    paused: bool
    """Whether `spec.rollout.paused` is set."""
    refused: RefusedRevision | None
    """Requested revision that was rolled back, and why; None if it was not."""

    @property
    def name(self) -> str:
        """Name of the PDPool."""
        return self.pool.metadata.name

    @property
    def rolling_out(self) -> bool:
        """Whether outdated members are being replaced."""
        return bool(self.outdated) and not self.paused

    @property
    def in_place(self) -> bool:
        """Whether a roll-out has no room for one more instance, so that one fewer serves."""
        return self.rolling_out and bool(self.without_room)

    @property
    def can_replace_departing(self) -> bool:
        """Whether new instances replace those on departing nodes, as far as is known."""
        return not (self.departing and (self.cannot_start or self.cannot_create))

    @property
    def cannot_create(self) -> bool:
        """Whether a replacement of an instance on a departing node is overdue."""
        return self.creation_overdue and self.count_to_create(surge=0) > 0

    def off_departing_nodes(self, members: tuple[PDInstance, ...]) -> tuple[PDInstance, ...]:
        """The members whose nodes are not about to be drained or deleted."""
        moving = {instance.metadata.name for instance in self.departing}
        return tuple(member for member in members if member.metadata.name not in moving)

    @property
    def held_by_pause(self) -> bool:
        """Whether another revision is requested and the roll-out is paused."""
        return (
            self.paused
            and self.refused is None
            and (bool(self.outdated) or self.pool.spec.launch_spec != self.target)
        )

    @property
    def enough_serving(self) -> bool:
        """Whether at least the desired number of members serve."""
        return self.enough_serving_in(self.members)

    def enough_serving_in(self, members: tuple[PDInstance, ...]) -> bool:
        """Whether at least the desired number of instances serve among `members`."""
        return sum(member.is_serving for member in members) >= self.desired_replicas

    @property
    def last_good(self) -> LaunchSpec | None:
        """Launch spec with which all instances of the pool last served; None if they never all did."""
        all_updated = self.enough_serving and not self.outdated and self.members
        return self.target if all_updated else self.pool.status.last_good

    def count_to_create(self, *, surge: int) -> int:
        """Number of instances to create now.

        During a roll-out, the pool may exceed its desired number by `surge`, and at any time by
        `moving_at_once`. Lost instances lower the limit of twice the desired number, so that repeated losses
        are replaced more slowly.
        """
        room = self.desired_replicas + self.moving_at_once + (surge if self.rolling_out else 0)
        current = self.off_departing_nodes(self.updated if self.rolling_out else self.members)
        missing = self.desired_replicas - len(current)
        return max(0, min(missing, room - len(self.members), 2 * self.desired_replicas - self.lost))


def view_pool(observed: Observed, pool: PDPool) -> PoolView:
    """Compare the desired and the actual instances of a pool that the spec names."""
    pool_members = members_of(observed.instances, pool.metadata.name)
    members = members_of(active_instances(observed), pool.metadata.name)
    target, refused = _choose_target(observed, pool, members)
    revision = target.launch_revision
    updated = tuple(member for member in members if revision_of(member) == revision)
    departing = find_departing(observed, members)
    causes = {found.cause for member in departing if (found := departure_of(observed, member)) is not None}
    return PoolView(
        pool=pool,
        desired_replicas=desired_replicas(pool),
        target=target,
        revision=revision,
        members=members,
        updated=updated,
        outdated=tuple(member for member in members if revision_of(member) != revision),
        lost=sum(engine_lost(observed, instance) for instance in pool_members),
        departing=departing,
        departure_causes=tuple(sorted(causes)),
        moving_at_once=count_moving_at_once(observed, departing),
        without_room=find_without_room(observed, updated),
        cannot_start=find_overdue_starts(observed, (m for m in updated if m not in departing)),
        creation_overdue=is_creation_overdue(observed, pool_members, departing),
        paused=observed.service.spec.rollout.paused,
        refused=refused,
    )


def next_rollout_deadline_s(observed: Observed, view: PoolView) -> float | None:
    """Unix time at which the target revision is rolled back unless it serves; None if it cannot be."""
    if view.pool.status.last_good is None or not view.rolling_out:
        return None
    waiting = (i for i in view.updated if never_served(i))
    return min((created_at_s(observed, i) + progress_timeout_s(observed, i) for i in waiting), default=None)


def _choose_target(
    observed: Observed, pool: PDPool, members: tuple[PDInstance, ...]
) -> tuple[LaunchSpec, RefusedRevision | None]:
    requested, last_good, refused = pool.spec.launch_spec, pool.status.last_good, pool.status.refused
    revision = requested.launch_revision
    if last_good is None or last_good.launch_revision == revision:
        return requested, None
    if refused is not None and refused.revision == revision:
        return last_good, refused
    if observed.service.spec.rollout.paused:
        return last_good, None
    reason = _cannot_start_reason(observed, [member for member in members if revision_of(member) == revision])
    return (
        (last_good, RefusedRevision(revision=revision, reason=reason[:1024])) if reason else (requested, None)
    )


def _cannot_start_reason(observed: Observed, updated: Iterable[PDInstance]) -> str | None:
    """Why the requested revision is rolled back: its first failed instance; None if none has failed."""
    for instance in updated:
        name, engine = instance.metadata.name, observed.engines.get(instance.metadata.name)
        message = instance.status.message
        ended = engine is not None and engine.state is not EngineState.RUNNING
        if engine and ended and engine.restarts >= FAILED_STARTS_MAX:
            return f"{name} exited {engine.restarts} times: {engine.exit_reason or engine.message or message}"
        timeout_s = progress_timeout_s(observed, instance)
        if never_served(instance) and observed.now_s >= created_at_s(observed, instance) + timeout_s:
            return f"{name} did not serve within {timeout_s:g} s: {message or 'its engine is starting'}"
    return None
