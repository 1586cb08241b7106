"""An election in a thread renews its Lease while the program's event loop is busy, and not once it hangs."""

import asyncio
import random
import threading
from collections.abc import Callable

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.election_thread import ElectionThread
from fulcrum_cluster.leader_election import LeaderElector, LeaseRecord, LeaseTiming, StepDown
from fulcrum_core.errors import NotFound
from fulcrum_core.ports import Clock
from tests.clocks import ManualClock
from tests.waiting import wait_until

TIMING = LeaseTiming(
    lease_duration_s=60.0, renew_interval_s=0.01, retry_interval_s=0.01, renew_deadline_s=30.0
)
HUNG_AFTER_S = 20.0


class SharedLease:
    """A Lease in memory; another thread can wait until it is read or written."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.reads, self.writes, self.closed_in = 0, 0, ""
        self.used = threading.Condition()

    async def read(self) -> tuple[LeaseRecord, str]:
        with self.used:
            self.reads += 1
            self.used.notify_all()
        if self.record is None:
            raise NotFound("no lease")
        return self.record, "1"

    async def write(self, record: LeaseRecord, *, version: str | None) -> str:
        del version
        with self.used:
            self.record, self.writes = record, self.writes + 1
            self.used.notify_all()
        return "1"

    async def close(self) -> None:
        self.closed_in = threading.current_thread().name

    def block_until_writes(self, more: int) -> None:
        """Wait for so many writes, and block the thread of the caller meanwhile."""
        until = self.writes + more
        self._block_until(lambda: self.writes >= until)

    def block_until_reads(self, more: int) -> None:
        """Wait for so many reads, and block the thread of the caller meanwhile."""
        until = self.reads + more
        self._block_until(lambda: self.reads >= until)

    def _block_until(self, happened: Callable[[], bool]) -> None:
        with self.used:
            assert self.used.wait_for(happened, timeout=10.0)


class Program:
    """A program whose election is in a thread, and the changes of leadership that it is informed of."""

    def __init__(self, lease: SharedLease, clock: Clock) -> None:
        self.lease, self.clock = lease, clock
        self.changes = list[bool]()
        self.stepped_down = threading.Event()
        self.election = ElectionThread(
            self.make_elector, lease.close, self.changes.append, hung_after_s=HUNG_AFTER_S, clock=clock
        )

    def make_elector(self, notify: Callable[[bool], None], able_to_lead: Callable[[], bool]) -> LeaderElector:
        def on_change(leads: bool) -> None:
            notify(leads)
            if not leads:
                self.stepped_down.set()

        return LeaderElector(
            self.lease,
            identity="a",
            timing=TIMING,
            step_down=StepDown.AT_DEADLINE,
            clock=self.clock,
            rng=random.Random(0),
            on_change=on_change,
            able_to_lead=able_to_lead,
        )


async def test_a_lease_is_renewed_while_the_event_loop_is_blocked() -> None:
    lease = SharedLease()
    program = Program(lease, SystemClock())
    async with program.election as election:
        running = asyncio.get_running_loop().create_task(election.run())
        await wait_until(lambda: program.changes == [True])
        lease.block_until_writes(3)
        assert (election.leading, election.holder) == (True, "a")
        running.cancel()
        await asyncio.wait([running])
        await election.release()
        assert (program.changes, election.leading) == ([True, False], False)
    assert lease.record is not None
    assert (lease.record.holder, lease.closed_in) == (None, "election")


async def test_a_leader_whose_event_loop_hangs_does_not_renew_its_lease_and_steps_down() -> None:
    lease, clock = SharedLease(), ManualClock(1000.0)
    program = Program(lease, clock)
    async with program.election as election:
        running = asyncio.get_running_loop().create_task(election.run())
        await wait_until(lambda: program.changes == [True])
        clock.at_s += HUNG_AFTER_S - 1.0
        lease.block_until_writes(2)  # this blocks the event loop, and so does each wait below
        clock.at_s += 2.0
        lease.block_until_reads(2)  # a renewal that had begun is written
        writes = lease.writes
        lease.block_until_reads(3)
        assert (lease.writes, election.leading) == (writes, True)
        clock.at_s += TIMING.renew_deadline_s
        assert program.stepped_down.wait(10.0)
        assert (lease.writes, election.leading) == (writes, False)
        running.cancel()
        await asyncio.wait([running])
    assert program.changes[:2] == [True, False]


async def test_an_error_of_the_election_is_raised_where_it_was_started() -> None:
    lease = SharedLease()
    lease.record = "not a record"  # type: ignore[assignment]
    async with Program(lease, SystemClock()).election as election:
        running = asyncio.get_running_loop().create_task(election.run())
        await asyncio.wait([running], timeout=10.0)
        assert isinstance(running.exception(), AttributeError)
