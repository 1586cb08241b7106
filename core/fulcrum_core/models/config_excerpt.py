"""The part of a model's config.json that its facts follow from: short enough to be kept in an object.

The model reader pod makes it, the status of a PDService keeps it, and `config` parses it as the whole file.
"""

from collections.abc import Mapping
from typing import Any

_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")
_QUANTIZATION_KEYS = ("quant_method", "bits", "quant_algo")
_KEPT_KEYS = frozenset(
    {
        *("model_type", "dtype", "torch_dtype", "vocab_size", "tie_word_embeddings"),
        *("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "intermediate_size", "n_inner"),
        *("num_attention_heads", "n_head", "num_key_value_heads", "multi_query_group_num", "head_dim"),
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("index_head_dim", "layer_types", "full_attention_interval"),
        *("sliding_window", "sliding_window_pattern", "use_sliding_window"),
        *("max_position_embeddings", "n_positions", "max_sequence_length"),
        *("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "n_shared_experts"),
        *("num_experts_per_tok", "experts_per_token", "moe_topk"),
        *("moe_intermediate_size", "shared_expert_intermediate_size"),
        *("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "interleave_moe_layer_step"),
    }
)
"""Keys that `parse_model_config` and `count_params` read; nested sections are cut below."""


def excerpt_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json from which the same facts follow; a few hundred bytes.

    Keys of null are left out, because API objects cannot hold them.
    """
    kept = {key: value for key, value in config.items() if key in _KEPT_KEYS and value is not None}
    if isinstance(names := config.get("architectures"), list):
        kept["architectures"] = names[:1]
    if isinstance(quantization := config.get("quantization_config"), Mapping):
        kept["quantization_config"] = _excerpt_quantization(quantization)
    nested = {
        name: excerpt_config(part)
        for name in _TEXT_CONFIG_KEYS
        if isinstance(part := config.get(name), Mapping)
    }
    return {**kept, **nested}


def _excerpt_quantization(quantization_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the quantization settings without their list of unquantized layers, which may be hundreds long."""
    kept = {
        key: quantization_config[key]
        for key in _QUANTIZATION_KEYS
        if quantization_config.get(key) is not None
    }
    groups = quantization_config.get("config_groups")
    return {**kept, "config_groups": _excerpt_config_groups(groups)} if isinstance(groups, Mapping) else kept


def _excerpt_config_groups(groups: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: group.get("weights") for name, group in groups.items() if isinstance(group, Mapping)}
    return {
        name: {"weights": {"num_bits": weights["num_bits"]}}
        for name, weights in found.items()
        if isinstance(weights, Mapping) and weights.get("num_bits") is not None
    }
