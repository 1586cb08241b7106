"""How late the simulated engines' steps were: the histograms of all engines, read and merged.

An engine that was killed takes its counts along, so the last ones read of each life are kept.
"""

from collections import Counter
from collections.abc import Mapping

_BUCKET_SERIES = "fulcrum_engine_step_lateness_seconds_bucket"
_LE_LABEL = 'le="'

Buckets = Mapping[float, float]
"""Cumulative counts by upper edge in seconds."""


def parse_buckets(exposition: str) -> dict[float, float]:
    """The lateness histogram of one engine's `/metrics`."""
    buckets: dict[float, float] = {}
    for line in exposition.splitlines():
        if line.startswith(_BUCKET_SERIES):
            labels, _, count = line.rpartition(" ")
            edge = labels.split(_LE_LABEL, 1)[1].split('"', 1)[0]
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


class EngineLateness:
    """The histograms of all engines and of all their lives."""

    def __init__(self) -> None:
        self._ended_processes: Counter[float] = Counter()
        self._running_processes: dict[str, Buckets] = {}

    def record(self, engine: str, buckets: Buckets) -> None:
        """Takes in what an engine says now; fewer counts than before mean that it was started again."""
        last = self._running_processes.get(engine, {})
        if sum(buckets.values()) < sum(last.values()):
            self._ended_processes.update(last)
        self._running_processes[engine] = buckets

    def p99_ms(self) -> float | None:
        """Over all engines; None if none has made a step."""
        merged = Counter(self._ended_processes)
        for buckets in self._running_processes.values():
            merged.update(buckets)
        late_s = percentile_s(merged, 99)
        return None if late_s is None else late_s * 1000
