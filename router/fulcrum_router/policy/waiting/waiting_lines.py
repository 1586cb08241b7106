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

In a level, the tier with the least virtual token counter goes first; the tokens of a tier are divided by its
weight. In the tier, the tenant with the least counter goes first (`token_counters`), and of one tenant the
request with the earliest deadline. A request that no instance can serve in time any more is *late*. The
tenant's other requests pass it: it has missed its objective already, and behind it they would miss theirs.
Late requests leave in the order of arrival: when the tenant has no other waiting request, and as every
`LATE_EVERY`-th request of the tenant, so that none of them waits for ever.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterable, Mapping
from enum import Enum
from typing import Protocol

from fulcrum_router.policy.tiers.token_counters import TokenCounters

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


LineKey = tuple[str, str]
"""Tenant and tier."""


class Line:
    """The requests of one tenant in one tier."""

    __slots__ = (
        "_late_turn",
        "_rows",
        "count",
        "held_since_s",
        "in_time_prefill_s",
        "is_aside",
        "key",
        "number",
        "tenant",
        "tier",
    )

    def __init__(self, tenant: str, tier: str) -> None:
        self.tenant = tenant
        self.tier = tier
        self.key = tenant, tier
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


_LinePlace = tuple[float, int, str]
"""Counter of the tenant, number of the line, tenant."""
_TenantHeap = list[_LinePlace]


class _TierLines:
    """What a level knows of one of its tiers."""

    __slots__ = ("counters", "in_time_prefill_s", "tenants")

    def __init__(self) -> None:
        self.counters = TokenCounters()
        """Counters of its tenants."""
        self.tenants: set[str] = set()
        """Tenants whose requests wait."""
        self.in_time_prefill_s = 0.0


class Level:
    """The lines of all tiers with one priority."""

    __slots__ = (
        "_heaps",
        "_lengths",
        "_next_number",
        "_tiers",
        "due_at_s",
        "held",
        "in_time_prefill_s",
        "lines",
        "passed_hold_s",
        "prefill_s",
        "priority",
        "tier_counters",
        "ttft_s",
        "weights",
    )

    def __init__(self, priority: int, weights: Mapping[str, int]) -> None:
        self.priority = priority
        self.weights = weights
        """By tier, where they are not 1."""
        self.tier_counters = TokenCounters()
        """Counters of the tiers, of tokens divided by their weights."""
        self._tiers: dict[str, _TierLines] = {}
        self.lines: dict[LineKey, Line] = {}
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
        self._lengths: list[tuple[int, LineKey]] = []
        """Requests and key of each line, sorted."""
        self._next_number = 0

    def open_line(self, tenant: str, tier: str, *, departed_s: float, work_s: float) -> Line:
        """The line of a tenant. A new line raises the tenant's counter to that of the waiting tenants."""
        line = self.lines.get((tenant, tier))
        if line is None:
            if not self.lines:
                self.due_at_s = max(self.due_at_s, departed_s + AGEING_FACTOR * work_s)
            self._raise_counters(tenant, tier)
            line = self.lines[tenant, tier] = Line(tenant, tier)
            self._find_tier(tier).tenants.add(tenant)
            self.enqueue(line)
            self._forget_idle(tier)
        return line

    def _find_tier(self, tier: str) -> _TierLines:
        found = self._tiers.get(tier)
        if found is None:
            found = self._tiers[tier] = _TierLines()
        return found

    def find_counters(self, tier: str) -> TokenCounters:
        """The counters of the tenants of a tier."""
        return self._find_tier(tier).counters

    def find_backlog_s(self, tier: str) -> float:
        """Prefill work of the requests of a tier that wait and are in time, in seconds."""
        return self._find_tier(tier).in_time_prefill_s

    def _raise_counters(self, tenant: str, tier: str) -> None:
        """Raise the counters of a tenant that begins to wait, and of its tier if nobody of it waits."""
        firsts = self._find_first_of_tiers((), ())
        own = firsts.pop(tier, None)
        self.find_counters(tier).raise_to_waiting(tenant, None if own is None else own[0])
        if own is None:
            least = min((self.tier_counters[other] for other in firsts), default=None)
            self.tier_counters.raise_to_waiting(tier, least)

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
        del self.lines[line.key]
        self._find_tier(line.tier).tenants.discard(line.tenant)
        self.held.pop(line, None)
        if not self.lines:
            self.in_time_prefill_s, self.prefill_s = 0.0, 0.0
            for tier in self._tiers.values():
                tier.in_time_prefill_s = 0.0

    def _resize(self, line: Line, count: int) -> None:
        lengths, key = self._lengths, line.key
        if line.count:
            del lengths[bisect_left(lengths, (line.count, key))]
        line.count = count
        if count:
            insort(lengths, (count, key))

    def add_in_time(self, line: Line, prefill_s: float) -> None:
        """Add work of a request in time; less than 0: it left, or is late now."""
        self.in_time_prefill_s = max(0.0, self.in_time_prefill_s + prefill_s)
        line.in_time_prefill_s = max(0.0, line.in_time_prefill_s + prefill_s)
        tier = self._find_tier(line.tier)
        tier.in_time_prefill_s = max(0.0, tier.in_time_prefill_s + prefill_s)

    def hold_further(self, lines: Iterable[Line], tier: str) -> None:
        """Count as held the lines of a tier that are not asked in this round, if they are still open."""
        self.held.update(
            (line, None) for line in lines if line.tier == tier and self.lines.get(line.key) is line
        )

    @property
    def useful_prefill_s(self) -> float:
        """Prefill work in time of the lines that are not held, in seconds."""
        return max(0.0, self.in_time_prefill_s - sum(line.in_time_prefill_s for line in self.held))

    def find_longest(self) -> Line | None:
        """The line with the most requests, of several the last by tenant; None if no request waits."""
        return self.lines[self._lengths[-1][1]] if self._lengths else None

    def find_first(
        self, passed_over: Collection[str] = (), blocked: Collection[Hashable] = ()
    ) -> Line | None:
        """The line whose turn is next; None if all are set aside, passed over or blocked.

        `passed_over` names tiers. A line is blocked if all its requests have an exclusion in `blocked`.
        """
        firsts = self._find_first_of_tiers(passed_over, blocked)
        if len(firsts) > 1:
            counters = self.tier_counters
            tier = min(firsts, key=lambda name: (counters[name], firsts[name][1]))
            return self.lines[firsts[tier][2], tier]
        return next((self.lines[place[2], tier] for tier, place in firsts.items()), None)

    def _find_first_of_tiers(
        self, passed_over: Collection[str], blocked: Collection[Hashable]
    ) -> dict[str, _LinePlace]:
        """The first line of each tier."""
        firsts: dict[str, _LinePlace] = {}
        for key in list(self._heaps):
            tier, exclusion = key
            if tier in passed_over or exclusion in blocked:
                continue
            found = self._tidy(self._heaps[key], tier, exclusion)
            if found is None:
                del self._heaps[key]
            elif tier not in firsts or found < firsts[tier]:
                firsts[tier] = found
        return firsts

    def _tidy(self, heap: _TenantHeap, tier: str, exclusion: Hashable) -> _LinePlace | None:
        """Drop outdated entries from the top of a heap; the first of the others."""
        while heap:
            if self._is_current(heap[0], tier, exclusion):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_current(self, entry: _LinePlace, tier: str, exclusion: Hashable) -> bool:
        counter, _, tenant = entry
        line = self.lines.get((tenant, tier))
        if line is None or line.is_aside or exclusion not in line.exclusions:
            return False
        return self.find_counters(tier)[tenant] == counter

    def is_held_for_long(self, line: Line, now_s: float) -> bool:
        """Whether the next request of a line leaves even if decode has no room for it."""
        since_s = line.held_since_s
        return since_s is not None and now_s >= max(since_s, self.passed_hold_s) + MAX_HOLD_S

    def enqueue(self, line: Line) -> None:
        """Order a line by the present counter of its tenant."""
        line.number, self._next_number = self._next_number, self._next_number + 1
        line.is_aside = False
        for exclusion in line.exclusions:
            self._push(line, exclusion)

    def _push(self, line: Line, exclusion: Hashable) -> None:
        heap = self._heaps.setdefault((line.tier, exclusion), [])
        if len(heap) > 4 * len(self.lines) + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry, line.tier, exclusion)]
            heapq.heapify(heap)
        counter = self.find_counters(line.tier)[line.tenant]
        heapq.heappush(heap, (counter, line.number, line.tenant))

    def serve(self, tenant: str, tier: str, tokens: float) -> None:
        """Charge a request that leaves, or goes to an instance without waiting."""
        if (tenant, tier) not in self.lines:
            self._raise_counters(tenant, tier)
        self.find_counters(tier).serve(tenant, tokens)
        self.tier_counters.serve(tier, tokens / self.weights.get(tier, 1))
        self._reorder(tenant, tier)

    def correct(self, tenant: str, tier: str, tokens: float) -> None:
        """Charge tokens that were not predicted; less than 0: give back."""
        self.find_counters(tier).charge(tenant, tokens)
        self.tier_counters.charge(tier, tokens / self.weights.get(tier, 1))
        self._reorder(tenant, tier)

    def _reorder(self, tenant: str, tier: str) -> None:
        line = self.lines.get((tenant, tier))
        if line is not None:
            self.enqueue(line)
        else:
            self._forget_idle(tier)

    def _forget_idle(self, tier: str) -> None:
        """Forget tenants that do not wait, if there are too many."""
        lines = self._find_tier(tier)
        lines.counters.forget_idle(lines.tenants)

    def record_departure(self, departed_s: float, work_s: float) -> None:
        """A request of this level left, and `departed_s` of work with it."""
        self.due_at_s = departed_s + AGEING_FACTOR * (work_s if work_s < math.inf else 0.0)
