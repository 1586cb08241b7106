"""KV transfers whose decode leg was sent to an instance that has not responded yet: it may fetch too late.

KV that is fetched too late can be another prompt's, and the engine's prefix cache stores it under the hash of
the prompt that was requested. Until the transfer is resolved, any response of the instance may use such KV.
An engine that responds to a later request has fetched the earlier KV, or renews its lease. Each decode
`Instance` has one. The decode legs add and remove transfers, and `decode_response` asks which are late; it
then withholds the response.
"""

import math
from typing import Generic, Protocol, TypeVar

from fulcrum_router.policy.kv_pairs.kv_lease import min_renewed_lease_s

SEND_ORDER_MARGIN_S = 1.0
"""Requests that are sent at least this far apart reach the engine in the order in which they were sent."""


class LeasedTransfer(Protocol):
    """What `IncomingTransfers` needs to know of a KV transfer. All times are of one clock."""

    @property
    def sent_s(self) -> float:
        """When the decode leg was sent."""

    @property
    def deadline_s(self) -> float:
        """Latest response time that shows that the KV was fetched within the lease."""

    @property
    def lease_s(self) -> float:
        """Lease granted by the prefill instance, in seconds."""


T = TypeVar("T", bound=LeasedTransfer)


class IncomingTransfers(Generic[T]):
    """The KV transfers to one decode instance that it has not responded to."""

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
        """List the transfers whose KV may have been, or may yet be, fetched after the end of the lease."""
        if now_s <= self._next_late_s:  # the usual case: one comparison per response
            return []
        fetch_deadlines_s = {transfer: self._fetch_deadline_s(transfer) for transfer in self._pending}
        self._next_late_s = min(fetch_deadlines_s.values(), default=math.inf)
        return [transfer for transfer, due_s in fetch_deadlines_s.items() if now_s > due_s]

    def _fetch_deadline_s(self, transfer: T) -> float:
        if transfer.sent_s + SEND_ORDER_MARGIN_S > self._last_sent_s:
            return transfer.deadline_s
        return max(transfer.deadline_s, self._last_response_s + min_renewed_lease_s(transfer.lease_s))
