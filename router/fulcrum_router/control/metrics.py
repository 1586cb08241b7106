"""`/metrics`: the counters as Prometheus families, built when somebody scrapes.

Per-instance series are drawn from the fleet of the moment, so those of an instance that is gone vanish.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from fulcrum_core.values import Role
from fulcrum_router.counters import Counters, Histogram, LocalPrefillReason
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import TransferPair, TransferPairs
from fulcrum_router.router import Router

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()

_INSTANCE_GAUGES: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
    ("serving", "Whether new work is sent to the instance.", lambda i: i.serving),
    (
        "prefill_queued_seconds",
        "Predicted seconds of prefill in flight.",
        lambda i: i.ledger.prefill_queued_s,
    ),
    ("prefill_tokens", "Prompt tokens of prefill in flight.", lambda i: i.ledger.prefill_tokens),
    ("prefill_legs", "Prefill legs in flight.", lambda i: i.ledger.prefill_legs),
    (
        "local_prefills",
        "Decode legs that compute their prompt themselves now.",
        lambda i: i.ledger.local_prefills,
    ),
    ("decode_tokens", "KV tokens of decode legs in flight.", lambda i: i.ledger.decode_tokens),
    ("decode_legs", "Decode legs in flight.", lambda i: i.ledger.decode_legs),
    ("pending_transfers", "Prompts whose KV nobody has taken yet.", lambda i: i.ledger.pending_transfers),
    ("missed_probes", "Probes in a row without an answer.", lambda i: i.missed_probes),
)


_PAIR_GAUGES: tuple[tuple[str, str, Callable[[TransferPair, float], float | None]], ...] = (
    ("handshake_seconds", "What the last first hand-off took decode.", lambda p, _: p.handshake_s),
    (
        "seconds_per_1k_tokens",
        "What hand-offs take decode, by 1,000 tokens of prompt.",
        lambda p, _: p.transfer_s_per_1k_tokens,
    ),
    (
        "verified_age_seconds",
        "Since the last hand-off that was verified.",
        lambda p, now_s: None if p.last_verified_at_s is None else now_s - p.last_verified_at_s,
    ),
)


class RouterCollector(Collector):
    """One router's families."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from _build_tier_families(self._router.counters)
        yield from _build_counter_families(self._router.counters)
        yield from _build_instance_families(self._router.fleet.instances)
        yield _build_transfer_family(self._router.pairs)
        yield from _build_pair_families(self._router.pairs, now_s=time.monotonic())
        yield from _build_router_gauges(self._router)


def build_registry(router: Router) -> CollectorRegistry:
    """The registry that `render_metrics` writes out."""
    registry = CollectorRegistry()
    registry.register(RouterCollector(router))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render_metrics(registry: CollectorRegistry) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(registry)


def _build_tier_families(counters: Counters) -> Iterator[Metric]:
    requests = CounterMetricFamily("fulcrum_router_requests", "Requests ended.", labels=["tier", "outcome"])
    offered = CounterMetricFamily(
        "fulcrum_router_requests_offered", "Requests taken in, invalid ones left out.", labels=["tier"]
    )
    met = CounterMetricFamily(
        "fulcrum_router_requests_slo_met", "Requests that met TTFT and TPOT.", labels=["tier"]
    )
    ttft = HistogramMetricFamily(
        "fulcrum_router_ttft_seconds", "Arrival to the first content byte.", labels=["tier"]
    )
    tpot = HistogramMetricFamily(
        "fulcrum_router_tpot_seconds", "Time per output token after the first, streams.", labels=["tier"]
    )
    for name, tier in sorted(counters.tiers.items()):
        for outcome, count in tier.requests_by_outcome.items():
            requests.add_metric([name, outcome], count)
        offered.add_metric([name], tier.offered)
        met.add_metric([name], tier.slo_met)
        _add_histogram(ttft, name, tier.ttft)
        _add_histogram(tpot, name, tier.tpot)
    yield from (requests, offered, met, ttft, tpot)


def _add_histogram(family: HistogramMetricFamily, tier: str, histogram: Histogram) -> None:
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets = list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
    family.add_metric([tier], buckets, histogram.sum)


def _build_counter_families(counters: Counters) -> Iterator[Metric]:
    yield _build_counter_by_phase("legs", "Legs ended.", "outcome", counters.legs)
    yield _build_counter_by_phase("retries", "Legs tried again elsewhere.", "reason", counters.retries)
    yield _build_counter_by_phase("dispatches", "Choices of an instance.", "reason", counters.dispatches)
    yield _build_counter_by_label(
        "local_prefills", "Requests decoded without a hand-off.", "reason", counters.local_prefills
    )
    yield _build_counter_by_label(
        "flip_requests", "Findings of no instance within the SLO.", "role", counters.flip_requests
    )
    yield _build_counter_by_label(
        "ejections", "Instances left out for their failures.", "reason", counters.ejections
    )
    yield CounterMetricFamily(
        "fulcrum_router_assignments_refused", "Assignments not applied.", counters.refused_assignments
    )
    text = "Prefix caches not used any more after a hand-off that was late."
    yield CounterMetricFamily("fulcrum_router_cache_salt_rotations", text, counters.cache_salt_rotations)
    yield CounterMetricFamily(
        "fulcrum_router_takeovers", "Times that this router became the active one.", counters.takeovers
    )
    yield CounterMetricFamily(
        "fulcrum_router_output_tokens", "Tokens streamed to clients.", counters.output_tokens
    )


def _build_counter_by_phase(
    name: str, text: str, label: str, counts: Mapping[tuple[str, str], int]
) -> Metric:
    family = CounterMetricFamily(f"fulcrum_router_{name}", text, labels=["phase", label])
    for labels, count in sorted(counts.items()):
        family.add_metric(list(labels), count)
    return family


def _build_counter_by_label(
    name: str,
    text: str,
    label: str,
    counts: Mapping[str, int] | Mapping[Role, int] | Mapping[LocalPrefillReason, int],
) -> Metric:
    family = CounterMetricFamily(f"fulcrum_router_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value.lower()], count)
    return family


def _build_instance_families(instances: Iterable[Instance]) -> Iterator[Metric]:
    known = list(instances)
    for name, text, value in _INSTANCE_GAUGES:
        family = GaugeMetricFamily(f"fulcrum_router_instance_{name}", text, labels=["instance", "role"])
        for instance in known:
            family.add_metric([instance.name, instance.role.lower()], value(instance))
        yield family


def _build_transfer_family(pairs: TransferPairs) -> Metric:
    """Only pairs of instances that there are: the map forgets the others."""
    text = "Hand-offs by what decode said of them, canaries included."
    labels = ["prefill", "decode", "outcome"]
    family = CounterMetricFamily("fulcrum_router_kv_transfers", text, labels=labels)
    for key, pair in sorted(pairs.pairs.items()):
        for outcome, count in pair.counts.items():
            family.add_metric([*key, outcome], count)
    return family


def _build_pair_families(pairs: TransferPairs, *, now_s: float) -> Iterator[Metric]:
    """What is known of pairs, and only of those worth telling of: many instances have very many."""
    reported = pairs.list_reported()
    for name, text, value in _PAIR_GAUGES:
        family = GaugeMetricFamily(f"fulcrum_router_kv_pair_{name}", text, labels=["prefill", "decode"])
        for key, pair in reported:
            if (known := value(pair, now_s)) is not None:
                family.add_metric(list(key), known)
        yield family


def _build_router_gauges(router: Router) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"fulcrum_router_{name}", text, value)

    yield gauge(
        "assignment_generation", "PDAssignment generation applied.", router.applied_assignment.generation
    )
    yield gauge("active", "Whether clients are directed to this router.", router.active)
    yield gauge("tokens_per_byte", "Learned tokens per byte of prompt.", router.tokens_per_byte.value)
    if router.prediction_error.value is not None:
        text = "Mean of (predicted - measured)/measured of recent prefills."
        yield gauge("prefill_prediction_error_ratio", text, router.prediction_error.value)
