"""The waiting room: requests that wait in the router until a prefill instance is about to run out of work.

An engine computes prompts in the order of arrival and gives none of them back. What waits in the router
instead can still go to any instance, in any order, after loads or instances have changed. So an instance
gets no more prefill work than keeps it busy: `prefill_ahead_s` seconds. By default that is infinite (mode
Direct): nothing waits.

The room keeps an order and its limits. Which requests join, and which may leave, is decided by their journeys
(`Waiter.reconsider`).
"""

import heapq
import math
from collections.abc import Callable
from typing import Any, Protocol

MAX_REQUESTS = 10_000
"""Requests that wait at most; the next one is refused."""
MAX_BYTES = 512 * 1024 * 1024
"""Bytes of the bodies of requests that wait, at most."""


class Waiter(Protocol):
    """A request that can wait."""

    @property
    def arrival_s(self) -> float:
        """When the request arrived at the router."""

    def reconsider(self, now_s: float) -> bool:
        """Call `leave` and return True if an instance can take the request now; False: go on waiting."""

    @property
    def is_picky(self) -> bool:
        """Whether some instances are ruled out for this request: then others may pass it."""


Order = Callable[[Waiter], Any]
"""Sort key of a waiting request: the smallest leaves first."""


def order_by_arrival(waiter: Waiter) -> float:
    """One class, in the order of arrival."""
    return waiter.arrival_s


class WaitingRoom:
    """Requests that wait for prefill, in order."""

    __slots__ = (
        "_again",
        "_heap",
        "_is_busy",
        "_max_bytes",
        "_max_requests",
        "_next_number",
        "_order",
        "bytes",
        "members",
        "prefill_ahead_s",
        "prefill_s",
    )

    def __init__(
        self,
        *,
        prefill_ahead_s: float = math.inf,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
        order: Order = order_by_arrival,
    ) -> None:
        self.prefill_ahead_s = prefill_ahead_s
        """Prefill work in flight from which an instance gets no more; infinite in mode Direct."""
        self._max_requests, self._max_bytes, self._order = max_requests, max_bytes, order
        self._heap: list[tuple[Any, int, Waiter]] = []
        """May hold requests that have left; they are dropped when they come to the top."""
        self.members: dict[Waiter, tuple[int, int, float]] = {}
        """By request that waits: its number, its bytes and its predicted prefill time."""
        self._next_number = 0
        self._is_busy = self._again = False
        self.bytes = 0
        """Bytes of the requests that wait."""
        self.prefill_s = 0.0
        """Predicted prefill time of the requests that wait, in seconds."""

    def __len__(self) -> int:
        return len(self.members)

    def join(self, waiter: Waiter, *, size_bytes: int, prefill_s: float) -> bool:
        """Let a request wait; False: the room is full."""
        if len(self.members) >= self._max_requests or self.bytes + size_bytes > self._max_bytes:
            return False
        number, self._next_number = self._next_number, self._next_number + 1
        self.members[waiter] = (number, size_bytes, prefill_s)
        heapq.heappush(self._heap, (self._order(waiter), number, waiter))
        self.bytes += size_bytes
        self.prefill_s += prefill_s
        return True

    def leave(self, waiter: Waiter) -> None:
        """Take a request out: it was dispatched, or its client disconnected."""
        member = self.members.pop(waiter, None)
        if member is not None:
            self.bytes -= member[1]
            self.prefill_s = self.prefill_s - member[2] if self.members else 0.0

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
        passed: list[tuple[Any, int, Waiter]] = []
        heap, members = self._heap, self.members
        while heap:
            entry = heap[0]
            waiter = entry[2]
            member = members.get(waiter)
            if member is None or member[0] != entry[1]:
                heapq.heappop(heap)
                continue
            if not waiter.reconsider(now_s):
                if not waiter.is_picky:
                    break
                passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
