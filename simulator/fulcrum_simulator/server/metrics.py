"""The engine server's metrics: the families of `vllm_metrics`, `vllm:cache_config_info`, and one of our own.

Our own family is `fulcrum_engine_step_lateness_seconds`; all others have vLLM's names.

Families without a cause in a simulated engine (multi-modal cache, estimated FLOPs, sleep) keep their initial
value, as on a real engine that does not use the feature. `runner` and `service` record, and `/metrics`
renders.
"""

from dataclasses import dataclass

from fulcrum_simulator.engine import EngineGauges, EngineStats, Finished
from fulcrum_simulator.server.metric_families import (
    CounterFamily,
    GaugeFamily,
    HistogramFamily,
    InfoFamily,
    MetricFamily,
)
from fulcrum_simulator.server.vllm_metrics import (
    BUCKETS_UP_TO_MODEL_LENGTH,
    CACHE_CONFIG_CONSTANTS,
    CACHE_CONFIG_HELP,
    METRIC_FAMILIES,
    MetricFamilySpec,
    MetricType,
)

ENGINE = "0"
_STEP_LATENESS_BUCKETS_MS = (
    0.1,
    0.25,
    0.5,
    1,
    1.5,
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    12.5,
    15,
    20,
    30,
    50,
    100,
    250,
    500,
    1000,
)
STEP_LATENESS_BUCKETS_S = tuple(edge / 1000 for edge in _STEP_LATENESS_BUCKETS_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The values behind `vllm:cache_config_info`."""

    block_tokens: int
    num_blocks: int
    kv_bytes: int
    max_model_tokens: int

    def labels(self) -> dict[str, str]:
        """Return all labels of the family."""
        tokens = self.block_tokens * self.num_blocks
        return CACHE_CONFIG_CONSTANTS | {
            "block_size": str(self.block_tokens),
            "effective_attention_block_size": str(self.block_tokens),
            "engine": ENGINE,
            "kv_cache_max_concurrency": str(tokens / self.max_model_tokens),
            "kv_cache_memory_bytes": str(self.kv_bytes),
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(self.num_blocks),
        }


class EngineMetrics:
    """All metric families of one engine."""

    def __init__(self, *, model: str, cache: CacheConfig, created_s: float) -> None:
        self._counters: dict[str, CounterFamily] = {}
        self._gauges: dict[str, GaugeFamily] = {}
        self._histograms: dict[str, HistogramFamily] = {}
        self._families: list[MetricFamily] = [
            self._make_family(spec, model=model, created_s=created_s, longest=cache.max_model_tokens)
            for spec in METRIC_FAMILIES
        ]
        self._families.append(InfoFamily("vllm:cache_config_info", CACHE_CONFIG_HELP, cache.labels()))
        self.step_lateness = HistogramFamily(
            "fulcrum_engine_step_lateness_seconds",
            "Delay from the due time of a step to the wake-up that ended it.",
            {"engine": ENGINE, "model_name": model},
            buckets=STEP_LATENESS_BUCKETS_S,
            created_s=created_s,
        )
        self._families.append(self.step_lateness)
        self._gauges["vllm:engine_sleep_state"].set(1, "awake")
        self._failed_notifications = 0

    def _make_family(
        self, spec: MetricFamilySpec, *, model: str, created_s: float, longest: int
    ) -> MetricFamily:
        labels = {"model_name": model} | ({"engine": ENGINE} if spec.per_engine else {})
        if spec.type is MetricType.COUNTER:
            family: MetricFamily = self._counters.setdefault(
                spec.name,
                CounterFamily(
                    spec.name,
                    spec.help,
                    labels,
                    created_s=created_s,
                    label=spec.label,
                    label_values=spec.label_values,
                ),
            )
        elif spec.type is MetricType.GAUGE:
            family = self._gauges.setdefault(
                spec.name,
                GaugeFamily(spec.name, spec.help, labels, label=spec.label, label_values=spec.label_values),
            )
        else:
            buckets = (
                token_count_buckets(longest) if spec.buckets is BUCKETS_UP_TO_MODEL_LENGTH else spec.buckets
            )
            family = self._histograms.setdefault(
                spec.name, HistogramFamily(spec.name, spec.help, labels, buckets=buckets, created_s=created_s)
            )
        return family

    def render(self, gauges: EngineGauges, stats: EngineStats) -> bytes:
        """Render all families as Prometheus text. Flushes the samples of `stats` first."""
        self._set_gauges(gauges)
        self._set_counters(stats)
        self.flush_samples(stats)
        return "".join([family.render() for family in self._families]).encode()

    def flush_samples(self, stats: EngineStats) -> None:
        """Move the samples of `stats` into the histograms.

        Called regularly, so that the samples do not pile up.
        """
        samples = stats.take_samples()
        for name, values in (
            ("vllm:time_to_first_token_seconds", samples.ttft_s),
            ("vllm:inter_token_latency_seconds", samples.itl_s),
            ("vllm:iteration_tokens_total", samples.iteration_tokens),
        ):
            observe = self._histograms[name].observe
            for value in values:
                observe(value)

    def _set_gauges(self, now: EngineGauges) -> None:
        gauges = self._gauges
        gauges["vllm:num_requests_running"].set(now.running)
        gauges["vllm:num_requests_waiting"].set(now.waiting)
        gauges["vllm:num_requests_waiting_by_reason"].set(now.waiting_capacity, "capacity")
        gauges["vllm:num_requests_waiting_by_reason"].set(now.waiting_deferred, "deferred")
        stages = gauges["vllm:num_requests_kv_fetch_by_stage"]
        stages.set(now.fetch_waiting_to_start, "waiting_to_start")
        stages.set(now.fetch_in_progress, "in_progress")
        stages.set(now.fetch_completed_waiting, "completed_waiting")
        gauges["vllm:kv_cache_usage_perc"].set(now.kv_usage)

    def _set_counters(self, stats: EngineStats) -> None:
        """Set the counters. Pulled tokens count as prompt tokens and as cached tokens, as in vLLM."""
        local, pulled = stats.prompt_local_cache_hit, stats.prompt_external
        for name, value in {
            "vllm:prefix_cache_queries": stats.prefix_queries,
            "vllm:prefix_cache_hits": stats.prefix_hits,
            "vllm:external_prefix_cache_queries": stats.external_queries,
            "vllm:external_prefix_cache_hits": stats.external_hits,
            "vllm:num_preemptions": stats.preemptions,
            "vllm:prompt_tokens": stats.prompt_tokens,
            "vllm:prompt_tokens_cached": local + pulled,
            "vllm:generation_tokens": stats.generation_tokens,
            "vllm:nixl_num_kv_expired_reqs": stats.expired_leases,
            "vllm:nixl_num_notifications_after_expiry": stats.notifications_after_expiry,
            "vllm:nixl_num_failed_transfers": stats.failed_transfers + self._failed_notifications,
            "vllm:nixl_num_failed_notifications": self._failed_notifications,
        }.items():
            self._counters[name].set(value)
        by_source = self._counters["vllm:prompt_tokens_by_source"]
        by_source.set(stats.prompt_local_compute, "local_compute")
        by_source.set(local, "local_cache_hit")
        by_source.set(pulled, "external_kv_transfer")
        self._counters["vllm:prompt_tokens_cached_by_source"].set(local, "device")
        self._counters["vllm:prompt_tokens_cached_by_source"].set(pulled, "p2p")
        for reason, count in stats.finished.items():
            self._counters["vllm:request_success"].set(count, reason)

    def record_transfer(self, *, bytes_moved: int, seconds: float, post_s: float) -> None:
        """Count a pull by this engine, with two descriptors like a real pull of one contiguous run of
        blocks.
        """
        histograms = self._histograms
        histograms["vllm:nixl_bytes_transferred"].observe(bytes_moved)
        histograms["vllm:nixl_xfer_time_seconds"].observe(seconds)
        histograms["vllm:nixl_post_time_seconds"].observe(post_s)
        histograms["vllm:nixl_num_descriptors"].observe(2)

    def record_failed_notification(self) -> None:
        """Count a release that did not reach the prefill instance; vLLM counts it as a failed transfer,
        too.
        """
        self._failed_notifications += 1

    def record_finished(self, end: Finished) -> None:
        """Count a request that ended."""
        for name, value in {
            "vllm:request_prompt_tokens": end.prompt_tokens,
            "vllm:request_generation_tokens": end.output_tokens,
            "vllm:request_max_num_generation_tokens": end.output_tokens,
            "vllm:request_params_n": 1,
            "vllm:request_params_max_tokens": end.max_tokens,
            "vllm:request_num_preemptions": end.preemptions,
            "vllm:request_prefill_kv_computed_tokens": end.prompt_tokens - end.cached_tokens,
            "vllm:request_time_per_output_token_seconds": end.tpot_s,
            "vllm:e2e_request_latency_seconds": end.e2e_s,
            "vllm:request_queue_time_seconds": end.queue_s,
            "vllm:request_inference_time_seconds": end.inference_s,
            "vllm:request_prefill_time_seconds": end.prefill_s,
            "vllm:request_decode_time_seconds": end.decode_s,
        }.items():
            self._histograms[name].observe(value)


def token_count_buckets(largest: int) -> tuple[float, ...]:
    """Return vLLM's buckets for token counts: 1, 2, 5, 10, 20, … up to `largest`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > largest:
                return tuple(buckets)
            buckets.append(mantissa * scale)
        scale *= 10
