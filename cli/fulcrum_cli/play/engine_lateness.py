"""Merges the histograms of how late the simulated engines' steps were, over all engines and restarts.

An engine's counts start at zero after a restart, so the last counts of its former processes are kept.

`observer` scrapes and records; the view and the report say that the machine is too slow.
"""

from collections import Counter
from collections.abc import Mapping

_BUCKET_SERIES = "fulcrum_engine_step_lateness_seconds_bucket"
_LE_LABEL = 'le="'

TOO_SLOW_MS = 10.0
"""p99 of the lateness, in ms, above which latencies are the machine's and not the simulated engine's."""

Buckets = Mapping[float, float]
"""Cumulative counts by the upper edge of the bucket, in seconds."""


def parse_buckets(exposition: str) -> dict[float, float]:
    """Return the lateness histogram in the text of one engine's `/metrics`."""
    buckets: dict[float, float] = {}
    for line in exposition.splitlines():
        if line.startswith(_BUCKET_SERIES):
            labels, _, count = line.rpartition(" ")
            edge = labels.split(_LE_LABEL, 1)[1].split('"', 1)[0]
            buckets[float(edge)] = float(count)
    return buckets


def percentile_edge_s(buckets: Buckets, percent: float) -> float | None:
    """Return the upper edge of the percentile's bucket, in seconds; None without a count."""
    total = buckets.get(float("inf"), 0.0)
    if not total:
        return None
    edges = sorted(buckets)
    found = next(edge for edge in edges if buckets[edge] >= total * percent / 100)
    return found if found < float("inf") else edges[-2] if len(edges) > 1 else found


class EngineLateness:
    """The lateness histograms of all engines, including processes that have ended."""

    def __init__(self) -> None:
        self._ended_processes: Counter[float] = Counter()
        self._running_processes: dict[str, Buckets] = {}

    def record(self, engine: str, buckets: Buckets) -> None:
        """Record an engine's histogram; fewer counts than before mean that the engine was restarted."""
        last = self._running_processes.get(engine, {})
        if sum(buckets.values()) < sum(last.values()):
            self._ended_processes.update(last)
        self._running_processes[engine] = buckets

    @property
    def too_slow(self) -> bool:
        """Whether the steps are so late that latencies are caused by this machine."""
        late_ms = self.p99_ms()
        return late_ms is not None and late_ms > TOO_SLOW_MS

    def p99_ms(self) -> float | None:
        """p99 over all engines, in ms; None before the first step."""
        merged = Counter(self._ended_processes)
        for buckets in self._running_processes.values():
            merged.update(buckets)
        late_s = percentile_edge_s(merged, 99)
        return None if late_s is None else late_s * 1000
