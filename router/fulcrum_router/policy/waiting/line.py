"""The requests of one tenant in one tier that wait, and the order in which they leave.

The request with the earliest deadline goes first. A request that no instance can serve in time any more is
*late*. The tenant's other requests pass it: it has missed its objective already, and behind it they would
miss theirs. Late requests leave in the order of arrival: when the tenant has no other waiting request, and as
every `LATE_EVERY`-th request of the tenant, so that none of them waits for ever. Deflected requests do not
count: late ones are not deflected, and would keep others from it while they wait for a prefill instance.

`Level` opens a line for each tenant that waits; the order between lines is its own.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable

from fulcrum_router.policy.waiting.waiter import Waiter

LATE_EVERY = 32
"""While late requests of a tenant wait, one of this many of its requests that leave undeflected is late."""

LineKey = tuple[str, str]
"""Tenant and tier."""


class WaitingRequest:
    """A request in the waiting room, with its line."""

    __slots__ = ("exclusion", "gone", "in_time", "line", "number", "prefill_s", "waiter", "work_s")

    def __init__(
        self,
        waiter: Waiter,
        line: "Line",
        number: int,
        prefill_s: float,
        work_s: float,
        exclusion: Hashable,
    ) -> None:
        self.waiter, self.line, self.number = waiter, line, number
        self.exclusion = exclusion
        """The waiter's, or one that it shares with others: see `waiting_room.MAX_EXCLUSIONS`."""
        self.prefill_s, self.work_s = prefill_s, work_s
        """Work of prefill instances, and time to compute the prompt wherever that is, in seconds."""
        self.in_time, self.gone = True, False


_Position = tuple[float, int, WaitingRequest]


class _Row:
    """The requests of a line that have the same exclusion."""

    __slots__ = ("in_time", "late")

    def __init__(self) -> None:
        self.in_time: list[_Position] = []
        """Requests in time, sorted by deadline."""
        self.late: list[_Position] = []
        """Late requests, sorted by arrival."""

    def add(self, request: WaitingRequest) -> None:
        entries, entry = self._find_position(request)
        insort(entries, entry)

    def remove(self, request: WaitingRequest) -> None:
        entries, entry = self._find_position(request)
        del entries[bisect_left(entries, entry)]

    def _find_position(self, request: WaitingRequest) -> tuple[list[_Position], _Position]:
        waiter = request.waiter
        if request.in_time:
            return self.in_time, (waiter.deadline_s, request.number, request)
        return self.late, (waiter.arrival_s, request.number, request)


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

    def record_departure(self, request: WaitingRequest, *, deflected: bool) -> None:
        """Count a request that has left for an instance."""
        if not deflected:
            self._late_turn = self._late_turn + 1 if request.in_time else 0
        self.held_since_s = None
