"""One priority level of the waiting room: which of its tenants is next, and when a lower level may go first.

A *level* holds the tiers of one priority; `leaving_round` chooses the level, and `line` has the order of the
requests of one tenant. The highest level with a waiting request goes first, with one exception: once a lower
level has sent a request, it may send the next one when the other levels have sent `AGEING_FACTOR` times the
prefill work of that request. (A level that was empty counts as if it had just sent the first request that
waits now.) So its next request waits for at most that much work of the other levels, plus one request of
each. A waiting level gets at least 1 part in `AGEING_FACTOR` + 1 of the work, however much the higher levels
send. Its share is the same for long and for short prompts.

The share is one of prefill work. While decode has no room for the next request of a tenant, the tenant is
*held*: other tenants pass it, also those of lower levels. After it has been held for `MAX_HOLD_S`, its next
request leaves at its turn even if decode has no room; in a level, at most one request does so in that time.

In a level, the tier with the least virtual token counter goes first; the tokens of a tier are divided by its
weight. In the tier, the tenant with the least counter goes first (`token_counters`). `WaitingRoom` has one
level for each priority; it adds and charges requests, and asks for the next one through `LeavingRound`.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping

from fulcrum_router.policy.tiers.token_counters import TokenCounters
from fulcrum_router.policy.waiting.line import Line, LineKey, RowKey, WaitingRequest

AGEING_FACTOR = 15.0
"""A lower level may send a request after the others have sent this many times the work of its last one."""

MAX_HOLD_S = 5.0
"""Time after which a held tenant's request may leave without room in decode, one of its level at a time."""

_LinePosition = tuple[float, int, str]
"""Counter of the tenant, number of the line, tenant."""
_TenantHeap = list[_LinePosition]


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
        self._heaps: dict[tuple[str, RowKey], _TenantHeap] = {}
        """Tenants by counter, by the tier and the rows of their lines. May hold outdated entries, which are
        dropped when they come to the top.
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

    def find_backlog_before_s(self, tenant: str, tier: str, own_s: float) -> float:
        """Estimate the prefill work in time that goes before a request of a tenant; its own is `own_s`.

        Fair queueing serves each other tenant of the tier no more than this tenant gets until then: its
        waiting work and this request. Other tiers of the level get the same by their weights. So a tenant
        with thousands of requests counts no more than one with as much work as this tenant. Not an upper
        bound: a tenant that was served more than the others waits longer. Output tokens, which
        `token_counters` has, are left out.
        """
        line, own_tier = self.lines.get((tenant, tier)), self._tiers.get(tier)
        before_s = 0.0 if line is None else line.in_time_prefill_s
        if own_tier is not None:
            others = len(own_tier.tenants) - (line is not None)
            before_s += min(own_tier.in_time_prefill_s - before_s, others * (before_s + own_s))
        share_s = (before_s + own_s) / self.weights.get(tier, 1)
        for name, other in self._tiers.items():
            if name != tier:
                before_s += min(other.in_time_prefill_s, share_s * self.weights.get(name, 1))
        return max(0.0, before_s)

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
            self._push(line, request.row)
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

    def move_to_late(self, request: WaitingRequest) -> None:
        """Order a request among the late ones of its line."""
        line = request.line
        line.remove(request)
        request.in_time = False
        if line.add(request):
            self._push(line, request.row)
        self.add_in_time(line, -request.prefill_s)

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

    def find_first(self, passed_over: Collection[str] = (), blocked: Collection[RowKey] = ()) -> Line | None:
        """The line whose turn is next; None if all are set aside, passed over or blocked.

        `passed_over` names tiers. A line is blocked if all its requests are in a row of `blocked`.
        """
        firsts = self._find_first_of_tiers(passed_over, blocked)
        if len(firsts) > 1:
            counters = self.tier_counters
            tier = min(firsts, key=lambda name: (counters[name], firsts[name][1]))
            return self.lines[firsts[tier][2], tier]
        return next((self.lines[position[2], tier] for tier, position in firsts.items()), None)

    def _find_first_of_tiers(
        self, passed_over: Collection[str], blocked: Collection[RowKey]
    ) -> dict[str, _LinePosition]:
        """The first line of each tier."""
        firsts: dict[str, _LinePosition] = {}
        for key in list(self._heaps):
            tier, row = key
            if tier in passed_over or row in blocked:
                continue
            found = self._tidy(self._heaps[key], tier, row)
            if found is None:
                del self._heaps[key]
            elif tier not in firsts or found < firsts[tier]:
                firsts[tier] = found
        return firsts

    def _tidy(self, heap: _TenantHeap, tier: str, row: RowKey) -> _LinePosition | None:
        """Drop outdated entries from the top of a heap; the first of the others."""
        while heap:
            if self._is_current(heap[0], tier, row):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_current(self, entry: _LinePosition, tier: str, row: RowKey) -> bool:
        _, number, tenant = entry
        line = self.lines.get((tenant, tier))
        return line is not None and line.number == number and not line.is_aside and row in line.rows

    def is_held_for_long(self, line: Line, now_s: float) -> bool:
        """Whether the next request of a line leaves even if decode has no room for it."""
        since_s = line.held_since_s
        return since_s is not None and now_s >= max(since_s, self.passed_hold_s) + MAX_HOLD_S

    def enqueue(self, line: Line) -> None:
        """Order a line by the present counter of its tenant."""
        line.number, self._next_number = self._next_number, self._next_number + 1
        line.is_aside = False
        for row in line.rows:
            self._push(line, row)

    def _push(self, line: Line, row: RowKey) -> None:
        heap = self._heaps.setdefault((line.tier, row), [])
        if len(heap) > 4 * len(self.lines) + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry, line.tier, row)]
            heapq.heapify(heap)
        counter = self.find_counters(line.tier)[line.tenant]
        heapq.heappush(heap, (counter, line.number, line.tenant))

    def serve(self, tenant: str, tier: str, tokens: float) -> None:
        """Charge a request that leaves, or goes to an instance without waiting."""
        counters, weighted = self._find_tier(tier).counters, tokens / self.weights.get(tier, 1)
        if not self.lines:  # the usual case: nobody waits, so that there is no order
            self._heaps.clear()  # all entries are outdated
            counters.serve_alone(tenant, tokens)
            self.tier_counters.serve_alone(tier, weighted)
            return
        if (tenant, tier) not in self.lines:
            self._raise_counters(tenant, tier)
        counters.serve(tenant, tokens)
        self.tier_counters.serve(tier, weighted)
        self._reorder(tenant, tier)

    def correct(self, tenant: str, tier: str, tokens: float) -> None:
        """Charge tokens that were not predicted; less than 0: give back."""
        counters = self._find_tier(tier).counters
        counters.charge(tenant, tokens)
        self.tier_counters.charge(tier, tokens / self.weights.get(tier, 1))
        if self.lines:
            self._reorder(tenant, tier)
        else:  # the usual case: nobody waits, so that there is no order
            counters.forget_idle(())

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
        """Record that a request with prefill work of `work_s` left this level.

        `departed_s` is the work of all requests that have left so far, of whatever level.
        """
        self.due_at_s = departed_s + AGEING_FACTOR * (work_s if work_s < math.inf else 0.0)
