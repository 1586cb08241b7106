"""Facts of a model that memory sizes and engine settings are computed from, and the precisions to choose.

`models.config` reads the facts; `models.sizes` and `models.fit` compute with them.
"""

from dataclasses import dataclass
from enum import StrEnum


class KvPrecision(StrEnum):
    """Precision of the KV cache; `AUTO` is the model's data type."""

    AUTO = "auto"
    FP8 = "fp8"
    FP4 = "fp4"


class WeightPrecision(StrEnum):
    """Precision of the weights; `AUTO` is that of the checkpoint."""

    AUTO = "auto"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Shape of a language model.

    Args:
        architecture: Class of the model, as named in its config.json.
        layers: Number of transformer layers.
        kv_layers: Layers that keep KV for the whole context.
        window_layers: Layers that keep KV for the last `window_tokens` only.
        window_tokens: Size of the sliding window; 0: none.
        state_layers: Layers that keep one state per sequence (Mamba, linear attention) and no KV.
        attention_heads: Number of query heads.
        kv_heads: Number of key and value heads; 1 with multi-head latent attention.
        head_size: Numbers in the key of one head, as in its value.
        latent_size: Numbers per token and layer with multi-head latent attention; 0 without.
        index_bytes: Bytes per token and layer of a sparse-attention index; 0: none.
        hidden_size: Width of the residual stream.
        experts: Experts of a mixture-of-experts layer; 0: a dense model.
        experts_per_token: Number of experts that compute each token.
        context_tokens: Longest context, in tokens.
        dtype: Data type of the computation.
        quantization: Quantisation method of the checkpoint; empty: none.
        weight_bits: Bits per linear weight in the checkpoint.
        embedding_params: Parameters of the embedding and the output head, never quantised.
        linear_params: All other parameters.
        expert_params: Parameters of all experts; part of `linear_params`.
        active_params: Parameters that take part in computing one token.
    """

    architecture: str
    layers: int
    kv_layers: int
    window_layers: int
    window_tokens: int
    state_layers: int
    attention_heads: int
    kv_heads: int
    head_size: int
    latent_size: int
    index_bytes: int
    hidden_size: int
    experts: int
    experts_per_token: int
    context_tokens: int
    dtype: str
    quantization: str
    weight_bits: float
    embedding_params: int
    linear_params: int
    expert_params: int
    active_params: int

    @property
    def params(self) -> int:
        """Number of all parameters."""
        return self.embedding_params + self.linear_params

    @property
    def latent(self) -> bool:
        """Whether the KV cache has one latent vector per token instead of keys and values (MLA)."""
        return self.latent_size > 0

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.experts > 0

    @property
    def attention_kind(self) -> str:
        """Name of the kind of attention: MLA, MHA, MQA or GQA."""
        if self.latent:
            return "MLA"
        if self.kv_heads == self.attention_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"
