"""Counters of the data path, and the enums that label them: plain integers, cheap enough for every request.

`control.metrics` builds Prometheus families from them when `/metrics` is scraped.

The data path counts here; nothing is decided from the counts.
"""

from collections import defaultdict
from enum import StrEnum
from operator import add

from fulcrum_core.histogram import Exemplar, Histogram
from fulcrum_core.values import Role
from fulcrum_router.policy.journey import LocalPrefillReason, StopReason
from fulcrum_router.policy.predictions.latency_parts import (
    CAUSES_OF_MISS,
    PARTS,
    LatencyPart,
    find_cause_of_miss,
)
from fulcrum_router.policy.tiers.tenant_counts import TenantCounts, TenantResult
from fulcrum_router.settings import Tier

# Bounds grow by at most half where objectives lie (TTFT 0.1 to 10 s, TPOT 10 to 200 ms), so that a quantile
# is off by at most half there. Each bound is a series of each tier.
TTFT_BUCKETS_S = (
    *(0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 30.0),
)
RESPONSE_BUCKETS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TPOT_BUCKETS_S = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
WAIT_BUCKETS_S = (0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)

FLIP_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 2.0)

PREFILL, DECODE = "prefill", "decode"
"""Values of the label `phase`."""


class RequestOutcome(StrEnum):
    """How a client request ended."""

    OK = "ok"
    INVALID = "invalid"
    """Rejected with a 4xx by the router or an engine; not counted in the attainment."""
    FAILED = "failed"
    """The client got an error of the router instead of a response of an engine."""
    REFUSED = "refused"
    """Not admitted: it would have missed its objectives."""
    LIMITED = "limited"
    """Over the rate limit of its tenant; not counted in the attainment."""
    BROKEN = "broken"
    """The stream ended early, after its first byte."""
    CANCELLED = "cancelled"
    """The client disconnected while its request could still meet the objectives; not counted in the
    attainment, since nobody knows whether it would have met them."""
    LEFT_LATE = "left_late"
    """The client disconnected after its request had missed the objectives."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class ContinuationOutcome(StrEnum):
    """What became of a stream whose engine failed after the first byte."""

    CONTINUED = "continued"
    """Another engine went on with it."""
    FAILED = "failed"
    """No other engine could: there was none, it failed as well, or the request is a query of death."""
    NOT_SOUND = "not_sound"
    """The rest would not fit: no seed, tools, a grammar, log-probabilities, several choices."""
    NOT_KEPT = "not_kept"
    """Too long to be kept."""

    __hash__ = str.__hash__  # see RequestOutcome


_WAITING = PARTS.index(LatencyPart.WAITING)
_OK = RequestOutcome.OK  # an attribute of an enum is slow to read
_JUDGED = frozenset(
    {
        RequestOutcome.OK,
        RequestOutcome.FAILED,
        RequestOutcome.REFUSED,
        RequestOutcome.BROKEN,
        RequestOutcome.LEFT_LATE,
    }
)
"""Outcomes of requests that met their objectives or missed them."""
_REFUSALS = {
    RequestOutcome.REFUSED: TenantResult.REFUSED,
    RequestOutcome.LIMITED: TenantResult.LIMITED,
}


class TierCounters:
    """Counters of one QoS tier."""

    __slots__ = (
        *("misses_by_part", "offered", "requests_by_outcome", "response", "seconds_by_part", "slo_met"),
        *("tpot", "ttft", "waiting"),
    )

    def __init__(self) -> None:
        self.offered = 0
        """Requests that arrived; each is counted again under its outcome when it ends."""
        self.slo_met = 0
        """Requests with outcome `ok` that met the TTFT and TPOT objectives."""
        self.requests_by_outcome = dict.fromkeys(RequestOutcome, 0)
        self.ttft = Histogram(TTFT_BUCKETS_S)
        """Counts streams only."""
        self.tpot = Histogram(TPOT_BUCKETS_S)
        """Counts streams only."""
        self.response = Histogram(RESPONSE_BUCKETS_S)
        """Durations of whole responses, from the arrival of their requests."""
        self.waiting = Histogram(WAIT_BUCKETS_S)
        """Times from the arrival of a request until its first leg is sent."""
        self.seconds_by_part = [0.0] * len(PARTS)
        """Time of the requests that met or missed their objectives, in the order of `PARTS`."""
        self.misses_by_part = dict.fromkeys(CAUSES_OF_MISS, 0)


class Counters:
    """Counters of one router process."""

    def __init__(self) -> None:
        self.tiers: dict[str, TierCounters] = {}
        self.tenants = TenantCounts()
        self.legs: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Legs that ended, by phase and outcome (`ok` or a `Failure`)."""
        self.leg_failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Failed legs, by phase and `Blame`."""
        self.retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Legs that failed before the first byte, by phase and `Failure`; most were retried."""
        self.stopped_requests: defaultdict[StopReason, int] = defaultdict(int)
        """Requests that failed and were not tried again, by reason."""
        self.continuations = dict.fromkeys(ContinuationOutcome, 0)
        """Streams whose engine failed after the first byte, by outcome; each failure counts."""
        self.local_prefills: defaultdict[LocalPrefillReason, int] = defaultdict(int)
        """Requests whose prompt the decode instance computed, by reason."""
        self.dispatches: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Chosen instances, by phase and `DispatchReason`."""
        self.flip_requests: defaultdict[Role, int] = defaultdict(int)
        self.ejections: defaultdict[str, int] = defaultdict(int)
        """Ejected instances, by reason."""
        self.refused_assignments = 0
        self.cache_salt_rotations = 0
        """Rotations after a KV transfer that may have been fetched too late."""
        self.takeovers = 0
        """Times that this router became active."""
        self.kv_transfers = Histogram(WAIT_BUCKETS_S)
        """Times from sending the decode leg of a stream with a KV transfer until its first token."""
        self.flips = Histogram(FLIP_BUCKETS_S)
        """Times from the decision on a flip until this router dispatches by it."""
        self.output_tokens = 0
        self.passed_through: defaultdict[tuple[str, RequestOutcome], int] = defaultdict(int)
        """Requests to other paths than completions that ended, by path and outcome."""
        self.unknown_tiers = 0
        """Requests that named a tier that the service does not have; they got another one."""
        self.dropped_headers: defaultdict[str, int] = defaultdict(int)
        """Headers for tenant or tier without effect, because their sender is not trusted; by name."""
        self.refused_callers: defaultdict[str, int] = defaultdict(int)
        """Requests without a valid API key, by reason: missing or unknown."""
        self.task_failures: dict[str, int] = {}
        """Failures of background tasks, by name."""
        self.failed_handshakes: dict[str, int] = {}
        """TLS handshakes of clients that did not succeed, by reason."""
        self.refused_connections = 0
        """Connections of clients over the limit."""

    def get_tier(self, name: str) -> TierCounters:
        """The counters of a tier, created at its first request."""
        counters = self.tiers.get(name)
        if counters is None:
            counters = self.tiers[name] = TierCounters()
        return counters

    def record_request(
        self, tier: Tier, outcome: RequestOutcome, *, ttft_s: float | None = None, tpot_s: float | None = None
    ) -> bool:
        """Count a request that ended: a stream, or a request without a complete response.

        `ttft_s` is None if no byte of a stream was sent. Returns whether it met the objectives; only a
        complete response can.
        """
        counters = self.get_tier(tier.name)
        counters.requests_by_outcome[outcome] += 1
        if ttft_s is not None:
            counters.ttft.observe(ttft_s)
        if tpot_s is not None:
            counters.tpot.observe(tpot_s)
        met = outcome is _OK and ttft_s is not None and tier.slo.is_met(ttft_s=ttft_s, tpot_s=tpot_s)
        counters.slo_met += met
        return met

    def record_whole_response(self, tier: Tier, *, response_s: float, tokens: int) -> bool:
        """Count a request whose whole response took `response_s` from its arrival.

        `tokens` is the number of output tokens of one choice. Returns whether it met the objectives.
        """
        counters = self.get_tier(tier.name)
        counters.requests_by_outcome[_OK] += 1
        counters.response.observe(response_s)
        met = response_s <= tier.slo.compute_response_limit_s(tokens)
        counters.slo_met += met
        return met

    def record_tenant(self, tenant: str, outcome: RequestOutcome, *, met: bool, now_s: float) -> None:
        """Count a request of a tenant that was refused, met its objectives or missed them."""
        result = _REFUSALS.get(outcome)
        if result is None and outcome in _JUDGED:
            result = TenantResult.MET if met else TenantResult.MISSED
        if result is not None:
            self.tenants.record(tenant, result, now_s)

    def keep_exemplars(
        self, tier: Tier, trace_id: int, *, at_s: float, ttft_s: float | None, response_s: float | None
    ) -> None:
        """Keep the latencies of a traced request that was counted; None: it has no such latency."""
        counters = self.get_tier(tier.name)
        for histogram, value in ((counters.ttft, ttft_s), (counters.response, response_s)):
            if value is not None:
                histogram.keep_exemplar(Exemplar(value, trace_id, at_s))

    def record_parts(
        self,
        tier: Tier,
        outcome: RequestOutcome,
        parts: tuple[float, ...],
        *,
        met: bool,
        tokens: int | None,
    ) -> None:
        """Add the time of a request to its parts, and count the part by which it missed its objectives.

        Args:
            tier: Tier of the request.
            outcome: How it ended. Requests that are not part of the attainment are not counted here either.
            parts: Its seconds, in the order of `PARTS`.
            met: Whether it met its objectives.
            tokens: Output tokens of one choice; None: not known.
        """
        if outcome not in _JUDGED:
            return
        counters = self.get_tier(tier.name)
        counters.waiting.observe(parts[_WAITING])
        counters.seconds_by_part = list(map(add, counters.seconds_by_part, parts))
        if not met:
            counters.misses_by_part[find_cause_of_miss(parts, tier.slo, tokens=tokens)] += 1

    @property
    def unexpected_local_prefills(self) -> int:
        """Requests whose prompt the decode instance computed because of a failure."""
        return sum(count for reason, count in self.local_prefills.items() if not reason.is_expected)
