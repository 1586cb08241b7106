"""The metric families of vLLM 0.32 with the NIXL connector: names, help texts, labels and bucket edges, in
vLLM's order.

Data only, copied exactly, because dashboards, scrapers and the router depend on it. A golden file recorded
from a real pair of engines verifies it. `metrics` makes its families from this table.
"""

from dataclasses import dataclass
from enum import Enum


class MetricType(Enum):
    """The type of a metric family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamilySpec:
    """One metric family.

    A counter's name comes without `_total`; `label` distinguishes the family's series.
    """

    type: MetricType
    name: str
    help: str
    buckets: tuple[float, ...] = ()
    label: str = ""
    label_values: tuple[str, ...] = ("",)
    per_engine: bool = True


TRANSFER_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
POST_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
TRANSFER_BYTES_BUCKETS = (
    2048,
    8192,
    32768,
    131072,
    524288,
    2097152,
    8388608,
    33554432,
    134217728,
    536870912,
    2147483648,
    8589934592,
)
DESCRIPTORS_BUCKETS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_PARAM_BUCKETS = (1, 2, 5, 10, 20)
TTFT_SECONDS_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_SECONDS_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
REQUEST_SECONDS_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

BUCKETS_UP_TO_MODEL_LENGTH: tuple[float, ...] = (-1.0,)
"""Placeholder for the buckets 1, 2, 5, 10, … up to the longest sequence of the model."""

METRIC_FAMILIES = (
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:nixl_xfer_time_seconds",
        "Histogram of transfer duration for NIXL KV Cache transfers.",
        buckets=TRANSFER_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:nixl_post_time_seconds",
        "Histogram of transfer post time for NIXL KV Cache transfers.",
        buckets=POST_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:nixl_bytes_transferred",
        "Histogram of bytes transferred per NIXL KV Cache transfers.",
        buckets=TRANSFER_BYTES_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:nixl_num_descriptors",
        "Histogram of number of descriptors per NIXL  KV Cache transfers.",
        buckets=DESCRIPTORS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:nixl_num_failed_transfers",
        "Number of failed NIXL KV Cache transfers, including handshake and notification failures. "
        "NOTE: KV expiry is tracked separately in vllm:nixl_num_kv_expired_reqs.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:nixl_num_failed_notifications",
        "Number of failed NIXL KV Cache notifications. Retained for compatibility; these failures are"
        " also included in vllm:nixl_num_failed_transfers.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:nixl_num_kv_expired_reqs",
        "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:nixl_num_notifications_after_expiry",
        "Number of completion notifications for requests that were no longer tracked, usually because"
        " their KV lease expired. The KV blocks may have been reused before the transfer finished. "
        "Counted per notification (one per remote rank), not per request.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:estimated_flops_per_gpu",
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations).",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:estimated_read_bytes_per_gpu",
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations).",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:estimated_write_bytes_per_gpu",
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations).",
    ),
    MetricFamilySpec(
        MetricType.GAUGE,
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
    ),
    MetricFamilySpec(
        MetricType.GAUGE,
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
    ),
    MetricFamilySpec(
        MetricType.GAUGE,
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling "
        "capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked "
        "status). Sum of all reasons equals vllm:num_requests_waiting.",
        label="reason",
        label_values=("capacity", "deferred"),
    ),
    MetricFamilySpec(
        MetricType.GAUGE,
        "vllm:num_requests_kv_fetch_by_stage",
        "Number of waiting requests by async KV load stage. Stage labels: 'waiting_to_start' = needs "
        "an async KV load that has not started; 'in_progress' = load started and not yet reported "
        "finished; 'completed_waiting' = load finished, request not running yet.",
        label="stage",
        label_values=("waiting_to_start", "in_progress", "completed_waiting"),
    ),
    MetricFamilySpec(
        MetricType.GAUGE,
        "vllm:engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        label="sleep_state",
        label_values=("awake", "weights_offloaded", "discard_all"),
    ),
    MetricFamilySpec(
        MetricType.GAUGE,
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:prefix_cache_hits",
        "Prefix cache hits, in terms of number of cached tokens.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:external_prefix_cache_queries",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of "
        "number of queried tokens.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:external_prefix_cache_hits",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of "
        "number of cached tokens.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:mm_cache_queries",
        "Multi-modal cache queries, in terms of number of queried items.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:mm_cache_hits",
        "Multi-modal cache hits, in terms of number of cached items.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:num_preemptions",
        "Cumulative number of preemption from the engine.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:prompt_tokens",
        "Number of prefill tokens processed.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        label="source",
        label_values=("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:prompt_tokens_cached",
        "Number of cached prompt tokens (local + external).",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:prompt_tokens_cached_by_source",
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host "
        "(offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or "
        "external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + "
        "vllm:external_prefix_cache_hits.",
        label="source",
        label_values=("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:generation_tokens",
        "Number of generation tokens processed.",
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:request_success",
        "Count of successfully processed requests.",
        label="finished_reason",
        label_values=("stop", "length", "abort", "error", "repetition"),
    ),
    MetricFamilySpec(
        MetricType.COUNTER,
        "vllm:admission_rejections",
        "Number of admission attempts rejected by a queue limit, by reason.",
        label="reason",
        label_values=("max_num_queued_reqs", "max_num_queued_tokens"),
        per_engine=False,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_prompt_tokens",
        "Number of prefill tokens processed.",
        buckets=BUCKETS_UP_TO_MODEL_LENGTH,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_generation_tokens",
        "Number of generation tokens processed.",
        buckets=BUCKETS_UP_TO_MODEL_LENGTH,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:iteration_tokens_total",
        "Histogram of number of tokens per engine_step.",
        buckets=STEP_TOKENS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        buckets=BUCKETS_UP_TO_MODEL_LENGTH,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_params_n",
        "Histogram of the n request parameter.",
        buckets=N_PARAM_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_params_max_tokens",
        "Histogram of the max_tokens request parameter.",
        buckets=BUCKETS_UP_TO_MODEL_LENGTH,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        buckets=TTFT_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:inter_token_latency_seconds",
        "Histogram of inter-token latency in seconds.",
        buckets=ITL_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        buckets=ITL_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:e2e_request_latency_seconds",
        "Histogram of e2e request latency in seconds.",
        buckets=REQUEST_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_queue_time_seconds",
        "Histogram of time spent in WAITING phase for request.",
        buckets=REQUEST_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_inference_time_seconds",
        "Histogram of time spent in RUNNING phase for request.",
        buckets=REQUEST_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_prefill_time_seconds",
        "Histogram of time spent in PREFILL phase for request.",
        buckets=REQUEST_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_decode_time_seconds",
        "Histogram of time spent in DECODE phase for request.",
        buckets=REQUEST_SECONDS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        buckets=PREEMPTIONS_BUCKETS,
    ),
    MetricFamilySpec(
        MetricType.HISTOGRAM,
        "vllm:request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        buckets=BUCKETS_UP_TO_MODEL_LENGTH,
    ),
)


CACHE_CONFIG_HELP = "Information of the LLMEngine CacheConfig"

# Every label of cache_config_info whose value does not follow from the profile.
CACHE_CONFIG_CONSTANTS = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}
