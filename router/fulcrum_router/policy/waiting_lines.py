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
from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
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

    @property
    def tier(self) -> str:
        """Name of the request's tier."""

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
    def exclusion(self) -> Hashable:
        """The instances that are ruled out for this request: others may pass it; None: no instance is.

        Requests with the same exclusion are blocked together. It does not change while the request waits.
        """


class WaitingRequest:
    """A request in the waiting room, with the line in which it waits."""

    __slots__ = ("exclusion", "gone", "in_time", "level", "line", "number", "prefill_s", "waiter", "work_s")

    def __init__(
        self,
        waiter: Waiter,
        level: "Level",
        line: "Line",
        number: int,
        prefill_s: float,
        work_s: float,
        exclusion: Hashable,
    ) -> None:
        self.waiter, self.level, self.line, self.number = waiter, level, line, number
        self.exclusion = exclusion
        """The waiter's, or one that it shares with others: see `waiting_room.MAX_EXCLUSIONS`."""
        self.prefill_s, self.work_s = prefill_s, work_s
        """Work of prefill instances, and time to compute the prompt wherever that is, in seconds."""
        self.in_time, self.gone = True, False


_Place = tuple[float, int, WaitingRequest]


class _Row:
    """The requests of a line that have the same exclusion."""

    __slots__ = ("in_time", "late")

    def __init__(self) -> None:
        self.in_time: list[_Place] = []
        """Requests in time, sorted by deadline."""
        self.late: list[_Place] = []
        """Late requests, sorted by arrival."""

    def add(self, request: WaitingRequest) -> None:
        places, place = self._find_place(request)
        insort(places, place)

    def remove(self, request: WaitingRequest) -> None:
        places, place = self._find_place(request)
        del places[bisect_left(places, place)]

    def _find_place(self, request: WaitingRequest) -> tuple[list[_Place], _Place]:
        waiter = request.waiter
        if request.in_time:
            return self.in_time, (waiter.deadline_s, request.number, request)
        return self.late, (waiter.arrival_s, request.number, request)


class Line:
    """The requests of one tenant in one level."""

    __slots__ = (
        "_late_turn",
        "_rows",
        "count",
        "held_since_s",
        "in_time_prefill_s",
        "is_aside",
        "number",
        "tenant",
        "tier",
    )

    def __init__(self, tenant: str, tier: str) -> None:
        self.tenant = tenant
        self.tier = tier
        """Tier of the request that opened the line; few tenants have several tiers of one priority."""
        self.count = 0
        self.in_time_prefill_s = 0.0
        """Work of prefill instances that its requests in time bring, in seconds."""
        self.is_aside = False
        """Whether the line is left out until it is enqueued again."""
        self.number = 0
        """Place of the line among those with an equal counter."""
        self._rows: dict[Hashable, _Row] = {}
        """Requests by exclusion; no row is empty."""
        self._late_turn = 0
        """Requests that have left since the last late one."""
        self.held_since_s: float | None = None
        """When decode first had no room for its next request; None: it had, or was not asked."""

    @property
    def exclusions(self) -> Collection[Hashable]:
        """The exclusions of its requests."""
        return self._rows.keys()

    def add(self, request: WaitingRequest) -> bool:
        """Add a request; whether it is the only one with its exclusion."""
        row = self._rows.get(request.exclusion)
        is_new = row is None
        if row is None:
            row = self._rows[request.exclusion] = _Row()
        row.add(request)
        return is_new

    def remove(self, request: WaitingRequest) -> None:
        """Remove a request that leaves."""
        row = self._rows[request.exclusion]
        row.remove(request)
        if not row.in_time and not row.late:
            del self._rows[request.exclusion]

    def move_to_late(self, request: WaitingRequest) -> None:
        """Order a request among the late ones."""
        row = self._rows[request.exclusion]
        row.remove(request)
        request.in_time = False
        row.add(request)

    def find_next(self, blocked: Collection[Hashable]) -> WaitingRequest | None:
        """The next request to leave; None: all have one of the exclusions in `blocked`."""
        rows = [row for exclusion, row in self._rows.items() if exclusion not in blocked]
        in_time = [row.in_time[0] for row in rows if row.in_time]
        late = [row.late[0] for row in rows if row.late]
        if late and (not in_time or self._late_turn + 1 >= LATE_EVERY):
            return min(late)[2]
        return min(in_time)[2] if in_time else None

    def find_last(self) -> Waiter:
        """The late request that arrived last; if none is late, the request with the latest deadline."""
        rows = self._rows.values()
        late = [row.late[-1] for row in rows if row.late]
        return max(late or [row.in_time[-1] for row in rows if row.in_time])[2].waiter

    def hold(self, now_s: float) -> None:
        """Remember since when decode has no room for the next request."""
        if self.held_since_s is None:
            self.held_since_s = now_s

    def record_departure(self, request: WaitingRequest) -> None:
        """Count a request that has left for an instance."""
        self._late_turn = self._late_turn + 1 if request.in_time else 0
        self.held_since_s = None


_TenantHeap = list[tuple[float, int, str]]


class Level:
    """The lines of all tiers with one priority."""

    __slots__ = (
        "_heaps",
        "_lengths",
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
        self._heaps: dict[tuple[str, Hashable], _TenantHeap] = {}
        """Tenants by counter, by the tier of their lines and the exclusions of the requests there. May hold
        outdated entries, which are dropped when they come to the top.
        """
        self._lengths: list[tuple[int, str]] = []
        """Requests and tenant of each line, sorted."""
        self._next_number = 0

    def open_line(self, tenant: str, tier: str, *, departed_s: float, work_s: float) -> Line:
        """The line of a tenant. A new line raises the tenant's counter to that of the waiting tenants."""
        line = self.lines.get(tenant)
        if line is None:
            if not self.lines:
                self.due_at_s = max(self.due_at_s, departed_s + AGEING_FACTOR * work_s)
            self._raise_counter(tenant)
            line = self.lines[tenant] = Line(tenant, tier)
            self.enqueue(tenant)
            self.counters.forget_idle(self.lines)
        return line

    def _raise_counter(self, tenant: str) -> None:
        first = self.find_first()
        self.counters.raise_to_waiting(tenant, None if first is None else self.counters[first.tenant])

    def add(self, request: WaitingRequest) -> None:
        """Add a request to its line."""
        line = request.line
        if line.add(request):
            self._push(line, request.exclusion)
        self._resize(line, line.count + 1)

    def remove(self, request: WaitingRequest) -> None:
        """Remove a request from its line; drop the line of a tenant none of whose requests waits."""
        line = request.line
        line.remove(request)
        self._resize(line, line.count - 1)
        if line.count:
            return
        del self.lines[line.tenant]
        self.held.pop(line, None)
        if not self.lines:
            self.in_time_prefill_s, self.prefill_s = 0.0, 0.0

    def _resize(self, line: Line, count: int) -> None:
        lengths, tenant = self._lengths, line.tenant
        if line.count:
            del lengths[bisect_left(lengths, (line.count, tenant))]
        line.count = count
        if count:
            insort(lengths, (count, tenant))

    def add_in_time(self, line: Line, prefill_s: float) -> None:
        """Add work of a request in time; less than 0: it left, or is late now."""
        self.in_time_prefill_s = max(0.0, self.in_time_prefill_s + prefill_s)
        line.in_time_prefill_s = max(0.0, line.in_time_prefill_s + prefill_s)

    def hold_further(self, lines: Iterable[Line], tier: str) -> None:
        """Count as held the lines of a tier that are not asked in this round, if they are still open."""
        self.held.update(
            (line, None) for line in lines if line.tier == tier and self.lines.get(line.tenant) is line
        )

    @property
    def useful_prefill_s(self) -> float:
        """Prefill work in time of the lines that are not held, in seconds."""
        return max(0.0, self.in_time_prefill_s - sum(line.in_time_prefill_s for line in self.held))

    def find_longest(self) -> Line | None:
        """The line with the most requests, of several the last tenant by name; None if no request waits."""
        return self.lines[self._lengths[-1][1]] if self._lengths else None

    def find_first(
        self, passed_over: Collection[str] = (), blocked: Collection[Hashable] = ()
    ) -> Line | None:
        """The line of the tenant with the least counter; None if all are set aside, passed over or blocked.

        `passed_over` names tiers. A line is blocked if all its requests have an exclusion in `blocked`.
        """
        first: tuple[float, int, str] | None = None
        for key in list(self._heaps):
            tier, exclusion = key
            if tier in passed_over or exclusion in blocked:
                continue
            found = self._tidy(self._heaps[key], tier, exclusion)
            if found is None:
                del self._heaps[key]
            elif first is None or found < first:
                first = found
        return None if first is None else self.lines[first[2]]

    def _tidy(self, heap: _TenantHeap, tier: str, exclusion: Hashable) -> tuple[float, int, str] | None:
        """Drop outdated entries from the top of a heap; the first of the others."""
        while heap:
            if self._is_current(heap[0], tier, exclusion):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_current(self, entry: tuple[float, int, str], tier: str, exclusion: Hashable) -> bool:
        counter, _, tenant = entry
        line = self.lines.get(tenant)
        if line is None or line.is_aside or line.tier != tier or exclusion not in line.exclusions:
            return False
        return self.counters[tenant] == counter

    def is_held_for_long(self, line: Line, now_s: float) -> bool:
        """Whether the next request of a line leaves even if decode has no room for it."""
        since_s = line.held_since_s
        return since_s is not None and now_s >= max(since_s, self.passed_hold_s) + MAX_HOLD_S

    def enqueue(self, tenant: str) -> None:
        """Order a tenant that waits by its present counter."""
        line = self.lines[tenant]
        line.number, self._next_number = self._next_number, self._next_number + 1
        line.is_aside = False
        for exclusion in line.exclusions:
            self._push(line, exclusion)

    def _push(self, line: Line, exclusion: Hashable) -> None:
        heap = self._heaps.setdefault((line.tier, exclusion), [])
        if len(heap) > 4 * len(self.lines) + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry, line.tier, exclusion)]
            heapq.heapify(heap)
        heapq.heappush(heap, (self.counters[line.tenant], line.number, line.tenant))

    def serve(self, tenant: str, tokens: float) -> None:
        """Charge a request that leaves, or goes to an instance without waiting."""
        if tenant not in self.lines:
            self._raise_counter(tenant)
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


def choose_level(
    levels: Sequence[Level],
    departed_s: float,
    passed_over: Mapping[Level, Collection[str]],
    blocked: Collection[Hashable],
) -> Level | None:
    """The level whose turn is next, of `levels` by descending priority; None if no request waits.

    Of the lower levels that are due, the one that has been due for longest. `passed_over` names tiers of a
    level that are not asked, `blocked` exclusions.
    """
    highest = due = None
    for level in levels:
        if level.find_first(passed_over.get(level, ()), blocked) is None:
            continue
        if highest is None:
            highest = level
        elif level.due_at_s <= departed_s and (due is None or level.due_at_s < due.due_at_s):
            due = level
    return due or highest
