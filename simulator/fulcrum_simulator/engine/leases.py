"""The giver's side of a hand-off: blocks pinned until the taker has read them or the lease runs out.

Timing follows vLLM's NIXL connector: the lease starts when the prompt is done; the taker's heartbeats,
every sixth of it, extend it; what runs out is freed and may be overwritten while the taker still believes
in it.
"""

import math
from dataclasses import dataclass

HEARTBEATS_PER_LEASE = 6
EXTENSION_SHARE = 2 / 3


@dataclass(slots=True)
class _Lease:
    blocks: list[int]
    expires_s: float


class Leases:
    """Pinned blocks by request id."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._earliest_expiry_s = math.inf  # no lease runs out earlier; lets a step skip the search

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, request_id: str, blocks: list[int], now_s: float) -> float:
        """Pin these blocks; returns when the lease runs out."""
        lease = _Lease(blocks, now_s + self._lease_s)
        self._leases[request_id] = lease
        self._earliest_expiry_s = min(self._earliest_expiry_s, lease.expires_s)
        return lease.expires_s

    def extend(self, request_id: str, now_s: float) -> bool:
        """A heartbeat came: at least 2/3 of a lease from now. False if the lease is gone."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.expires_s = max(lease.expires_s, now_s + EXTENSION_SHARE * self._lease_s)
        return True

    def end(self, request_id: str) -> list[int] | None:
        """End a lease early; its blocks, or None if it is gone."""
        lease = self._leases.pop(request_id, None)
        return None if lease is None else lease.blocks

    def expire(self, now_s: float) -> list[list[int]]:
        """End the leases that ran out by now; the blocks of each."""
        if now_s < self._earliest_expiry_s:
            return []
        expired_ids = [request_id for request_id, lease in self._leases.items() if lease.expires_s <= now_s]
        expired = [self._leases.pop(request_id).blocks for request_id in expired_ids]
        self._earliest_expiry_s = min((lease.expires_s for lease in self._leases.values()), default=math.inf)
        return expired

    def next_lease_expiry_s(self) -> float | None:
        """When the next lease runs out; None without leases."""
        return min((lease.expires_s for lease in self._leases.values()), default=None)
