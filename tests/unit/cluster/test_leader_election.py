"""Leader election by a Lease: one leader at a time, timely failover, and behaviour without the store."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from fulcrum_cluster.leader_election import LeaderElector, LeaseRecord, LeaseTiming, StepDown
from fulcrum_core.errors import AlreadyExists, Conflict, NotFound, StoreUnavailable
from tests.clocks import LoopClock
from tests.waiting import advance

pytestmark = pytest.mark.looptime(start=0.0)

TIMING = LeaseTiming(lease_duration_s=3.0, renew_interval_s=1.0, retry_interval_s=0.5, renew_deadline_s=2.0)
SHORT_S = 0.01


@dataclass
class FakeLeaseStore:
    """A Lease in memory whose store can be unavailable, or not respond."""

    record: LeaseRecord | None = None
    version: int = 0
    unavailable: bool = False
    hangs: bool = False
    writes: list[str | None] = field(default_factory=list)

    async def read(self) -> tuple[LeaseRecord, str]:
        await self._respond()
        if self.record is None:
            raise NotFound("no lease")
        return self.record, str(self.version)

    async def write(self, record: LeaseRecord, *, version: str | None) -> str:
        await self._respond()
        if version is None and self.record is not None:
            raise AlreadyExists("there is one")
        if version is not None and version != str(self.version):
            raise Conflict("another version")
        self.writes.append(record.holder)
        self.record, self.version = record, self.version + 1
        return str(self.version)

    async def _respond(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.unavailable:
            raise StoreUnavailable("away")


class Candidates:
    """Candidates for one lease, and the history of their leadership."""

    def __init__(self, lease_store: FakeLeaseStore, seed: int, step_down: StepDown) -> None:
        self.lease_store, self.step_down = lease_store, step_down
        self.rng = random.Random(seed)
        self.by_name: dict[str, LeaderElector] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.history: list[tuple[str, bool]] = []
        self.unable: set[str] = set()

    def start(self, name: str) -> LeaderElector:
        elector = self.by_name[name] = LeaderElector(
            self.lease_store,
            identity=name,
            timing=TIMING,
            step_down=self.step_down,
            clock=LoopClock(),
            rng=self.rng,
            on_change=lambda leads: self.history.append((name, leads)),
            able_to_lead=lambda: name not in self.unable,
        )
        self.tasks[name] = asyncio.ensure_future(elector.run())
        return elector

    def kill(self, name: str) -> None:
        self.tasks.pop(name).cancel()
        del self.by_name[name]

    @property
    def leading(self) -> list[str]:
        return [name for name, elector in sorted(self.by_name.items()) if elector.leading]


@contextmanager
def candidates(
    seed: int, step_down: StepDown, lease_store: FakeLeaseStore | None = None
) -> Iterator[Candidates]:
    made = Candidates(lease_store or FakeLeaseStore(), seed, step_down)
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()


EACH_STEP_DOWN = pytest.mark.parametrize("step_down", list(StepDown))


@EACH_STEP_DOWN
async def test_first_candidate_keeps_the_lead(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as election:
        election.start("a")
        await advance(SHORT_S)
        election.start("b")
        await advance(60)
        assert (election.leading, election.history) == (["a"], [("a", True)])
        assert election.lease_store.record is not None
        assert (election.lease_store.record.holder, election.lease_store.record.transitions) == ("a", 0)


@EACH_STEP_DOWN
async def test_dead_leader_is_replaced_within_lease_duration_plus_retry(
    seed: int, step_down: StepDown
) -> None:
    with candidates(seed, step_down) as election:
        election.start("a")
        await advance(SHORT_S)
        election.start("b")
        await advance(7.3)
        election.kill("a")
        await advance(TIMING.lease_duration_s - TIMING.renew_interval_s - SHORT_S)
        assert election.leading == []
        await advance(TIMING.renew_interval_s + TIMING.retry_interval_s + 2 * SHORT_S)
        assert election.leading == ["b"]
        assert election.lease_store.record is not None
        assert election.lease_store.record.transitions == 1


async def test_leader_that_is_unable_to_lead_is_replaced_as_if_it_were_dead(seed: int) -> None:
    with candidates(seed, StepDown.AT_DEADLINE) as election:
        election.start("a")
        await advance(SHORT_S)
        election.start("b")
        await advance(7.3)
        election.unable.add("a")
        await advance(TIMING.lease_duration_s + TIMING.retry_interval_s + 2 * SHORT_S)
        assert (election.leading, election.history) == (["b"], [("a", True), ("a", False), ("b", True)])


async def test_free_lease_is_left_to_a_candidate_that_is_able_to_lead(seed: int) -> None:
    with candidates(seed, StepDown.AT_DEADLINE) as election:
        election.unable.add("a")
        election.start("a")
        await advance(5)
        assert (election.leading, election.lease_store.record) == ([], None)
        election.unable.remove("a")
        await advance(TIMING.retry_interval_s)
        assert election.leading == ["a"]


@EACH_STEP_DOWN
async def test_released_lease_is_taken_within_one_retry(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as election:
        a = election.start("a")
        await advance(SHORT_S)
        election.start("b")
        await advance(5)
        election.tasks["a"].cancel()
        await a.release()
        await advance(TIMING.retry_interval_s + SHORT_S)
        assert (election.leading, election.history) == (["b"], [("a", True), ("a", False), ("b", True)])


@EACH_STEP_DOWN
async def test_restarted_leader_with_the_same_identity_leads_at_once(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as election:
        election.start("a")
        await advance(SHORT_S)
        election.start("b")
        await advance(2)
        election.kill("a")
        election.start("a")
        await advance(SHORT_S)
        assert election.leading == ["a"]


async def test_when_replaced_leader_keeps_leading_while_the_store_is_unavailable(seed: int) -> None:
    with candidates(seed, StepDown.WHEN_REPLACED) as election:
        election.start("a")
        await advance(SHORT_S)
        election.start("b")
        await advance(5)
        election.lease_store.unavailable = True
        await advance(30)
        assert election.leading == ["a"]
        election.lease_store.unavailable = False
        await advance(30)
        assert (election.leading, election.history) == (["a"], [("a", True)])


@pytest.mark.parametrize("how", ["unavailable", "hangs"])
async def test_at_deadline_leader_steps_down_before_another_can_take_over(seed: int, how: str) -> None:
    with candidates(seed, StepDown.AT_DEADLINE) as election:
        election.start("a")
        await advance(5)
        setattr(election.lease_store, how, True)
        await advance(TIMING.renew_deadline_s + SHORT_S)
        assert (election.leading, election.history) == ([], [("a", True), ("a", False)])
        setattr(election.lease_store, how, False)
        await advance(TIMING.lease_duration_s + TIMING.retry_interval_s)
        assert election.leading == ["a"]


async def test_suspended_leader_stops_leading_by_its_own_clock(seed: int) -> None:
    with candidates(seed, StepDown.AT_DEADLINE) as election:
        a = election.start("a")
        await advance(SHORT_S)
        election.tasks["a"].cancel()  # like a process that the kernel does not schedule
        await advance(TIMING.renew_deadline_s)
        assert not a.leading


@EACH_STEP_DOWN
async def test_leader_steps_down_when_another_holds_the_lease(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as election:
        election.start("a")
        await advance(SHORT_S)
        assert election.lease_store.record is not None
        election.lease_store.record = replace(election.lease_store.record, holder="b", renewed="now")
        election.lease_store.version += 1
        await advance(TIMING.renew_interval_s + SHORT_S)
        assert (election.leading, election.by_name["a"].holder) == ([], "b")


@EACH_STEP_DOWN
async def test_deleted_lease_is_created_again(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as election:
        election.start("a")
        await advance(SHORT_S)
        election.lease_store.record = None
        await advance(TIMING.renew_interval_s + SHORT_S)
        assert election.lease_store.record is not None
        assert (election.leading, election.history) == (["a"], [("a", True)])


@EACH_STEP_DOWN
async def test_exactly_one_of_many_candidates_leads_after_each_death(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as election:
        names = [f"c{n}" for n in range(6)]
        for name in names:
            election.start(name)
        led = set()
        for _ in names[:-1]:
            await advance(TIMING.lease_duration_s + TIMING.retry_interval_s + SHORT_S)
            [leader] = election.leading
            led.add(leader)
            election.kill(leader)
        assert len(led) == len(names) - 1


async def test_release_leaves_a_lease_of_another_holder(seed: int) -> None:
    with candidates(seed, StepDown.WHEN_REPLACED) as election:
        a = election.start("a")
        await advance(SHORT_S)
        election.tasks["a"].cancel()
        assert election.lease_store.record is not None
        election.lease_store.record = held = replace(election.lease_store.record, holder="b")
        election.lease_store.version += 1
        await a.release()
        assert (election.lease_store.record, a.leading) == (held, False)
