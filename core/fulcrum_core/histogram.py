"""Counts of observed values per bucket: the router's latencies, and the engine server's metrics.

On the router's data path, therefore plain lists and no Prometheus type; callers format the counts themselves.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket. `bounds` are inclusive upper bounds; the last count is of all larger values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
