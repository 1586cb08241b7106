"""Facts of a model from its config.json, and the memory that its weights and KV need. Pure."""

from fulcrum_core.models.config import parse_model_config
from fulcrum_core.models.config_excerpt import excerpt_config
from fulcrum_core.models.facts import KvPrecision, ModelFacts, WeightPrecision
from fulcrum_core.models.fit import GPU_UTILIZATION, MODEL_UNKNOWN, Fit, Layout, check_fit, format_gib
from fulcrum_core.models.sizes import (
    kv_bytes,
    kv_bytes_per_token,
    linear_bits,
    rank_kv_bytes_per_token,
    rank_weight_bytes,
    transfer_buffer_bytes,
    weight_bytes,
)
from fulcrum_core.models.steps import estimate_step_model, step_costs_s

__all__ = [
    "GPU_UTILIZATION",
    "MODEL_UNKNOWN",
    "Fit",
    "KvPrecision",
    "Layout",
    "ModelFacts",
    "WeightPrecision",
    "check_fit",
    "estimate_step_model",
    "excerpt_config",
    "format_gib",
    "kv_bytes",
    "kv_bytes_per_token",
    "linear_bits",
    "parse_model_config",
    "rank_kv_bytes_per_token",
    "rank_weight_bytes",
    "step_costs_s",
    "transfer_buffer_bytes",
    "weight_bytes",
]
