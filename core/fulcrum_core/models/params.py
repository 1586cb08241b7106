"""Counts a model's parameters from its shape; within a percent of what is published.

Norms, biases and multi-token-prediction layers are left out: less than a percent, and the last are not
loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters by where they are, and what decides how many of them a token meets."""

    embedding: int
    linear: int
    expert: int
    active: int
    experts: int
    experts_per_token: int


def count_params(
    text: Mapping[str, Any], *, layers: int, hidden: int, heads: int, kv_heads: int, head: int
) -> Params:
    """The parameters of a decoder of that shape. `active` counts the output head and not the embedding."""
    vocabulary = int(text.get("vocab_size") or 0) * hidden
    embedding = vocabulary if text.get("tie_word_embeddings") else 2 * vocabulary
    attention = _latent_attention(text, hidden, heads) if text.get("kv_lora_rank") else 0
    attention = attention or hidden * head * (2 * heads + 2 * kv_heads)
    mixture = _Mixture.of(text, layers=layers, hidden=hidden)
    width = int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    dense = 3 * hidden * width
    shared = layers * attention + (layers - mixture.layers) * dense + mixture.layers * mixture.shared
    return Params(
        embedding=embedding,
        linear=shared + mixture.layers * mixture.experts * mixture.expert,
        expert=mixture.layers * mixture.experts * mixture.expert,
        active=shared + mixture.layers * mixture.chosen * mixture.expert + vocabulary,
        experts=mixture.experts,
        experts_per_token=mixture.chosen,
    )


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Low-rank queries, one latent for keys and values, and what opens both up again."""
    rank, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    plain, value = int(text["qk_nope_head_dim"]), int(text["v_head_dim"])
    queries = heads * (plain + rope)
    low = int(text.get("q_lora_rank") or 0)
    query = low * (hidden + queries) if low else hidden * queries
    return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The layers with experts: how many, and the parameters of one expert and of what all tokens share."""

    layers: int
    experts: int
    chosen: int
    expert: int
    shared: int

    @classmethod
    def of(cls, text: Mapping[str, Any], *, layers: int, hidden: int) -> "_Mixture":
        names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
        experts = next((int(text[name]) for name in names if text.get(name)), 0)
        if not experts:
            return cls(layers=0, experts=0, chosen=0, expert=0, shared=0)
        width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
        always = int(text.get("n_shared_experts") or 0) * width
        always += int(text.get("shared_expert_intermediate_size") or 0)
        chosen = ("num_experts_per_tok", "experts_per_token", "moe_topk")
        return cls(
            layers=_mixture_layers(text, layers),
            experts=experts,
            chosen=next((int(text[name]) for name in chosen if text.get(name)), 1),
            expert=3 * hidden * width,
            shared=3 * hidden * always + hidden * experts,
        )


def _mixture_layers(text: Mapping[str, Any], layers: int) -> int:
    dense = int(text.get("first_k_dense_replace") or 0) or len(text.get("mlp_only_layers") or ())
    step = int(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1)
    return (layers - dense) // step
