"""The waiting room: requests that wait in the router until a prefill instance is about to run out of work.

An engine computes prompts in the order of arrival and gives none of them back. What waits in the router
instead can still go to any instance, in any order, after loads or instances have changed. So an instance
gets no more prefill work than keeps it busy: `prefill_ahead_s` seconds. By default that is infinite (mode
Direct): nothing waits.

The request with the earliest deadline leaves first. One that no instance can serve in time any more is
*late*: it lets the others pass, since its objective is lost whatever happens, and theirs would be lost as
well. Late requests leave in the order of arrival, when nobody else waits and as every `LATE_EVERY`-th
request, so that none of them waits for ever.

The room keeps the order and the limit. Which requests join, and which may leave, is decided by their journeys
(`Waiter.try_to_leave`).
"""

import heapq
import math
from enum import Enum
from typing import Protocol

MAX_REQUESTS = 10_000
"""Requests that wait at most; the next one is refused. Their bodies count in `http1.limits`."""
LATE_EVERY = 8
"""While late requests wait, one of this many that leave is late."""


class Departure(Enum):
    """Whether a request could leave the room."""

    LEFT = "left"
    BLOCKED = "blocked"
    """No instance can take it now."""
    LATE = "late"
    """Some instance could take it, and none could serve it in time."""


class Waiter(Protocol):
    """A request that can wait."""

    @property
    def arrival_s(self) -> float:
        """When the request arrived at the router."""

    @property
    def deadline_s(self) -> float:
        """When the first byte of its response is due."""

    def try_to_leave(self, now_s: float, *, late: bool) -> Departure:
        """Call `leave` if an instance can take the request now: in time, or `late` is set."""

    @property
    def excludes_instances(self) -> bool:
        """Whether some instances are ruled out for this request: then others may pass it."""


_Entry = tuple[float, int, Waiter]
_LEFT, _BLOCKED, _LATE = Departure.LEFT, Departure.BLOCKED, Departure.LATE


class WaitingRoom:
    """Requests that wait for prefill, in order."""

    __slots__ = (
        "_again",
        "_in_time",
        "_is_busy",
        "_late",
        "_late_turn",
        "_max_requests",
        "_next_number",
        "in_time_prefill_s",
        "members",
        "prefill_ahead_s",
        "prefill_s",
    )

    def __init__(self, *, prefill_ahead_s: float = math.inf, max_requests: int = MAX_REQUESTS) -> None:
        self.prefill_ahead_s = prefill_ahead_s
        """Prefill work in flight from which an instance gets no more; infinite in mode Direct."""
        self._max_requests = max_requests
        self._in_time: list[_Entry] = []
        """Heap by deadline. May hold requests that have left; they are dropped when they come to the top."""
        self._late: list[_Entry] = []
        """Heap by arrival, likewise."""
        self._late_turn = 0
        """Requests that have left since the last late one."""
        self.members: dict[Waiter, tuple[int, float, bool]] = {}
        """By request that waits: its number, its predicted prefill time, and whether it is in time."""
        self._next_number = 0
        self._is_busy = self._again = False
        self.prefill_s = self.in_time_prefill_s = 0.0
        """Predicted prefill time of the requests that wait in seconds, of all and of those in time."""

    def __len__(self) -> int:
        return len(self.members)

    def join(self, waiter: Waiter, *, prefill_s: float) -> bool:
        """Let a request wait; False: the room is full."""
        if len(self.members) >= self._max_requests:
            return False
        number, self._next_number = self._next_number, self._next_number + 1
        self.members[waiter] = (number, prefill_s, True)
        heapq.heappush(self._in_time, (waiter.deadline_s, number, waiter))
        self.prefill_s += prefill_s
        self.in_time_prefill_s += prefill_s
        return True

    def leave(self, waiter: Waiter) -> None:
        """Take a request out: it was dispatched, or its client disconnected."""
        member = self.members.pop(waiter, None)
        if member is None:
            return
        _, prefill_s, in_time = member
        # Adding and subtracting floats leaves a rounding error: reset the sums when nobody waits.
        self.prefill_s = self.prefill_s - prefill_s if self.members else 0.0
        self.in_time_prefill_s = max(0.0, self.in_time_prefill_s - prefill_s * in_time)
        if not self.members:
            self.in_time_prefill_s = 0.0

    def reconsider(self, now_s: float) -> None:
        """Let requests leave, in order, as long as instances can take them.

        Called after every change that can let a request leave: prefill work ended, an instance came, changed
        its role or is ready again, or time has passed. A call within a call is carried out after it.
        """
        if self._is_busy:
            self._again = True
            return
        self._is_busy = True
        try:
            while True:
                self._again = False
                self._let_leave(now_s)
                if not self._again:
                    return
        finally:
            self._is_busy = False

    def _let_leave(self, now_s: float) -> None:
        passed: list[tuple[list[_Entry], _Entry]] = []
        while True:
            heap = self._choose_heap()
            if not heap:
                break
            entry = heap[0]
            waiter, is_late = entry[2], heap is self._late
            departure = waiter.try_to_leave(now_s, late=is_late)
            if departure is _LEFT:
                self._late_turn = 0 if is_late else self._late_turn + 1
            elif departure is _LATE:
                self._move_to_late(heapq.heappop(heap))
            elif waiter.excludes_instances:
                passed.append((heap, heapq.heappop(heap)))
            else:
                break
        for heap, entry in passed:
            heapq.heappush(heap, entry)

    def _choose_heap(self) -> list[_Entry]:
        """The heap whose first request is the next to leave; an empty one if nobody waits."""
        in_time, late = self._drop_departed(self._in_time, in_time=True), self._drop_departed(self._late)
        if late and (not in_time or self._late_turn + 1 >= LATE_EVERY):
            return late
        return in_time

    def _drop_departed(self, heap: list[_Entry], *, in_time: bool = False) -> list[_Entry]:
        members = self.members
        while heap:
            member = members.get(heap[0][2])
            if member is not None and member[0] == heap[0][1] and member[2] is in_time:
                break
            heapq.heappop(heap)
        return heap

    def _move_to_late(self, entry: _Entry) -> None:
        _, number, waiter = entry
        prefill_s = self.members[waiter][1]
        self.members[waiter] = (number, prefill_s, False)
        self.in_time_prefill_s = max(0.0, self.in_time_prefill_s - prefill_s)
        heapq.heappush(self._late, (waiter.arrival_s, number, waiter))
