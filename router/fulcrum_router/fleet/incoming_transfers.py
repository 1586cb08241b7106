"""KV transfers that a decode instance was sent and has not responded to: those it may still fetch too late.

KV that is fetched too late is another prompt's, and the engine's prefix cache stores it under the hash of the
prompt that was requested. Until the transfer is resolved, every response of that instance may use such KV.
An engine that responds to a later request has fetched the earlier KV, or renews its lease.
"""

import math
from typing import Generic, Protocol, TypeVar

from fulcrum_router.policy.kv_lease import min_renewed_lease_s

SEND_ORDER_MARGIN_S = 1.0
"""An engine receives requests that are sent at least this far apart in the order of sending."""


class PendingTransfer(Protocol):
    """One KV transfer as the deadlines need it. Times are seconds of one clock."""

    @property
    def sent_s(self) -> float:
        """When the decode leg was sent."""

    @property
    def deadline_s(self) -> float:
        """Latest response time that shows that the KV was fetched within the lease."""

    @property
    def lease_s(self) -> float:
        """Lease granted by the prefill instance, in seconds."""


T = TypeVar("T", bound=PendingTransfer)


class PendingTransfers(Generic[T]):
    """The pending KV transfers of one decode instance."""

    __slots__ = ("_last_response_s", "_last_sent_s", "_next_late_s", "_pending")

    def __init__(self) -> None:
        self._pending: set[T] = set()
        self._next_late_s = math.inf
        """No transfer is late before this time."""
        self._last_sent_s = self._last_response_s = -math.inf

    def add(self, transfer: T) -> None:
        """Record a transfer whose decode leg is sent."""
        self._pending.add(transfer)
        self._next_late_s = min(self._next_late_s, transfer.deadline_s)

    def discard(self, transfer: T) -> None:
        """Forget a transfer that was responded to or given up."""
        self._pending.discard(transfer)

    def clear(self) -> None:
        """Forget all transfers: the cache salt was rotated, so the KV that they leave is not used."""
        self._pending.clear()

    def record_response(self, *, sent_s: float, now_s: float) -> None:
        """Record the first byte of the response to a request sent at `sent_s`."""
        if sent_s > self._last_sent_s:
            self._last_sent_s, self._last_response_s = sent_s, now_s

    def find_late(self, now_s: float) -> list[T]:
        """List the transfers whose KV may have been fetched after the lease, or may still be fetched then."""
        if now_s <= self._next_late_s:  # the usual case: one comparison per response
            return []
        fetch_deadlines_s = {transfer: self._fetch_deadline_s(transfer) for transfer in self._pending}
        self._next_late_s = min(fetch_deadlines_s.values(), default=math.inf)
        return [transfer for transfer, due_s in fetch_deadlines_s.items() if now_s > due_s]

    def _fetch_deadline_s(self, transfer: T) -> float:
        if transfer.sent_s + SEND_ORDER_MARGIN_S > self._last_sent_s:
            return transfer.deadline_s
        return max(transfer.deadline_s, self._last_response_s + min_renewed_lease_s(transfer.lease_s))
