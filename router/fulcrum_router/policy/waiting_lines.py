"""The order of waiting requests: by the priority of their tiers, then fair between tenants, then by deadline.

A *level* holds the tiers of one priority. The highest level with a waiting request goes first, with one
exception: once a lower level has sent a request, it may send the next one when the other levels have sent
`AGEING_FACTOR` times the prefill work of that request. (A level where nobody waited takes the work of the
first request that waits.) So its next request waits for at most that much work of the other levels, plus one
request of each. A waiting level gets at least 1 part in `AGEING_FACTOR` + 1 of the work, however much the
higher levels send. Its share is the same for long and for short prompts.

The share is one of prefill work. While decode has no room for the next request of a tenant, the tenant is
*held*: other tenants pass it, also those of lower levels. After it has been held for `MAX_HOLD_S`, its next
request leaves at its turn even if decode has no room; in a level, at most one request does so in that time.

In a level, the tenant with the least virtual token counter goes first (`token_counters`). Of one tenant, the
request with the earliest deadline leaves first. A request that no instance can serve in time any more is
*late*. The tenant's other requests pass it: it has missed its objective in any case, and behind it they would
miss theirs. Late requests leave in the order of arrival: when the tenant has no other waiting request, and as
every `LATE_EVERY`-th request of the tenant, so that none of them waits for ever.
"""

import heapq
import math
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Protocol

from fulcrum_router.policy.token_counters import TokenCounters

LATE_EVERY = 8
"""While late requests of a tenant wait, one of this many of its requests that leave is late."""
AGEING_FACTOR = 15.0
"""A lower level may send a request after the others have sent this many times the work of its last one."""

MAX_HOLD_S = 5.0
"""Time after which a held tenant's request may leave without room in decode, one of its level at a time."""


class LeaveResult(Enum):
    """Result of a request's attempt to leave the room."""

    LEFT = "left"
    """An instance took the request."""
    BLOCKED = "blocked"
    """No instance can take the request now."""
    LATE = "late"
    """Some instance could take the request, but none would respond in time."""
    HELD = "held"
    """Decode has no room for the request: other tenants may pass."""
    RESERVED = "reserved"
    """The instances that could take the request are kept for other tiers: others may pass."""


class Waiter(Protocol):
    """A request that can wait."""

    @property
    def arrival_s(self) -> float:
        """When the request arrived at the router."""

    @property
    def deadline_s(self) -> float:
        """When the first byte of its response is due."""

    @property
    def priority(self) -> int:
        """Priority of the request's tier; higher is more important."""

    @property
    def tenant(self) -> str:
        """Tenant that sent the request; empty: not known."""

    def try_to_leave(self, now_s: float, *, late: bool, held_for_long: bool) -> LeaveResult:
        """Call `leave` if an instance can take the request now.

        Args:
            now_s: The time.
            late: Leave even if no instance would respond in time.
            held_for_long: Leave even if decode has no room for the request.
        """

    def give_way(self) -> None:
        """Call `leave` and fail: the room is full, and a request that goes first takes its place."""

    def give_up(self, now_s: float) -> None:
        """Call `leave` and fail: the request has waited for too long."""

    @property
    def excludes_instances(self) -> bool:
        """Whether some instances are ruled out for this request: then others may pass it."""


class WaitingRequest:
    """A request in the waiting room, with the line in which it waits."""

    __slots__ = ("gone", "in_time", "level", "line", "number", "prefill_s", "waiter", "work_s")

    def __init__(
        self,
        waiter: Waiter,
        level: "Level",
        line: "Line",
        number: int,
        prefill_s: float,
        work_s: float,
    ) -> None:
        self.waiter, self.level, self.line, self.number = waiter, level, line, number
        self.prefill_s, self.work_s = prefill_s, work_s
        """Work of prefill instances, and time to compute the prompt wherever that is, in seconds."""
        self.in_time, self.gone = True, False


_Heap = list[tuple[float, int, WaitingRequest]]


class Line:
    """The requests of one tenant in one level."""

    __slots__ = ("_in_time", "_late", "_late_turn", "count", "held_since_s", "in_time_prefill_s", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.count = 0
        self.in_time_prefill_s = 0.0
        """Work of prefill instances that its requests in time bring, in seconds."""
        self._in_time: _Heap = []
        """Requests in time by deadline. Requests that have left are dropped when they come to the top."""
        self._late: _Heap = []
        """Late requests by arrival. Requests that have left are dropped when they come to the top."""
        self._late_turn = 0
        """Requests that have left since the last late one."""
        self.held_since_s: float | None = None
        """When decode first had no room for its next request; None: it had, or was not asked."""

    def push(self, request: WaitingRequest) -> None:
        """Add a request, or add it again after it was late or was passed."""
        waiter = request.waiter
        heap, key = (self._in_time, waiter.deadline_s) if request.in_time else (self._late, waiter.arrival_s)
        heapq.heappush(heap, (key, request.number, request))

    def choose_heap(self) -> _Heap:
        """The heap whose first request is the next to leave; an empty one if there is none."""
        in_time, late = _drop_gone(self._in_time, in_time=True), _drop_gone(self._late, in_time=False)
        if late and (not in_time or self._late_turn + 1 >= LATE_EVERY):
            return late
        return in_time

    def find_last(self) -> Waiter:
        """The late request that arrived last; if none is late, the request with the latest deadline."""
        heap = self._late if any(not entry[2].gone for entry in self._late) else self._in_time
        return max((entry for entry in heap if not entry[2].gone), key=lambda entry: entry[:2])[2].waiter

    def hold(self, now_s: float) -> None:
        """Remember since when decode has no room for the next request."""
        if self.held_since_s is None:
            self.held_since_s = now_s

    def record_departure(self, request: WaitingRequest) -> None:
        """Count a request that has left for an instance."""
        self._late_turn = self._late_turn + 1 if request.in_time else 0
        self.held_since_s = None


def _drop_gone(heap: _Heap, *, in_time: bool) -> _Heap:
    while heap and (heap[0][2].gone or heap[0][2].in_time is not in_time):
        heapq.heappop(heap)
    return heap


class Level:
    """The lines of all tiers with one priority."""

    __slots__ = (
        "_heap",
        "_next_number",
        "counters",
        "due_at_s",
        "held",
        "in_time_prefill_s",
        "lines",
        "passed_hold_s",
        "prefill_s",
        "priority",
        "ttft_s",
    )

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.counters = TokenCounters()
        self.lines: dict[str, Line] = {}
        """Lines of the tenants that have waiting requests."""
        self.due_at_s = 0.0
        """Prefill work that has left the room, at which this level may go before higher ones."""
        self.in_time_prefill_s = self.prefill_s = 0.0
        """Prefill work of the requests that wait: of those in time, and of all."""
        self.held: dict[Line, None] = {}
        """Lines whose next request waits for decode, not for prefill, and can still be in time."""
        self.passed_hold_s = -math.inf
        """When a request last left because it had been held for long."""
        self.ttft_s = 0.0
        """TTFT objective of the request that joined last."""
        self._heap: list[tuple[float, int, str]] = []
        """Tenants by counter. May hold outdated counters; they are dropped when they come to the top."""
        self._next_number = 0

    def open_line(self, tenant: str, *, departed_s: float, work_s: float) -> Line:
        """The line of a tenant. If it is new, the tenant's counter is lifted: see `TokenCounters.lift`."""
        line = self.lines.get(tenant)
        if line is None:
            if not self.lines:
                self.due_at_s = max(self.due_at_s, departed_s + AGEING_FACTOR * work_s)
            self._lift(tenant)
            line = self.lines[tenant] = Line(tenant)
            self.enqueue(tenant)
            self.counters.forget_idle(self.lines)
        return line

    def _lift(self, tenant: str) -> None:
        first = self.find_first()
        self.counters.lift(tenant, None if first is None else self.counters[first.tenant])

    def close_line(self, line: Line) -> None:
        """Drop the line of a tenant none of whose requests waits."""
        del self.lines[line.tenant]
        self.held.pop(line, None)
        if not self.lines:
            self.in_time_prefill_s, self.prefill_s = 0.0, 0.0

    def add_in_time(self, line: Line, prefill_s: float) -> None:
        """Add work of a request in time; less than 0: it left, or is late now."""
        self.in_time_prefill_s = max(0.0, self.in_time_prefill_s + prefill_s)
        line.in_time_prefill_s = max(0.0, line.in_time_prefill_s + prefill_s)

    def hold_further(self, lines: Iterable[Line]) -> None:
        """Count as held the lines that are not asked in this round, except those closed meanwhile."""
        self.held.update((line, None) for line in lines if self.lines.get(line.tenant) is line)

    @property
    def useful_prefill_s(self) -> float:
        """Prefill work in time of the lines that are not held, in seconds."""
        return max(0.0, self.in_time_prefill_s - sum(line.in_time_prefill_s for line in self.held))

    def find_longest(self) -> Line | None:
        """The line with the most requests, of several the last tenant by name; None if no request waits."""
        return max(self.lines.values(), key=lambda line: (line.count, line.tenant), default=None)

    def find_first(self) -> Line | None:
        """The line of the tenant with the least counter; None if all are empty or set aside."""
        heap, lines, counters = self._heap, self.lines, self.counters
        while heap:
            counter, _, tenant = heap[0]
            line = lines.get(tenant)
            if line is not None and counters[tenant] == counter:
                return line
            heapq.heappop(heap)
        return None

    def is_held_for_long(self, line: Line, now_s: float) -> bool:
        """Whether the next request of a line leaves even if decode has no room for it."""
        since_s = line.held_since_s
        return since_s is not None and now_s >= max(since_s, self.passed_hold_s) + MAX_HOLD_S

    def set_aside(self, line: Line) -> None:
        """Leave out a line until it is enqueued again."""
        while self.find_first() is line:
            heapq.heappop(self._heap)

    def enqueue(self, tenant: str) -> None:
        """Order a tenant that waits by its present counter."""
        number, self._next_number = self._next_number, self._next_number + 1
        if len(self._heap) > 4 * len(self.lines) + 64:
            self._heap = [
                entry
                for entry in self._heap
                if entry[2] in self.lines and self.counters[entry[2]] == entry[0]
            ]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.counters[tenant], number, tenant))

    def serve(self, tenant: str, tokens: float) -> None:
        """Charge a request that leaves, or goes to an instance without waiting."""
        if tenant not in self.lines:
            self._lift(tenant)
        self.counters.serve(tenant, tokens)
        self._reorder(tenant)

    def correct(self, tenant: str, tokens: float) -> None:
        """Charge tokens that were not predicted; less than 0: give back."""
        self.counters.charge(tenant, tokens)
        self._reorder(tenant)

    def _reorder(self, tenant: str) -> None:
        if tenant in self.lines:
            self.enqueue(tenant)
        else:
            self.counters.forget_idle(self.lines)

    def record_departure(self, departed_s: float, work_s: float) -> None:
        """A request of this level left, and `departed_s` of work with it."""
        self.due_at_s = departed_s + AGEING_FACTOR * (work_s if work_s < math.inf else 0.0)


def choose_level(levels: list[Level], departed_s: float, passed_over: Collection[Level] = ()) -> Level | None:
    """The level whose turn is next, of `levels` by descending priority; None if no request waits.

    Of the lower levels that are due, the one that has been due for longest.
    """
    highest = due = None
    for level in levels:
        if level in passed_over or level.find_first() is None:
            continue
        if highest is None:
            highest = level
        elif level.due_at_s <= departed_s and (due is None or level.due_at_s < due.due_at_s):
            due = level
    return due or highest
