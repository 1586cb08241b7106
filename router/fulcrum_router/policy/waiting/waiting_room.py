"""The waiting room: requests that wait in the router until a prefill instance is about to run out of work.

An engine computes prompts in the order of arrival and gives none of them back. What waits in the router
instead can still go to any instance, in any order, after loads or instances have changed. So an instance
gets no more prefill work than keeps it busy: `prefill_ahead_s` seconds. In mode Direct that is infinite:
nothing waits.

The room keeps the limit, and lets requests leave in the order of `level`. Which requests join, and which may
leave, is decided by their journeys (`Waiter.try_to_leave`). The room also charges tenants for what they use
(`token_counters`), has requests that have waited for too long give up, and, when it is full, has a request of
the lowest level give way to a more important one. `JourneyContext` has one.
"""

import heapq
import math
from collections.abc import Hashable, Mapping

from fulcrum_router.policy.tiers.token_account import TokenAccount, Tokens
from fulcrum_router.policy.tiers.token_counters import INPUT_WEIGHT, OUTPUT_WEIGHT, TokenCounters
from fulcrum_router.policy.waiting.leaving_round import LeavingRound
from fulcrum_router.policy.waiting.level import Level
from fulcrum_router.policy.waiting.line import WaitingRequest
from fulcrum_router.policy.waiting.waiter import LeaveResult, Waiter

MAX_REQUESTS = 10_000
"""Requests that wait at most; then the newcomer, or one of the lowest level, gives way. Their bodies count in
`http1.limits`."""

MAX_EXCLUSIONS = 16
"""Different exclusions of the requests that wait; more share one, and are blocked together with its first."""
MAX_GIVE_UPS = 200
"""Requests that give up in one tick at most, so that a tick stays short; ten ticks a second."""
COUNT_VALID_S = 0.1
"""Time for which a count of `WaitingRoom.predict_kv_in_use` is used, in seconds."""
_GONE_MAX = 64
"""Requests that have left and are still in the heap of `_give_ups`, besides as many as those that wait."""

_SHARED_EXCLUSION = "shared"

_LEFT, _DEFLECTED = LeaveResult.LEFT, LeaveResult.DEFLECTED
_LATE, _LATE_BLOCKED = LeaveResult.LATE, LeaveResult.LATE_BLOCKED
_HELD, _RESERVED = LeaveResult.HELD, LeaveResult.RESERVED


class WaitingRoom:
    """Requests that wait for prefill, in order."""

    __slots__ = (
        "_again",
        "_count_valid_until_s",
        "_departed_s",
        "_exclusions",
        "_give_ups",
        "_is_busy",
        "_kv_in_use_after_s",
        "_levels",
        "_levels_in_order",
        "_max_requests",
        "_next_number",
        "_sent_tokens",
        "members",
        "open_charges",
        "prefill_ahead_s",
        "prefill_s",
        "weights",
    )

    def __init__(self, *, prefill_ahead_s: float = math.inf, max_requests: int = MAX_REQUESTS) -> None:
        self.prefill_ahead_s = prefill_ahead_s
        """Prefill work in flight from which an instance gets no more; infinite in mode Direct."""
        self._max_requests = max_requests
        self._levels: dict[int, Level] = {}
        self._levels_in_order: list[Level] = []
        """All levels, by descending priority."""
        self._departed_s = 0.0
        """Prefill work of all requests that have left for an instance, in seconds."""
        self._give_ups: list[tuple[float, int, WaitingRequest]] = []
        """When requests give up, by time. May hold requests that have left."""
        self._exclusions: dict[Hashable, int] = {}
        """How many of the requests that wait have each exclusion."""
        self.members: dict[Waiter, WaitingRequest] = {}
        self.weights: dict[str, int] = {}
        """Weights of the tiers in their levels, where they are not 1."""
        self.open_charges: dict[Charge, None] = {}
        """Charges of the requests in flight."""
        self._kv_in_use_after_s: dict[float, float] = {}
        """KV tokens that were counted for `predict_kv_in_use`, by the time after which they are in use."""
        self._count_valid_until_s = -math.inf
        """When they are counted again."""
        self._sent_tokens = 0.0
        """Expected tokens of the requests that were sent since."""
        self._next_number = 0
        self._is_busy = self._again = False
        self.prefill_s = 0.0
        """Predicted prefill time of the requests that wait in seconds."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def in_time_prefill_s(self) -> float:
        """Predicted prefill time of the requests that are not late, in seconds."""
        return sum(level.in_time_prefill_s for level in self._levels_in_order)

    def find_useful_prefill_s(self, instances: int) -> float:
        """Prefill time of the requests that `instances` could still compute in time, in seconds.

        The work of a level counts as far as it ends within its objective, behind that of higher ones, and as
        far as it does not wait for decode.
        """
        useful_s = 0.0
        for level in self._levels_in_order:
            useful_s = max(useful_s, min(useful_s + level.useful_prefill_s, instances * level.ttft_s))
        return useful_s

    @property
    def waits_for_decode(self) -> bool:
        """Whether requests that could still be in time wait for room in decode."""
        return any(level.held for level in self._levels_in_order)

    def is_held(self, priority: int) -> bool:
        """Whether a request of this priority waits for room in decode: newcomers do not pass it at once."""
        return bool(self._find_level(priority).held)

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Set the weights of the tiers in their levels."""
        self.weights.clear()
        self.weights.update((tier, weight) for tier, weight in weights.items() if weight != 1)

    def find_backlog_s(self, priority: int, *, with_late: bool = False) -> float:
        """Prefill time of the requests that go before one of this priority that joins, in seconds.

        Late requests of its level count if it is to be served late, too (`with_late`).
        """
        higher_s = sum(
            level.in_time_prefill_s for level in self._levels_in_order if level.priority > priority
        )
        own = self._levels.get(priority)
        if own is None:
            return higher_s
        return higher_s + (own.prefill_s if with_late else own.in_time_prefill_s)

    def find_backlog_before_s(self, priority: int, tenant: str, tier: str, own_s: float) -> float:
        """Prefill time of the requests that go before one of this tenant with work of `own_s`, in seconds."""
        higher_s = sum(
            level.in_time_prefill_s for level in self._levels_in_order if level.priority > priority
        )
        own = self._levels.get(priority)
        return higher_s if own is None else higher_s + own.find_backlog_before_s(tenant, tier, own_s)

    def find_tier_backlog_s(self, priority: int, tier: str) -> float:
        """Prefill time of the requests in time of one tier of this priority, in seconds."""
        return self._find_level(priority).find_backlog_s(tier)

    def find_counters(self, priority: int, tier: str) -> TokenCounters:
        """The virtual token counters of the tenants in a tier of this priority."""
        return self._find_level(priority).find_counters(tier)

    def find_tier_counters(self, priority: int) -> TokenCounters:
        """The virtual token counters of the tiers of this priority."""
        return self._find_level(priority).tier_counters

    def join(
        self,
        waiter: Waiter,
        *,
        prefill_s: float,
        work_s: float | None = None,
        give_up_at_s: float = math.inf,
    ) -> bool:
        """Let a request wait; False: the room is full of requests that come before it.

        Args:
            waiter: The request.
            prefill_s: Work of prefill instances that it brings, in seconds.
            work_s: Time to compute its prompt wherever that is, in seconds (default: `prefill_s`).
            give_up_at_s: When it gives up waiting, if it still does.
        """
        work_s = prefill_s if work_s is None else work_s
        if len(self.members) >= self._max_requests and not self._make_room(waiter):
            return False
        number, self._next_number = self._next_number, self._next_number + 1
        level = self._find_level(waiter.priority)
        level.ttft_s = waiter.deadline_s - waiter.arrival_s
        line = level.open_line(waiter.tenant, waiter.tier, departed_s=self._departed_s, work_s=work_s)
        exclusion = self._count_exclusion(waiter.exclusion)
        request = WaitingRequest(waiter, line, number, prefill_s, work_s, exclusion)
        self.members[waiter] = request
        level.add(request)
        self.prefill_s += prefill_s
        level.add_in_time(line, prefill_s)
        level.prefill_s += prefill_s
        if give_up_at_s < math.inf:
            heapq.heappush(self._give_ups, (give_up_at_s, number, request))
        return True

    def _count_exclusion(self, exclusion: Hashable) -> Hashable:
        """Count the exclusion of a request that joins; the exclusion by which the request is ordered."""
        counts = self._exclusions
        if exclusion is not None:
            if exclusion not in counts and len(counts) >= MAX_EXCLUSIONS:
                exclusion = _SHARED_EXCLUSION
            counts[exclusion] = counts.get(exclusion, 0) + 1
        return exclusion

    def leave(self, waiter: Waiter) -> None:
        """Take a request out: it was dispatched, or its client disconnected."""
        request = self.members.pop(waiter, None)
        if request is None:
            return
        request.gone = True
        level, line = self._find_level(waiter.priority), request.line
        # Adding and subtracting floats leaves a rounding error: reset the sums when nobody waits.
        self.prefill_s = self.prefill_s - request.prefill_s if self.members else 0.0
        if request.in_time:
            level.add_in_time(line, -request.prefill_s)
        level.prefill_s -= request.prefill_s
        level.remove(request)
        if request.exclusion is not None:
            self._exclusions[request.exclusion] -= 1
            if not self._exclusions[request.exclusion]:
                del self._exclusions[request.exclusion]
        if len(self._give_ups) > 2 * len(self.members) + _GONE_MAX:
            self._give_ups = [entry for entry in self._give_ups if not entry[2].gone]
            heapq.heapify(self._give_ups)

    def tick(self, now_s: float) -> None:
        """Charge the output that has appeared, and let requests leave. Called about ten times a second."""
        if self.members:
            for charge in self.open_charges:
                charge.update()
            self._let_give_up(now_s)
            self.reconsider(now_s)

    def _let_give_up(self, now_s: float) -> None:
        left = MAX_GIVE_UPS
        while left and self._give_ups and (self._give_ups[0][2].gone or self._give_ups[0][0] <= now_s):
            request = heapq.heappop(self._give_ups)[2]
            if not request.gone:
                left -= 1
                request.waiter.give_up(now_s)

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

    def charge(self, account: TokenAccount, *, priority: int, tenant: str, tier: str) -> "Charge":
        """Charge a tenant for a request that goes to an instance, with the output that is expected."""
        charge = Charge(self._find_level(priority), tenant, tier, account)
        self.open_charges[charge] = None
        self._sent_tokens += account.taken.total
        return charge

    def close_charge(self, charge: "Charge", used: Tokens) -> None:
        """The request of a charge has ended, and has used so many tokens."""
        self.open_charges.pop(charge, None)
        charge.settle(used)

    def predict_kv_in_use(self, after_s: float, *, step_s: float, now_s: float) -> float:
        """Predict the KV tokens that the requests in flight still hold after a time, at the time of a step.

        Counted ten times a second: what is sent meanwhile counts in full.
        """
        if now_s >= self._count_valid_until_s:
            self._count_valid_until_s, self._sent_tokens = now_s + COUNT_VALID_S, 0.0
            self._kv_in_use_after_s.clear()
        tokens = self._kv_in_use_after_s.get(after_s)
        if tokens is None:
            steps = after_s / step_s if step_s else math.inf
            tokens = math.fsum(charge.account.predict_kv_in_use(steps) for charge in self.open_charges)
            self._kv_in_use_after_s[after_s] = tokens = tokens - self._sent_tokens
        return tokens + self._sent_tokens

    def _let_leave(self, now_s: float) -> None:
        leaving = LeavingRound()
        try:
            while (request := leaving.choose(self._levels_in_order, self._departed_s)) is not None:
                if not self._ask(request, leaving, now_s):
                    return
        finally:
            leaving.end()

    def _ask(self, request: WaitingRequest, leaving: LeavingRound, now_s: float) -> bool:
        """Ask a request to leave; False: no other can leave either."""
        level, line = self._find_level(request.waiter.priority), request.line
        late = not request.in_time
        held_for_long = level.is_held_for_long(line, now_s)
        due = level.due_at_s <= self._departed_s
        result = request.waiter.try_to_leave(
            now_s,
            late=late,
            held_for_long=held_for_long,
            due=due,
            only_deflected=leaving.only_deflected,
        )
        if result is _LEFT or result is _DEFLECTED:
            self._record_departure(request, deflected=result is _DEFLECTED)
            if held_for_long:
                level.passed_hold_s = now_s
        elif result is _LATE:
            level.move_to_late(request)
            return now_s > request.waiter.deadline_s or leaving.count_late()
        elif result is _HELD or result is _RESERVED:
            if result is _HELD:
                line.hold(now_s)
                if not late:
                    level.held[line] = None
            leaving.set_aside(level, line)
        elif result is _LATE_BLOCKED or request.exclusion is not None:
            leaving.block(request.row)
        else:
            return False
        return True

    def _record_departure(self, request: WaitingRequest, *, deflected: bool) -> None:
        if request.work_s < math.inf:
            self._departed_s += request.work_s
        request.line.record_departure(request, deflected=deflected)
        self._find_level(request.waiter.priority).record_departure(self._departed_s, request.work_s)

    def _make_room(self, newcomer: Waiter) -> bool:
        """Have a request of the lowest level give way: one of the tenant that has most of them there.

        None does if all levels are higher than the newcomer's, or the newcomer's tenant has as many.
        """
        lowest = next((level for level in reversed(self._levels_in_order) if level.lines), None)
        longest = None if lowest is None else lowest.find_longest()
        if lowest is None or longest is None or lowest.priority > newcomer.priority:
            return False
        if lowest.priority == newcomer.priority:
            own = lowest.lines.get((newcomer.tenant, newcomer.tier))
            if longest.count <= 1 + (0 if own is None else own.count):
                return False
        longest.find_last().give_way()
        return True

    def _find_level(self, priority: int) -> Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority, self.weights)
            self._levels_in_order = sorted(self._levels.values(), key=lambda one: -one.priority)
        return level


class Charge:
    """What a tenant and its tier were charged for one request, corrected as tokens are counted."""

    __slots__ = ("_charged", "_level", "_tenant", "_tier", "account")

    def __init__(self, level: Level, tenant: str, tier: str, account: TokenAccount) -> None:
        self._level, self._tenant, self._tier, self.account = level, tenant, tier, account
        self._charged = account.weigh_due(INPUT_WEIGHT, OUTPUT_WEIGHT)
        level.serve(tenant, tier, self._charged)

    def update(self) -> None:
        """Charge output beyond the expectation, and the prompt as an engine counted it."""
        due = self.account.weigh_due(INPUT_WEIGHT, OUTPUT_WEIGHT)
        if due != self._charged:
            self._correct(due)

    def settle(self, used: Tokens) -> None:
        """Charge so many tokens in all: more than before, or less."""
        self._correct(INPUT_WEIGHT * used[0] + OUTPUT_WEIGHT * used[1])

    def _correct(self, charged: float) -> None:
        change, self._charged = charged - self._charged, charged
        self._level.correct(self._tenant, self._tier, change)
