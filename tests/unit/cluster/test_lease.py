"""Election by a Lease: who leads, how soon another one does, and what an absent store changes."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from fulcrum_cluster.lease import Elector, LeaseRecord, LeaseTiming, StepDown
from fulcrum_core.errors import AlreadyExists, Conflict, NotFound, StoreUnavailable

pytestmark = pytest.mark.looptime(start=0.0)

TIMING = LeaseTiming(duration_s=3.0, renew_s=1.0, retry_s=0.5, deadline_s=2.0)
SOON_S = 0.01


class LoopClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass
class Register:
    """A Lease in memory that can be away, or hang."""

    record: LeaseRecord | None = None
    version: int = 0
    away: bool = False
    hangs: bool = False
    writes: list[str | None] = field(default_factory=list)

    async def read(self) -> tuple[LeaseRecord, str]:
        await self._answer()
        if self.record is None:
            raise NotFound("no lease")
        return self.record, str(self.version)

    async def write(self, record: LeaseRecord, *, version: str | None) -> str:
        await self._answer()
        if version is None and self.record is not None:
            raise AlreadyExists("there is one")
        if version is not None and version != str(self.version):
            raise Conflict("another version")
        self.writes.append(record.holder)
        self.record, self.version = record, self.version + 1
        return str(self.version)

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.away:
            raise StoreUnavailable("away")


class Candidates:
    """Candidates for one lease, and who led when."""

    def __init__(self, register: Register, seed: int, step_down: StepDown) -> None:
        self.register, self.step_down = register, step_down
        self.rng = random.Random(seed)
        self.by_name: dict[str, Elector] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.history: list[tuple[str, bool]] = []

    def start(self, name: str) -> Elector:
        elector = self.by_name[name] = Elector(
            self.register,
            identity=name,
            timing=TIMING,
            step_down=self.step_down,
            clock=LoopClock(),
            rng=self.rng,
            on_change=lambda leads: self.history.append((name, leads)),
        )
        self.tasks[name] = asyncio.ensure_future(elector.run())
        return elector

    def kill(self, name: str) -> None:
        self.tasks.pop(name).cancel()
        del self.by_name[name]

    @property
    def leading(self) -> list[str]:
        return [name for name, elector in sorted(self.by_name.items()) if elector.leading]

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@contextmanager
def candidates(seed: int, step_down: StepDown, register: Register | None = None) -> Iterator[Candidates]:
    made = Candidates(register or Register(), seed, step_down)
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()


BOTH = pytest.mark.parametrize("step_down", list(StepDown))


@BOTH
async def test_the_first_one_leads_and_goes_on_leading(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as world:
        world.start("a")
        await world.pass_time(SOON_S)
        world.start("b")
        await world.pass_time(60)
        assert (world.leading, world.history) == (["a"], [("a", True)])
        assert world.register.record is not None
        assert (world.register.record.holder, world.register.record.transitions) == ("a", 0)


@BOTH
async def test_a_dead_holder_is_followed_within_its_duration_and_a_retry(
    seed: int, step_down: StepDown
) -> None:
    with candidates(seed, step_down) as world:
        world.start("a")
        await world.pass_time(SOON_S)
        world.start("b")
        await world.pass_time(7.3)
        world.kill("a")
        await world.pass_time(TIMING.duration_s - TIMING.renew_s - SOON_S)
        assert world.leading == []
        await world.pass_time(TIMING.renew_s + TIMING.retry_s + 2 * SOON_S)
        assert world.leading == ["b"]
        assert world.register.record is not None
        assert world.register.record.transitions == 1


@BOTH
async def test_a_released_lease_is_taken_within_a_retry(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as world:
        a = world.start("a")
        await world.pass_time(SOON_S)
        world.start("b")
        await world.pass_time(5)
        world.tasks["a"].cancel()
        await a.release()
        await world.pass_time(TIMING.retry_s + SOON_S)
        assert (world.leading, world.history) == (["b"], [("a", True), ("a", False), ("b", True)])


@BOTH
async def test_a_process_that_comes_back_under_its_name_leads_at_once(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as world:
        world.start("a")
        await world.pass_time(SOON_S)
        world.start("b")
        await world.pass_time(2)
        world.kill("a")
        world.start("a")
        await world.pass_time(SOON_S)
        assert world.leading == ["a"]


async def test_a_store_that_is_away_leaves_the_leader_of_must_go_on_work(seed: int) -> None:
    with candidates(seed, StepDown.WHEN_REPLACED) as world:
        world.start("a")
        await world.pass_time(SOON_S)
        world.start("b")
        await world.pass_time(5)
        world.register.away = True
        await world.pass_time(30)
        assert world.leading == ["a"]
        world.register.away = False
        await world.pass_time(30)
        assert (world.leading, world.history) == (["a"], [("a", True)])


@pytest.mark.parametrize("how", ["away", "hangs"])
async def test_the_leader_of_only_one_may_work_steps_down_before_another_can_follow(
    seed: int, how: str
) -> None:
    with candidates(seed, StepDown.AT_DEADLINE) as world:
        world.start("a")
        await world.pass_time(5)
        setattr(world.register, how, True)
        await world.pass_time(TIMING.deadline_s + SOON_S)
        assert (world.leading, world.history) == ([], [("a", True), ("a", False)])
        setattr(world.register, how, False)
        await world.pass_time(TIMING.duration_s + TIMING.retry_s)
        assert world.leading == ["a"]


async def test_a_leader_that_was_stopped_knows_by_its_clock_that_it_leads_no_more(seed: int) -> None:
    with candidates(seed, StepDown.AT_DEADLINE) as world:
        a = world.start("a")
        await world.pass_time(SOON_S)
        world.tasks["a"].cancel()  # as if it were not scheduled
        await world.pass_time(TIMING.deadline_s)
        assert not a.leading


@BOTH
async def test_another_holder_ends_the_leadership(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as world:
        world.start("a")
        await world.pass_time(SOON_S)
        assert world.register.record is not None
        world.register.record = replace(world.register.record, holder="b", renewed="now")
        world.register.version += 1
        await world.pass_time(TIMING.renew_s + SOON_S)
        assert (world.leading, world.by_name["a"].holder) == ([], "b")


@BOTH
async def test_a_lease_that_was_deleted_is_made_anew(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as world:
        world.start("a")
        await world.pass_time(SOON_S)
        world.register.record = None
        await world.pass_time(TIMING.renew_s + SOON_S)
        assert world.register.record is not None
        assert (world.leading, world.history) == (["a"], [("a", True)])


@BOTH
async def test_of_many_at_once_exactly_one_leads_whoever_dies(seed: int, step_down: StepDown) -> None:
    with candidates(seed, step_down) as world:
        names = [f"c{n}" for n in range(6)]
        for name in names:
            world.start(name)
        led = set()
        for _ in names[:-1]:
            await world.pass_time(TIMING.duration_s + TIMING.retry_s + SOON_S)
            [leader] = world.leading
            led.add(leader)
            world.kill(leader)
        assert len(led) == len(names) - 1


async def test_releasing_what_another_one_holds_changes_nothing(seed: int) -> None:
    with candidates(seed, StepDown.WHEN_REPLACED) as world:
        a = world.start("a")
        await world.pass_time(SOON_S)
        world.tasks["a"].cancel()
        assert world.register.record is not None
        world.register.record = held = replace(world.register.record, holder="b")
        world.register.version += 1
        await a.release()
        assert (world.register.record, a.leading) == (held, False)
