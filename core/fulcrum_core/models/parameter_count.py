"""Counts a model's parameters from its shape; within a percent of what is published.

Norms, biases and multi-token-prediction layers are left out: less than a percent, and the last are not
loaded. `config` calls it: config.json does not name the number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ParamCounts:
    """Parameters by where they are, and what decides how many of them a token meets."""

    embedding: int
    linear: int
    expert: int
    active: int
    experts: int
    experts_per_token: int


def count_params(
    text_config: Mapping[str, Any], *, layers: int, hidden: int, heads: int, kv_heads: int, head_size: int
) -> ParamCounts:
    """The parameters of a decoder of that shape. `active` counts the output head and not the embedding."""
    vocabulary = int(text_config.get("vocab_size") or 0) * hidden
    embedding = vocabulary if text_config.get("tie_word_embeddings") else 2 * vocabulary
    attention = (
        _count_latent_attention_params(text_config, hidden, heads) if text_config.get("kv_lora_rank") else 0
    )
    attention = attention or hidden * head_size * (2 * heads + 2 * kv_heads)
    mixture = _ExpertLayers.of(text_config, layers=layers, hidden=hidden)
    width = int(text_config.get("intermediate_size") or text_config.get("n_inner") or 4 * hidden)
    dense = 3 * hidden * width
    shared = layers * attention + (layers - mixture.layers) * dense + mixture.layers * mixture.shared
    return ParamCounts(
        embedding=embedding,
        linear=shared + mixture.layers * mixture.experts * mixture.expert,
        expert=mixture.layers * mixture.experts * mixture.expert,
        active=shared + mixture.layers * mixture.chosen * mixture.expert + vocabulary,
        experts=mixture.experts,
        experts_per_token=mixture.chosen,
    )


def _count_latent_attention_params(text_config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Low-rank queries, one latent vector for keys and values, and the matrices that expand both."""
    rank, rope = int(text_config["kv_lora_rank"]), int(text_config["qk_rope_head_dim"])
    plain, value = int(text_config["qk_nope_head_dim"]), int(text_config["v_head_dim"])
    queries = heads * (plain + rope)
    low = int(text_config.get("q_lora_rank") or 0)
    query = low * (hidden + queries) if low else hidden * queries
    return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden


@dataclass(frozen=True, slots=True)
class _ExpertLayers:
    """The layers with experts: how many, and the parameters of one expert and of what all tokens share."""

    layers: int
    experts: int
    chosen: int
    expert: int
    shared: int

    @classmethod
    def of(cls, text_config: Mapping[str, Any], *, layers: int, hidden: int) -> "_ExpertLayers":
        names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
        experts = next((int(text_config[name]) for name in names if text_config.get(name)), 0)
        if not experts:
            return cls(layers=0, experts=0, chosen=0, expert=0, shared=0)
        width = int(text_config.get("moe_intermediate_size") or text_config["intermediate_size"])
        always = int(text_config.get("n_shared_experts") or 0) * width
        always += int(text_config.get("shared_expert_intermediate_size") or 0)
        chosen = ("num_experts_per_tok", "experts_per_token", "moe_topk")
        return cls(
            layers=_count_expert_layers(text_config, layers),
            experts=experts,
            chosen=next((int(text_config[name]) for name in chosen if text_config.get(name)), 1),
            expert=3 * hidden * width,
            shared=3 * hidden * always + hidden * experts,
        )


def _count_expert_layers(text_config: Mapping[str, Any], layers: int) -> int:
    dense = int(text_config.get("first_k_dense_replace") or 0) or len(
        text_config.get("mlp_only_layers") or ()
    )
    step = int(text_config.get("decoder_sparse_step") or text_config.get("interleave_moe_layer_step") or 1)
    return (layers - dense) // step
