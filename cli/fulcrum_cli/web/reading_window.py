"""Rates and latencies of the last seconds, from the counts in successive readings of a router. Pure.

Rates are those of the last `FLOW_WINDOW_S` seconds; latencies and attainment those of the whole window.

`feed` adds each reading. The operator's SLO attainment has a window of its own.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from fulcrum_cli.web.router_reading import Buckets, RouterReading, TierCounts

WINDOW_S = 10.0
"""Seconds over which latencies and attainment are computed."""
FLOW_WINDOW_S = 4.0
"""Seconds over which rates are computed."""


@dataclass(frozen=True, slots=True)
class Latency:
    """p50 and p99 of a latency, in seconds; None without a request."""

    p50_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierAttainment:
    """One tier in the window. `attained` is 0 to 1, None if no request ended."""

    name: str
    attained: float | None
    offered_rps: float
    refused_rps: float = 0.0
    """Not admitted, or over a rate limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTraffic:
    """Rates of the last `FLOW_WINDOW_S` seconds; latencies and attainment of the last `WINDOW_S`."""

    offered_rps: float = 0.0
    output_tokens_rps: float = 0.0
    local_prefill_rps: float = 0.0
    transfer_rps: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """KV transfers a second by prefill and decode instance; only pairs with traffic."""
    ttft: Latency = Latency()
    tpot: Latency = Latency()
    attained: float | None = None
    tiers: tuple[TierAttainment, ...] = ()


class ReadingWindow:
    """The readings of the last `WINDOW_S` seconds, and the one before, from which counts are subtracted."""

    def __init__(self) -> None:
        self._readings: deque[RouterReading] = deque()

    @property
    def last(self) -> RouterReading | None:
        """The latest reading; None before the first."""
        return self._readings[-1] if self._readings else None

    def add(self, reading: RouterReading) -> None:
        """Add a reading. After a restart of the router its counts begin again, and so does the window."""
        if self.last and (reading.offered < self.last.offered or reading.at_s <= self.last.at_s):
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].at_s <= reading.at_s - WINDOW_S:
            self._readings.popleft()

    def traffic(self) -> RecentTraffic:
        """Return the traffic of the last seconds; nothing before the second reading."""
        if len(self._readings) < 2:
            return RecentTraffic()
        last, first = self._readings[-1], self._readings[0]
        before = next(
            r for r in reversed(self._readings) if r is first or r.at_s <= last.at_s - FLOW_WINDOW_S
        )
        for_s = last.at_s - before.at_s
        tiers = tuple(_tier_attainment(name, first, last) for name in sorted(last.tiers))
        scored = sum(last.tiers[name].scored - _tier_before(first, name).scored for name in last.tiers)
        met = sum(last.tiers[name].met - _tier_before(first, name).met for name in last.tiers)
        return RecentTraffic(
            offered_rps=max(0.0, last.offered - before.offered) / for_s,
            output_tokens_rps=max(0.0, last.output_tokens - before.output_tokens) / for_s,
            local_prefill_rps=max(0.0, last.local_prefills - before.local_prefills) / for_s,
            transfer_rps={pair: n / for_s for pair, n in (last.transfers - before.transfers).items()},
            ttft=_latency(last.ttft, first.ttft),
            tpot=_latency(last.tpot, first.tpot),
            attained=met / scored if scored > 0 else None,
            tiers=tiers,
        )


def percentile_s(buckets: Buckets, percent: float) -> float | None:
    """Return the percentile of cumulative counts, as Prometheus' `histogram_quantile` interpolates it.

    None without a count. Above the last finite edge it is that edge.
    """
    edges = sorted(buckets)
    total = buckets[edges[-1]] if edges else 0.0
    if total <= 0:
        return None
    rank = total * percent / 100
    lower, counted = 0.0, 0.0
    for edge in edges:
        count = buckets[edge]
        if count >= rank:
            if edge == float("inf"):
                return lower
            share = (rank - counted) / (count - counted) if count > counted else 1.0
            return lower + (edge - lower) * share
        lower, counted = edge, count
    return lower


def _latency(after: Buckets, before: Buckets) -> Latency:
    recent = {edge: after[edge] - before.get(edge, 0.0) for edge in after}
    return Latency(percentile_s(recent, 50), percentile_s(recent, 99))


def _tier_before(reading: RouterReading, name: str) -> TierCounts:
    return reading.tiers.get(name) or TierCounts()


def _tier_attainment(name: str, first: RouterReading, last: RouterReading) -> TierAttainment:
    before, after = _tier_before(first, name), last.tiers[name]
    scored = after.scored - before.scored
    return TierAttainment(
        name=name,
        attained=(after.met - before.met) / scored if scored > 0 else None,
        offered_rps=max(0.0, after.offered - before.offered) / (last.at_s - first.at_s),
        refused_rps=max(0.0, after.refused - before.refused) / (last.at_s - first.at_s),
    )
