"""What became of the requests: plain counters, cheap enough for the data path.

They become Prometheus families only when somebody scrapes (`metrics`).
"""

from bisect import bisect_left
from collections import defaultdict
from enum import StrEnum

from fulcrum_core.values import Role
from fulcrum_router.settings import Tier

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

EXPECTED_LOCAL_PREFILL_REASONS = frozenset({"multiple_prompts", "multiple_choices"})
"""Reasons for a local prefill that are the request's, not a fault's."""


PREFILL, DECODE = "prefill", "decode"
"""The phases, as labels."""


class RequestOutcome(StrEnum):
    """How a request ended. Invalid ones are the client's fault and no load that was offered."""

    OK = "ok"
    INVALID = "invalid"
    FAILED = "failed"
    BROKEN = "broken"
    CANCELLED = "cancelled"

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


_OK, _INVALID = RequestOutcome.OK, RequestOutcome.INVALID  # an attribute of an enum is slow to read


class Histogram:
    """Counts per bucket; the last bucket is what lies above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class TierCounters:
    """The requests of one tier."""

    __slots__ = ("offered", "requests_by_outcome", "slo_met", "tpot", "ttft")

    def __init__(self) -> None:
        self.offered = 0
        self.slo_met = 0
        self.requests_by_outcome = dict.fromkeys(RequestOutcome, 0)
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.tpot = Histogram(TPOT_BUCKETS_S)


class Counters:
    """Everything the router counts."""

    def __init__(self) -> None:
        self.tiers: dict[str, TierCounters] = {}
        self.legs: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Legs by phase and outcome (`ok`, or the failure)."""
        self.retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Attempts after a failure, by phase and reason of the failure."""
        self.local_prefills: defaultdict[str, int] = defaultdict(int)
        """Requests decoded without a hand-off, by reason."""
        self.dispatches: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Choices by phase and reason."""
        self.flip_requests: defaultdict[Role, int] = defaultdict(int)
        self.ejections: defaultdict[str, int] = defaultdict(int)
        """Ejections by reason."""
        self.refused_assignments = 0
        self.cache_salt_rotations = 0
        """Prefix caches not used any more, because a hand-off may have been fetched too late."""
        self.takeovers = 0
        """Times that this router became the active one."""
        self.output_tokens = 0

    def get_tier(self, name: str) -> TierCounters:
        """The counters of a tier, opened at its first request."""
        counters = self.tiers.get(name)
        if counters is None:
            counters = self.tiers[name] = TierCounters()
        return counters

    def record_request(
        self, tier: Tier, outcome: RequestOutcome, *, ttft_s: float | None, tpot_s: float | None
    ) -> None:
        """A request ended. Objectives are judged for whole answers only."""
        counters = self.get_tier(tier.name)
        counters.requests_by_outcome[outcome] += 1
        if outcome is _INVALID:
            counters.offered -= 1
            return
        if ttft_s is not None:
            counters.ttft.observe(ttft_s)
        if tpot_s is not None:
            counters.tpot.observe(tpot_s)
        if outcome is _OK and ttft_s is not None and tier.slo.is_met(ttft_s=ttft_s, tpot_s=tpot_s):
            counters.slo_met += 1

    @property
    def unexpected_local_prefills(self) -> int:
        """Requests decoded without a hand-off because something was wrong."""
        return sum(
            count
            for reason, count in self.local_prefills.items()
            if reason not in EXPECTED_LOCAL_PREFILL_REASONS
        )
