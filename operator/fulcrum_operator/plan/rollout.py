"""Which revision the instances of a pool shall have, and how many of them may be exchanged now.

A revision is the hash of what an instance is started with. Everything is read off the objects on each pass:
the pool says what is asked and what was good last, each instance says which revision it is, so that a
roll-out goes on where a crash, a scale or a pause left it.

New instances come first, as far as the surge allows; old ones leave as far as enough others serve. A revision
that does not come to serve in time is given up: the last good one is wanted again until the spec changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fulcrum_core.api import PDInstance, PDPool, RefusedRevision, StartSpec
from fulcrum_core.ports import EngineState
from fulcrum_core.values import Phase
from fulcrum_operator.plan.observed import Observed, by_number, ever_served
from fulcrum_operator.plan.pools import wanted_replicas

PROGRESS_LEAST_S = 120.0
PROGRESS_FACTOR = 10
"""A new instance that has not served after two minutes and ten times its start-up never will."""

HOPELESS_STARTS = 3
"""An engine of a new revision that ended so often is not waited for."""

LOST_SHOWN_S = 60.0
"""For how long a lost instance is shown as failed, unless all is well again before."""

_NOT_YET = (Phase.PENDING, Phase.STARTING, Phase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool, what it shall have and what it has."""

    pool: PDPool
    wanted: int
    target: StartSpec
    """What its instances shall be started with."""
    revision: str
    """The hash of that."""
    members: tuple[PDInstance, ...]
    """Its instances that count, by number."""
    new: tuple[PDInstance, ...]
    """Members of that revision."""
    old: tuple[PDInstance, ...]
    """Members that have to be exchanged."""
    lost: int
    """Instances on show that were lost."""
    paused: bool
    refused: RefusedRevision | None

    @property
    def name(self) -> str:
        """Of the PDPool."""
        return self.pool.metadata.name

    @property
    def rolls(self) -> bool:
        """Whether members are being exchanged."""
        return bool(self.old) and not self.paused

    @property
    def waits(self) -> bool:
        """Whether another revision is asked for, and a pause holds it up."""
        return (
            self.paused and self.refused is None and (bool(self.old) or self.pool.spec.start != self.target)
        )

    @property
    def whole(self) -> bool:
        """Whether as many serve as are wanted."""
        return self.whole_of(self.members)

    def whole_of(self, members: tuple[PDInstance, ...]) -> bool:
        """Whether as many of these serve as are wanted."""
        return sum(member.status.phase is Phase.SERVING for member in members) >= self.wanted

    @property
    def last_good(self) -> StartSpec | None:
        """What all of its instances were last started with and served."""
        complete = self.whole and not self.old and self.members
        return self.target if complete else self.pool.status.last_good

    def births(self, *, surge: int) -> int:
        """How many instances to make now.

        Whoever is lost again and again is replaced more slowly: what was lost of late counts against it.
        """
        room = self.wanted + surge if self.rolls else self.wanted
        lacking = self.wanted - len(self.new if self.rolls else self.members)
        return max(0, min(lacking, room - len(self.members), 2 * self.wanted - self.lost))


def revision_of(instance: PDInstance) -> str:
    """The revision that an instance was started with."""
    return instance.spec.revision or instance.spec.start_revision


def members_of(instances: Iterable[PDInstance], pool: str) -> tuple[PDInstance, ...]:
    """The instances of one pool, by number."""
    return tuple(
        sorted((i for i in instances if i.spec.pool == pool), key=lambda i: by_number(i.metadata.name))
    )


def view_of(seen: Observed, pool: PDPool) -> PoolView:
    """What a pool that the spec names shall have and has."""
    mine = members_of(seen.instances, pool.metadata.name)
    members = members_of(seen.staying, pool.metadata.name)
    target, refused = _target(seen, pool, members)
    revision = target.start_revision
    return PoolView(
        pool=pool,
        wanted=wanted_replicas(pool),
        target=target,
        revision=revision,
        members=members,
        new=tuple(member for member in members if revision_of(member) == revision),
        old=tuple(member for member in members if revision_of(member) != revision),
        lost=sum(seen.taken(instance) for instance in mine),
        paused=seen.service.spec.rollout.paused,
        refused=refused,
    )


def progress_deadline_s(seen: Observed, instance: PDInstance) -> float:
    """How long a new instance may take to serve for the first time."""
    asked = seen.service.spec.rollout.progress_deadline
    return PROGRESS_LEAST_S + PROGRESS_FACTOR * seen.startup_s(instance) if asked is None else asked


def next_deadline_s(seen: Observed, view: PoolView) -> float | None:
    """When a revision may have to be given up, unix seconds; None: not by time alone."""
    if view.pool.status.last_good is None or not view.rolls:
        return None
    waiting = (i for i in view.new if _not_served(i))
    return min((_born_s(seen, i) + progress_deadline_s(seen, i) for i in waiting), default=None)


def _target(
    seen: Observed, pool: PDPool, members: tuple[PDInstance, ...]
) -> tuple[StartSpec, RefusedRevision | None]:
    asked, good, refused = pool.spec.start, pool.status.last_good, pool.status.refused
    revision = asked.start_revision
    if good is None or good.start_revision == revision:
        return asked, None
    if refused is not None and refused.revision == revision:
        return good, refused
    if seen.service.spec.rollout.paused:
        return good, None
    why = _hopeless(seen, [member for member in members if revision_of(member) == revision])
    return (good, RefusedRevision(revision=revision, reason=why[:1024])) if why else (asked, None)


def _hopeless(seen: Observed, new: Iterable[PDInstance]) -> str | None:
    """Why a revision will not come to serve, by the first of its instances that does not; None if it may."""
    for instance in new:
        name, engine = instance.metadata.name, seen.engines.get(instance.metadata.name)
        words = instance.status.message
        ended = engine is not None and engine.state is not EngineState.RUNNING
        if engine and ended and engine.restarts >= HOPELESS_STARTS:
            return f"{name} ended {engine.restarts} times: {engine.exit_reason or engine.message or words}"
        deadline_s = progress_deadline_s(seen, instance)
        if _not_served(instance) and seen.now_s >= _born_s(seen, instance) + deadline_s:
            return f"{name} did not serve within {deadline_s:g} s: {words or 'it starts'}"
    return None


def _not_served(instance: PDInstance) -> bool:
    return instance.status.phase in _NOT_YET and not ever_served(instance)


def _born_s(seen: Observed, instance: PDInstance) -> float:
    born_s = instance.metadata.creation_timestamp
    return seen.now_s if born_s is None else born_s
