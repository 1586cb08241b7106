"""Counts of observed values per bucket: the router's latencies, and the engine server's metrics.

The router's data path uses it for each request. So it has plain lists and no Prometheus type; its users
format the counts. A count is of one bucket only, not cumulative as in Prometheus.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observed value, and the trace of the request that had it."""

    value: float
    trace_id: int
    at_s: float
    """When it was observed, in unix seconds."""


class Histogram:
    """Counts per bucket. `bounds` are inclusive upper bounds; the last count is of all larger values."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The last one of each bucket that has one, by the index of the bucket."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def keep_exemplar(self, exemplar: Exemplar) -> None:
        """Keep an exemplar, the last one of its bucket. Its value was counted with `observe` already."""
        self.exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar
