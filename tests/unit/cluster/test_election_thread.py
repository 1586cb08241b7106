"""An election in a thread renews its Lease while the event loop of the program is busy."""

import asyncio
import random
import threading

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.election_thread import ElectionThread
from fulcrum_cluster.leader_election import LeaderElector, LeaseRecord, LeaseTiming, StepDown
from fulcrum_core.errors import NotFound
from tests.waiting import wait_until

TIMING = LeaseTiming(
    lease_duration_s=60.0, renew_interval_s=0.01, retry_interval_s=0.01, renew_deadline_s=30.0
)


class SharedLease:
    """A Lease in memory that another thread can wait for."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.writes, self.closed_in = 0, ""
        self.written = threading.Condition()

    async def read(self) -> tuple[LeaseRecord, str]:
        if self.record is None:
            raise NotFound("no lease")
        return self.record, "1"

    async def write(self, record: LeaseRecord, *, version: str | None) -> str:
        del version
        with self.written:
            self.record, self.writes = record, self.writes + 1
            self.written.notify_all()
        return "1"

    async def close(self) -> None:
        self.closed_in = threading.current_thread().name

    def wait_for_writes(self, more: int, *, timeout_s: float) -> bool:
        """Wait for so many writes, and block the thread of the caller meanwhile."""
        with self.written:
            until = self.writes + more
            return self.written.wait_for(lambda: self.writes >= until, timeout_s)


def elector(lease: SharedLease, on_change: object) -> LeaderElector:
    return LeaderElector(
        lease,
        identity="a",
        timing=TIMING,
        step_down=StepDown.AT_DEADLINE,
        clock=SystemClock(),
        rng=random.Random(0),
        on_change=on_change,  # type: ignore[arg-type]
    )


async def test_a_lease_is_renewed_while_the_event_loop_is_blocked() -> None:
    lease, changes = SharedLease(), list[bool]()
    election = ElectionThread(lambda notify: elector(lease, notify), lease.close, changes.append)
    async with election:
        running = asyncio.get_running_loop().create_task(election.run())
        await wait_until(lambda: changes == [True])
        assert lease.wait_for_writes(3, timeout_s=10.0)
        assert (election.leading, election.holder) == (True, "a")
        running.cancel()
        await asyncio.wait([running])
        await election.release()
        assert (changes, election.leading) == ([True, False], False)
    assert lease.record is not None
    assert (lease.record.holder, lease.closed_in) == (None, "election")


async def test_an_error_of_the_election_is_raised_where_it_was_started() -> None:
    lease = SharedLease()
    lease.record = "not a record"  # type: ignore[assignment]
    async with ElectionThread(lambda notify: elector(lease, notify), lease.close, print) as election:
        running = asyncio.get_running_loop().create_task(election.run())
        await asyncio.wait([running], timeout=10.0)
        assert isinstance(running.exception(), AttributeError)
