"""Hand-offs that a decode instance was given and has not answered: what it may yet fetch too late.

What is fetched too late is another prompt's KV, and the engine's prefix cache keeps it under the right
prompt's hash before its own response tells anybody. So whatever else that instance says meanwhile is in
doubt,
too. An engine that answers what it was sent later has fetched the hand-off, or prolongs its lease.
"""

import math
from typing import Generic, Protocol, TypeVar

SEND_ORDER_MARGIN_S = 1.0
"""Of two requests that are sent so far apart an engine has the first one no later than the second."""
_LEASE_AFTER_RENEWAL = 1 / 2
"""Of the lease: for so long it lasts from a response on, a heartbeat being 1/6 old and worth 2/3."""


class PendingTransfer(Protocol):
    """A hand-off. Times are seconds of one clock."""

    @property
    def sent_s(self) -> float:
        """When decode was given it."""

    @property
    def deadline_s(self) -> float:
        """Until when it is fetched in time."""

    @property
    def lease_s(self) -> float:
        """Of its giver."""


T = TypeVar("T", bound=PendingTransfer)


class PendingTransfers(Generic[T]):
    """Those of one decode instance."""

    __slots__ = ("_last_response_s", "_last_sent_s", "_next_overdue_s", "_pending")

    def __init__(self) -> None:
        self._pending: set[T] = set()
        self._next_overdue_s = math.inf
        """None is overdue before."""
        self._last_sent_s = self._last_response_s = -math.inf

    def add(self, transfer: T) -> None:
        """It is sent."""
        self._pending.add(transfer)
        self._next_overdue_s = min(self._next_overdue_s, transfer.deadline_s)

    def discard(self, transfer: T) -> None:
        """It is answered, or not waited for any more."""
        self._pending.discard(transfer)

    def clear(self) -> None:
        """What these may leave behind will not be used."""
        self._pending.clear()

    def record_response(self, *, sent_s: float, now_s: float) -> None:
        """A request that was sent then has its first token now."""
        if sent_s > self._last_sent_s:
            self._last_sent_s, self._last_response_s = sent_s, now_s

    def find_overdue(self, now_s: float) -> list[T]:
        """Those that may have been fetched too late by now."""
        if now_s <= self._next_overdue_s:
            return []
        fetch_deadlines_s = {transfer: self._fetch_deadline_s(transfer) for transfer in self._pending}
        self._next_overdue_s = min(fetch_deadlines_s.values(), default=math.inf)
        return [transfer for transfer, due_s in fetch_deadlines_s.items() if now_s > due_s]

    def _fetch_deadline_s(self, transfer: T) -> float:
        if transfer.sent_s + SEND_ORDER_MARGIN_S > self._last_sent_s:
            return transfer.deadline_s
        return max(transfer.deadline_s, self._last_response_s + _LEASE_AFTER_RENEWAL * transfer.lease_s)
