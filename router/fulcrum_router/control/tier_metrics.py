"""Prometheus families about the requests of tiers and tenants; `control.metrics` adds them to a scrape.

By QoS tier: outcomes, latencies, missed objectives, reserves and decisions on admission. By tenant: results.
The time of requests by latency part has no tier. Everything is counted elsewhere.
"""

from collections.abc import Iterator
from itertools import accumulate
from math import fsum

from prometheus_client import samples
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fulcrum_core.histogram import Histogram
from fulcrum_router.counters import Counters
from fulcrum_router.policy.predictions.latency_parts import PARTS
from fulcrum_router.policy.tiers.admission import Admission
from fulcrum_router.policy.tiers.tenant_counts import OTHERS, TenantCounts
from fulcrum_router.policy.tiers.tier_reserve import TierReserve


def build_tier_families(counters: Counters) -> Iterator[Metric]:
    """Build the families of outcomes, latencies, latency parts and missed objectives."""
    yield from _build_outcome_families(counters)
    yield from _build_part_families(counters)


def _build_outcome_families(counters: Counters) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "fulcrum_router_requests",
        "Client requests that ended, by QoS tier and outcome: ok, invalid (no request that can be served), "
        "refused (not admitted), limited (over its tenant's rate limit), failed (before the first byte of "
        "the response), broken (after it), cancelled (the client disconnected while its request could still "
        "meet the objectives), left_late (it disconnected after the request had missed them).",
        labels=["tier", "outcome"],
    )
    offered = CounterMetricFamily(
        "fulcrum_router_requests_offered",
        "Client requests that arrived, those in flight included.",
        labels=["tier"],
    )
    met = CounterMetricFamily(
        "fulcrum_router_requests_slo_met",
        "Client requests with outcome ok that met the TTFT and TPOT objectives of their tier. Attainment: "
        "divide by the requests with outcome ok, failed, refused, broken or left_late.",
        labels=["tier"],
    )
    ttft = HistogramMetricFamily(
        "fulcrum_router_ttft_seconds",
        "Time from the arrival of a client request to the first byte of its stream, in seconds.",
        labels=["tier"],
    )
    tpot = HistogramMetricFamily(
        "fulcrum_router_tpot_seconds",
        "Mean time per output token after the first, of streamed responses, in seconds.",
        labels=["tier"],
    )
    response = HistogramMetricFamily(
        "fulcrum_router_response_seconds",
        "Time from the arrival of a client request to its whole response, in seconds; streams are not in it.",
        labels=["tier"],
    )
    waiting = HistogramMetricFamily(
        "fulcrum_router_waiting_seconds",
        "Time from the arrival of a client request until its first leg is sent to an engine, in seconds.",
        labels=["tier"],
    )
    for name, tier in sorted(counters.tiers.items()):
        for outcome, count in tier.requests_by_outcome.items():
            requests.add_metric([name, outcome], count)
        offered.add_metric([name], tier.offered)
        met.add_metric([name], tier.slo_met)
        add_histogram(ttft, [name], tier.ttft)
        add_histogram(tpot, [name], tier.tpot)
        add_histogram(response, [name], tier.response)
        add_histogram(waiting, [name], tier.waiting)
    yield from (requests, offered, met, ttft, tpot, response, waiting)


def _build_part_families(counters: Counters) -> Iterator[Metric]:
    parts = ", ".join(PARTS)
    seconds = CounterMetricFamily(
        "fulcrum_router_request_time_seconds",
        f"Time of the requests that met or missed their objectives, in seconds, by part: {parts}. The parts "
        "of a request sum to its duration.",
        labels=["part"],
    )
    misses = CounterMetricFamily(
        "fulcrum_router_slo_misses",
        "Requests that missed their objectives, by the part that took most of the time: after the first "
        "token if TPOT exceeds its objective by a larger factor than TTFT, else before it.",
        labels=["tier", "part"],
    )
    sums_s = map(fsum, zip(*(tier.seconds_by_part for tier in counters.tiers.values()), strict=True))
    for part, sum_s in zip(PARTS, sums_s, strict=False):  # none before the first request
        seconds.add_metric([part], sum_s)
    for name, tier in sorted(counters.tiers.items()):
        for part, count in tier.misses_by_part.items():
            misses.add_metric([name, part], count)
    yield from (seconds, misses)


def build_tenant_family(tenants: TenantCounts, *, now_s: float) -> Metric:
    """Build the family of requests by tenant."""
    family = CounterMetricFamily(
        "fulcrum_router_tenant_requests",
        "Requests for completions of a tenant that ended, by result: met, missed (their objectives), refused "
        "(not admitted), limited (over the tenant's rate limit). The tenants with most requests have a name, "
        "as many as spec.router.namedTenants, until an hour without a request; "
        f"{OTHERS} stands for the rest. Requests without a tenant are not counted here.",
        labels=["tenant", "result"],
    )
    for tenant, result, count in tenants.list_counts(now_s):
        family.add_metric([tenant, result], count)
    return family


def build_reserve_family(reserve: TierReserve, *, now_s: float) -> Metric:
    """Build the family of the shares that tiers have reserved."""
    family = GaugeMetricFamily(
        "fulcrum_router_tier_reserve_ratio",
        "Share of the prefill instances and of the decode KV cache that a tier has reserved, by state: kept "
        "(other tiers leave it free), lent (the tier sends nothing, so others may use it).",
        labels=["tier", "state"],
    )
    for tier, kept, lent in reserve.list_fractions(now_s):
        family.add_metric([tier, "kept"], kept)
        family.add_metric([tier, "lent"], lent)
    return family


def build_admission_families(admission: Admission) -> Iterator[Metric]:
    """Build the families of decisions on admission."""
    decisions = CounterMetricFamily(
        "fulcrum_router_admission_decisions",
        "Decisions on client requests at their arrival, by router.admission (Enforce; Advise: what Enforce "
        "would have done), QoS tier and decision: admit, queue (served late), degrade (with "
        "less output), refuse.",
        labels=["mode", "tier", "decision"],
    )
    refusals = CounterMetricFamily(
        "fulcrum_router_admission_refusals",
        "Client requests that were refused, or with Advise would have been, by QoS tier and reason: "
        "prefill_full (the first token would be late), decode_full (decode would have no room), "
        "waited_too_long (it was admitted, and no instance was free in time), rate_limit "
        "(of the tenant).",
        labels=["mode", "tier", "reason"],
    )
    for (mode, tier), counts in sorted(admission.counts.items()):
        for decision, count in counts.decisions.items():
            decisions.add_metric([mode, tier, decision], count)
        for reason, count in counts.refusals.items():
            refusals.add_metric([mode, tier, reason], count)
    yield from (decisions, refusals)


def add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Add a histogram with these label values to a family, with its exemplars."""
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets: list[tuple[str, float] | tuple[str, float, samples.Exemplar]] = [
        *zip(bounds, accumulate(map(float, histogram.counts)), strict=True)
    ]
    for index, kept in histogram.exemplars.items():
        exemplar = samples.Exemplar({"trace_id": f"{kept.trace_id:032x}"}, kept.value, kept.at_s)
        buckets[index] = (*buckets[index][:2], exemplar)
    family.add_metric(labels, buckets, histogram.sum)
