"""How late the simulated engines' steps were: the histograms of all engines, read and merged.

An engine that was killed takes its counts along, so the last ones read of each life are kept.
"""

from collections import Counter
from collections.abc import Mapping

_BUCKET = "fulcrum_engine_lateness_seconds_bucket"
_EDGE = 'le="'

Buckets = Mapping[float, float]
"""Cumulative counts by upper edge in seconds."""


def read_buckets(exposition: str) -> dict[float, float]:
    """The lateness histogram of one engine's `/metrics`."""
    buckets: dict[float, float] = {}
    for line in exposition.splitlines():
        if line.startswith(_BUCKET):
            labels, _, count = line.rpartition(" ")
            edge = labels.split(_EDGE, 1)[1].split('"', 1)[0]
            buckets[float(edge)] = float(count)
    return buckets


def percentile_s(buckets: Buckets, percent: float) -> float | None:
    """The upper edge of the bucket in which the percentile lies; None without a count."""
    total = buckets.get(float("inf"), 0.0)
    if not total:
        return None
    edges = sorted(buckets)
    inside = next(edge for edge in edges if buckets[edge] >= total * percent / 100)
    return inside if inside < float("inf") else edges[-2] if len(edges) > 1 else inside


class LatenessLedger:
    """The histograms of all engines and of all their lives."""

    def __init__(self) -> None:
        self._past: Counter[float] = Counter()
        self._last: dict[str, Buckets] = {}

    def read(self, engine: str, buckets: Buckets) -> None:
        """Takes in what an engine says now; fewer counts than before mean that it was started again."""
        last = self._last.get(engine, {})
        if sum(buckets.values()) < sum(last.values()):
            self._past.update(last)
        self._last[engine] = buckets

    def p99_ms(self) -> float | None:
        """Over all engines; None if none has made a step."""
        merged = Counter(self._past)
        for buckets in self._last.values():
            merged.update(buckets)
        late_s = percentile_s(merged, 99)
        return None if late_s is None else late_s * 1000
