"""Prometheus families of the router, built at each rendering from counters, fleet and pairs.

Nothing is counted here. Per-instance series exist for the current instances only. `metrics_port` renders.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fulcrum_core.values import Role
from fulcrum_router.control.memory_metrics import build_memory_families
from fulcrum_router.control.process_metrics import ProcessMetrics
from fulcrum_router.control.tier_metrics import (
    add_histogram,
    build_admission_families,
    build_reserve_family,
    build_tenant_family,
    build_tier_families,
)
from fulcrum_router.counters import ContinuationOutcome, Counters
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import TransferPair, TransferPairs
from fulcrum_router.policy.demand import Demand
from fulcrum_router.policy.journey import LocalPrefillReason, StopReason
from fulcrum_router.policy.overflow import PromptCounts
from fulcrum_router.policy.prefix_index import PrefixIndex
from fulcrum_router.router import Router

_INSTANCE_GAUGES: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
    ("serving", "1 if the router sends new work to the instance, else 0.", lambda i: i.serving),
    (
        "prefill_queued_seconds",
        "Predicted time until the prefill work in flight on the instance is done, in seconds.",
        lambda i: i.ledger.remaining_s(time.monotonic()),
    ),
    (
        "prefill_tokens",
        "Prompt tokens of the prefill work in flight on the instance.",
        lambda i: i.ledger.prefill_tokens,
    ),
    (
        "prefill_legs",
        "Prefill legs in flight: requests to the instance to compute a prompt.",
        lambda i: i.ledger.prefill_legs,
    ),
    (
        "local_prefills",
        "Decode legs in flight whose prompt the instance is computing itself, without a KV transfer.",
        lambda i: i.ledger.local_prefills,
    ),
    (
        "decode_tokens",
        "KV tokens of the decode legs in flight on the instance: prompt and output so far.",
        lambda i: i.ledger.decode_tokens,
    ),
    (
        "reserved_tokens",
        "Prompt tokens that other instances compute and that the instance is to decode.",
        lambda i: i.ledger.reserved_tokens,
    ),
    (
        "decode_legs",
        "Decode legs in flight: requests to the instance to generate output.",
        lambda i: i.ledger.decode_legs,
    ),
    (
        "pending_transfers",
        "Prompts computed on the instance whose KV no decode instance has fetched yet.",
        lambda i: i.ledger.pending_transfers,
    ),
    (
        "kv_usage_ratio",
        "KV cache use of the engine, as last read from its metrics, 0 to 1; NaN: not read.",
        lambda i: math.nan if i.kv_usage is None else i.kv_usage,
    ),
    ("missed_probes", "Failed probes of the instance in a row.", lambda i: i.missed_probes),
    ("ejected", "1 if the instance is ejected: it gets no new work, else 0.", lambda i: i.health.ejected),
    (
        "error_ratio",
        "Recent share of failed legs of the instance, those shed under load included, 0 to 1.",
        lambda i: i.error_share,
    ),
)


_PAIR_GAUGES: tuple[tuple[str, str, Callable[[TransferPair, float], float | None]], ...] = (
    (
        "handshake_seconds",
        "Time from sending a request to the decode instance until its first token, for the last KV transfer "
        "that included a handshake of the two engines, in seconds.",
        lambda p, _: p.handshake_s,
    ),
    (
        "seconds_per_1k_tokens",
        "Time from sending a request to the decode instance until its first token, with a KV transfer from "
        "the prefill instance, in seconds per 1,000 prompt tokens, smoothed.",
        lambda p, _: p.transfer_s_per_1k_tokens,
    ),
    (
        "verified_age_seconds",
        "Seconds since the last verified KV transfer from the prefill to the decode instance.",
        lambda p, now_s: None if p.last_verified_at_s is None else now_s - p.last_verified_at_s,
    ),
)


class RouterCollector(Collector):
    """Builds all families of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Build all families."""
        yield from build_tier_families(self._router.counters)
        yield from build_admission_families(self._router.journeys.admission)
        now_s = time.monotonic()
        yield build_tenant_family(self._router.counters.tenants, now_s=now_s)
        yield build_reserve_family(self._router.journeys.tier_reserve, now_s=now_s)
        yield from _build_leg_families(self._router.counters)
        yield from _build_counter_families(self._router.counters)
        yield from _build_plain_counters(self._router.counters)
        yield from _build_demand_counters(self._router.journeys.demand)
        yield from _build_prompt_counters(self._router.journeys.prompts)
        yield from _build_prefix_counters(self._router.journeys.prefix_index)
        yield from _build_client_families(self._router.counters)
        yield from _build_instance_families(self._router.fleet.instances)
        yield from _build_drift_families(self._router.fleet.instances)
        yield _build_counter_by_label(
            "ejections_withheld",
            "Ejections left out because half of the instances of the role, or all others, were ejected.",
            "reason",
            self._router.fleet.withheld_ejections,
        )
        yield _build_transfer_family(self._router.pairs)
        yield _build_transfer_times(self._router.counters)
        yield _build_flip_times(self._router.counters)
        yield from _build_pair_families(self._router.pairs, now_s=now_s)
        yield from _build_router_gauges(self._router)


def build_registry(router: Router) -> CollectorRegistry:
    """Build the registry of one router, with the metrics of its process."""
    registry = CollectorRegistry()
    registry.register(RouterCollector(router))
    registry.register(ProcessMetrics())
    return registry


def _build_leg_families(counters: Counters) -> Iterator[Metric]:
    yield _build_counter_by_phase(
        "legs",
        "Requests to engines (legs) that ended, by phase and outcome: ok, or the failure.",
        "outcome",
        counters.legs,
    )
    yield _build_counter_by_phase(
        "leg_failures",
        "Requests to engines (legs) that failed, by phase and cause: engine, network, load (shed, or late "
        "while the engine works), client (the request asks for too much), router.",
        "cause",
        counters.leg_failures,
    )
    yield _build_counter_by_phase(
        "retries",
        "Legs that failed before the first byte, by phase and failure. Most are sent to another instance.",
        "reason",
        counters.retries,
    )
    yield _build_counter_by_phase(
        "dispatches",
        "Choices of an instance, by phase and reason: within_slo (meets the SLO), least_cost (no instance "
        "does), prefilled_here (the instance computed the prompt), other_role (no decode instance serves), "
        "overflow (accelerators would be too late, a CPU instance is sooner).",
        "reason",
        counters.dispatches,
    )


def _build_counter_families(counters: Counters) -> Iterator[Metric]:
    yield _build_counter_by_label(
        "stopped_requests",
        "Requests that failed, and streams that were not continued, by the reason for which they were not "
        "tried again: no_instance, attempts, query_of_death (two engines died), retry_budget, too_long, full "
        "(waiting room), refused (not admitted, or over a rate limit).",
        "reason",
        counters.stopped_requests,
    )
    yield _build_counter_by_label(
        "stream_continuations",
        "Streams whose engine failed after the first byte, by outcome: continued (another instance went on), "
        "failed (none could), not_sound (another would generate another text), not_kept (too long to keep).",
        "outcome",
        counters.continuations,
    )
    yield _build_counter_by_label(
        "local_prefills",
        "Requests whose decode instance computed the prompt itself, without a KV transfer, by reason.",
        "reason",
        counters.local_prefills,
    )
    yield _build_counter_by_label(
        "flip_requests",
        "Requests to the autoscaler to flip an instance to the role, because no instance of that role met "
        "the SLO.",
        "role",
        counters.flip_requests,
    )
    yield _build_counter_by_label(
        "ejections",
        "Ejections of an instance after failures, by the last failure; probe_ marks failures of a probe, "
        "error_rate and latency comparisons with its peers. An ejected instance gets no new work until a "
        "probe of its health succeeds, and for a time that grows with each ejection if it answers badly.",
        "reason",
        counters.ejections,
    )


def _build_prompt_counters(counts: PromptCounts) -> Iterator[Metric]:
    for name, description, value in (
        ("prompts_sent", "Prompts that were sent to an instance to be computed.", counts.prompts),
        ("prompt_tokens_sent", "Tokens of the prompts that were sent to an instance.", counts.tokens),
        (
            "overflow_prompts",
            "Prompts that CPU instances computed because accelerators would have computed them too late.",
            counts.overflow_prompts,
        ),
        (
            "overflow_prompt_tokens",
            "Tokens of the prompts in fulcrum_router_overflow_prompts_total.",
            counts.overflow_tokens,
        ),
    ):
        yield CounterMetricFamily(f"fulcrum_router_{name}", description, value=value)


def _build_prefix_counters(index: PrefixIndex | None) -> Iterator[Metric]:
    """Two counters, which a router without prefix-aware dispatch does not have."""
    predicted = CounterMetricFamily(
        "fulcrum_router_prefix_predicted_tokens",
        "Prompt tokens that were predicted to be in the engines' prefix caches, of prefill legs with a "
        "response. Only with dispatch.prefixAware.",
    )
    cached = CounterMetricFamily(
        "fulcrum_router_prefix_cached_tokens",
        "Prompt tokens that engines reported to have found in their prefix caches, of prefill legs with a "
        "response. Only with dispatch.prefixAware.",
    )
    if index is not None:
        predicted.add_metric((), index.predicted_tokens)
        cached.add_metric((), index.reported_tokens)
    yield from (predicted, cached)


def _build_plain_counters(counters: Counters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "fulcrum_router_assignments_refused",
        "PDAssignments that the router refused to apply; the last good one stays in force.",
        counters.refused_assignments,
    )
    yield CounterMetricFamily(
        "fulcrum_router_cache_salt_rotations",
        "Times that the router stopped using an instance's prefix cache, because a KV transfer may have been "
        "fetched after its lease.",
        counters.cache_salt_rotations,
    )
    yield CounterMetricFamily(
        "fulcrum_router_takeovers", "Times that this router became the active one.", counters.takeovers
    )
    yield CounterMetricFamily(
        "fulcrum_router_output_tokens", "Output tokens of complete responses.", counters.output_tokens
    )


def _build_demand_counters(demand: Demand) -> Iterator[Metric]:
    sums = demand.snapshot()
    yield CounterMetricFamily(
        "fulcrum_router_demand_prefill_seconds",
        "Predicted time to compute the prompts of the requests that were admitted, in seconds.",
        sums.prefill_s,
    )
    yield CounterMetricFamily(
        "fulcrum_router_demand_withdrawn_prefill_seconds",
        "The part of it that no engine had to compute: the client left in time, or engines rejected the "
        "request, in seconds.",
        sums.withdrawn.prefill_s,
    )


def _build_client_families(counters: Counters) -> Iterator[Metric]:
    passed_through = CounterMetricFamily(
        "fulcrum_router_passed_through_requests",
        "Client requests to other paths than completions that ended, by path and outcome: ok, invalid, "
        "refused, limited, failed, broken, cancelled. They are not part of the SLO attainment.",
        labels=["path", "outcome"],
    )
    for (path, outcome), count in sorted(counters.passed_through.items()):
        passed_through.add_metric([path, outcome], count)
    yield passed_through
    yield CounterMetricFamily(
        "fulcrum_router_unknown_tiers",
        "Client requests that named a tier that the service does not list; they got their tenant's tier, or "
        "the default tier.",
        counters.unknown_tiers,
    )
    yield _build_counter_by_label(
        "dropped_headers",
        "Headers x-customer-tier and x-tenant-id that were ignored because their sender is not a trusted "
        "proxy (spec.router.auth), by header.",
        "header",
        counters.dropped_headers,
    )
    yield _build_counter_by_label(
        "refused_callers",
        "Client requests that got 401, by reason: missing (no API key), unknown (the key is not valid).",
        "reason",
        counters.refused_callers,
    )
    tasks = CounterMetricFamily(
        "fulcrum_router_background_task_failures",
        "Failures of background tasks; each was started again.",
        labels=["task"],
    )
    for name, count in counters.task_failures.items():
        tasks.add_metric([name], count)
    yield tasks
    yield _build_counter_by_label(
        "failed_handshakes",
        "TLS handshakes of clients that did not succeed, by reason: aborted (too many at once, most from "
        "this address), failed.",
        "reason",
        counters.failed_handshakes,
    )
    yield CounterMetricFamily(
        "fulcrum_router_refused_connections",
        "Connections of clients that got a 503, because the router had its most connections open.",
        counters.refused_connections,
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
    counts: Mapping[str, int]
    | Mapping[Role, int]
    | Mapping[LocalPrefillReason, int]
    | Mapping[StopReason, int]
    | Mapping[ContinuationOutcome, int],
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


def _build_drift_families(instances: Iterable[Instance]) -> Iterator[Metric]:
    """Build the gauges of the predictors; instances that were not measured have no series."""
    known = [(instance, instance.drift) for instance in instances]
    texts = (
        ("prefill", "Predicted divided by measured time of recent prefills of the instance; 1: exact."),
        ("decode", "Predicted divided by measured time of recent decode steps of the instance; 1: exact."),
    )
    for index, (phase, text) in enumerate(texts):
        family = GaugeMetricFamily(
            f"fulcrum_router_instance_{phase}_drift_ratio", text, labels=["instance", "role"]
        )
        for instance, drift in known:
            ratio = drift[index]
            if ratio is not None:
                family.add_metric([instance.name, instance.role.lower()], ratio)
        yield family


def _build_transfer_family(pairs: TransferPairs) -> Metric:
    text = (
        "KV transfers from the prefill to the decode instance, canaries included, by outcome: verified "
        "(decode used the KV), recomputed (decode computed the prompt), unknown (not reported by the engine)."
    )
    labels = ["prefill", "decode", "outcome"]
    family = CounterMetricFamily("fulcrum_router_kv_transfers", text, labels=labels)
    for key, pair in pairs.list_reported():
        for outcome, count in pair.counts.items():
            family.add_metric([*key, outcome], count)
    return family


def _build_transfer_times(counters: Counters) -> Metric:
    family = HistogramMetricFamily(
        "fulcrum_router_kv_transfer_seconds",
        "Time from sending a streamed request with a KV transfer to the decode instance until its first "
        "token, in seconds: transfer, queue and first step.",
        labels=[],
    )
    add_histogram(family, [], counters.kv_transfers)
    return family


def _build_flip_times(counters: Counters) -> Metric:
    family = HistogramMetricFamily(
        "fulcrum_router_flip_seconds",
        "Time from the decision on a flip, as the PDAssignment states it, until the router dispatches by it, "
        "in seconds.",
        labels=[],
    )
    add_histogram(family, [], counters.flips)
    return family


def _build_pair_families(pairs: TransferPairs, *, now_s: float) -> Iterator[Metric]:
    """Build the gauges of the reported pairs; pairs without a measurement have no series."""
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
        "assignment_generation",
        "Generation of the PDAssignment that the router uses.",
        router.applied_assignment.generation,
    )
    serving = GaugeMetricFamily(
        "fulcrum_router_serving_instances",
        "Instances that the router sends new work to, by role; an instance that plays both counts for both.",
        labels=["role"],
    )
    for role in (Role.PREFILL, Role.DECODE):
        serving.add_metric(
            [role.lower()], sum(i.serving and i.role.serves(role) for i in router.fleet.instances)
        )
    yield serving
    room = router.journeys.waiting_room
    yield gauge("waiting_requests", "Requests that wait in the router for a prefill instance.", len(room))
    yield gauge(
        "waiting_prefill_seconds", "Predicted prefill time of the requests that wait.", room.prefill_s
    )
    yield from build_memory_families(router.request_memory)
    yield gauge("active", "1 if traffic is directed to this router, 0 if it is a standby.", router.active)
    ratio = router.tokens_per_byte.value
    yield gauge("tokens_per_byte", "Learned tokens per byte of prompt text, median of the tenants.", ratio)
    errors = GaugeMetricFamily(
        "fulcrum_router_ttft_prediction_error_ratio",
        "Mean of (predicted - measured)/measured time of recent requests, by part: prefill_leg (queue and "
        "prefill), decode_leg (KV transfer, queue and first step), ttft (arrival to first token); 0.1: 10 % "
        "too long.",
        labels=["part"],
    )
    for part, error in router.ttft_errors.items():
        errors.add_metric([part], error)
    yield errors
    yield CounterMetricFamily(
        "fulcrum_router_ttft_forecasts",
        "Streams whose TTFT was predicted when their prompt was sent to an instance, and measured.",
        router.ttft_errors.streams,
    )
    forecast = CounterMetricFamily(
        "fulcrum_router_ttft_forecast_seconds",
        "Sum of the TTFTs of the streams in fulcrum_router_ttft_forecasts_total, in seconds: predicted, and "
        "as measured.",
        labels=["time"],
    )
    forecast.add_metric(["predicted"], router.ttft_errors.predicted_s)
    forecast.add_metric(["measured"], router.ttft_errors.measured_s)
    yield forecast
