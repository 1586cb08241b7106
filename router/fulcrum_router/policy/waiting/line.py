"""The requests of one tenant in one tier that wait, and the order in which they leave.

The request with the earliest deadline goes first. A request that no instance can serve in time any more is
*late*. The tenant's other requests pass it: it has missed its objective already, and behind it they would
miss theirs. Late requests leave in the order of arrival: when the tenant has no other waiting request, and as
every `LATE_EVERY`-th request of the tenant that leaves when a prefill instance can take work, so that none of
them waits for ever. While none can, others are deflected past a late request: it is not deflected itself.

`Level` opens a line for each tenant that waits; the order between lines is its own.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable

from fulcrum_router.policy.waiting.waiter import Waiter

LATE_EVERY = 32
"""While late requests of a tenant wait, one of so many that leave at their turn is late."""

LineKey = tuple[str, str]
"""Tenant and tier."""
RowKey = tuple[bool, Hashable]
"""Whether the requests of a row are late, and their exclusion. They are blocked together."""


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

    @property
    def row(self) -> RowKey:
        """The row of its line that the request is in."""
        return not self.in_time, self.exclusion


_Position = tuple[float, int, WaitingRequest]


def _find_position(request: WaitingRequest) -> _Position:
    """The place of a request in its row: by deadline, or by arrival if it is late."""
    waiter = request.waiter
    return waiter.deadline_s if request.in_time else waiter.arrival_s, request.number, request


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
        self._rows: dict[RowKey, list[_Position]] = {}
        """Requests in order; no row is empty."""
        self._late_turn = 0
        """Requests that have left without deflection since the last late one."""
        self.held_since_s: float | None = None
        """When decode first had no room for its next request; None: it had, or was not asked."""

    @property
    def rows(self) -> Collection[RowKey]:
        """The rows that its requests are in."""
        return self._rows.keys()

    def add(self, request: WaitingRequest) -> bool:
        """Add a request; whether it is the only one of its row."""
        row = self._rows.setdefault(request.row, [])
        insort(row, _find_position(request))
        return len(row) == 1

    def remove(self, request: WaitingRequest) -> None:
        """Remove a request that leaves its row."""
        row = self._rows[request.row]
        del row[bisect_left(row, _find_position(request))]
        if not row:
            del self._rows[request.row]

    def find_next(self, blocked: Collection[RowKey]) -> WaitingRequest | None:
        """The next request to leave; None: all are in a row of `blocked`."""
        in_time = [row[0] for key, row in self._rows.items() if key not in blocked and not key[0]]
        late = [row[0] for key, row in self._rows.items() if key not in blocked and key[0]]
        if late and (not in_time or self._late_turn + 1 >= LATE_EVERY):
            return min(late)[2]
        return min(in_time)[2] if in_time else None

    def find_last(self) -> Waiter:
        """The late request that arrived last; if none is late, the request with the latest deadline."""
        late = [row[-1] for key, row in self._rows.items() if key[0]]
        return max(late or [row[-1] for row in self._rows.values()])[2].waiter

    def hold(self, now_s: float) -> None:
        """Remember since when decode has no room for the next request."""
        if self.held_since_s is None:
            self.held_since_s = now_s

    def record_departure(self, request: WaitingRequest, *, deflected: bool) -> None:
        """Count a request that has left for an instance."""
        if not deflected:
            self._late_turn = self._late_turn + 1 if request.in_time else 0
        self.held_since_s = None
