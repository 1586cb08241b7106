"""Leases on exported KV blocks: the prefill instance's side of a KV transfer.

Timing follows vLLM's NIXL connector. A lease starts when the prompt is computed. The decode instance sends
heartbeats, one every sixth of the lease, which extend it. Blocks of an expired lease are freed and may be
overwritten before the decode instance has read them. `engine` grants a lease when a prefill leg ends, and
frees the blocks.
"""

import math
from dataclasses import dataclass

HEARTBEATS_PER_LEASE = 6
"""Heartbeats that a decode instance sends within one lease."""
EXTENSION_SHARE = 2 / 3
"""Share of the lease that remains at least after a heartbeat."""


@dataclass(slots=True)
class _Lease:
    blocks: list[int]
    expires_s: float


class Leases:
    """The pinned blocks of each exported request."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self.earliest_expiry_s = math.inf
        """Lower bound of the expiry times; lets a step skip the search."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, request_id: str, blocks: list[int], now_s: float) -> float:
        """Pin these blocks; returns the time at which the lease expires."""
        lease = _Lease(blocks, now_s + self._lease_s)
        self._leases[request_id] = lease
        self.earliest_expiry_s = min(self.earliest_expiry_s, lease.expires_s)
        return lease.expires_s

    def extend(self, request_id: str, now_s: float) -> bool:
        """Extend a lease to at least 2/3 of its length from now. False if there is no such lease."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.expires_s = max(lease.expires_s, now_s + EXTENSION_SHARE * self._lease_s)
        return True

    def end(self, request_id: str) -> list[int] | None:
        """End a lease early; returns its blocks, None if there is no such lease."""
        lease = self._leases.pop(request_id, None)
        return None if lease is None else lease.blocks

    def expire(self, now_s: float) -> list[list[int]]:
        """End the leases that have expired by now; returns the blocks of each."""
        if now_s < self.earliest_expiry_s:
            return []
        expired_ids = [request_id for request_id, lease in self._leases.items() if lease.expires_s <= now_s]
        expired = [self._leases.pop(request_id).blocks for request_id in expired_ids]
        self.earliest_expiry_s = min((lease.expires_s for lease in self._leases.values()), default=math.inf)
        return expired

    def next_lease_expiry_s(self) -> float | None:
        """Return the time at which the next lease expires; None without leases."""
        return min((lease.expires_s for lease in self._leases.values()), default=None)
