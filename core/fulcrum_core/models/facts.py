"""The facts of a model that sizes and settings follow from."""

from dataclasses import dataclass
from enum import StrEnum


class KvPrecision(StrEnum):
    """How the KV cache is kept; `AUTO` is the model's own data type."""

    AUTO = "auto"
    FP8 = "fp8"
    FP4 = "fp4"


class WeightPrecision(StrEnum):
    """How the weights are kept; `AUTO` is as the checkpoint has them."""

    AUTO = "auto"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A text model's shape.

    Args:
        architecture: The class that serves it, as the model names it.
        layers: All of its transformer layers.
        kv_layers: Those that keep KV for the whole context.
        window_layers: Those that keep KV for the last `window_tokens` only.
        window_tokens: Sliding window; 0: none.
        state_layers: Those that keep a state a sequence (Mamba, linear attention) and no KV.
        attention_heads: Query heads.
        kv_heads: Key and value heads; 1 under multi-head latent attention.
        head_size: Values of one head's key, and of its value.
        latent_size: Values a token and layer under multi-head latent attention; 0: keys and values are kept.
        index_bytes: Bytes a token and layer of a sparse-attention index; 0: none.
        hidden_size: Width of the residual stream.
        experts: Experts of a mixture layer; 0: dense.
        experts_per_token: How many of them a token goes through.
        context_tokens: Longest context.
        dtype: Data type that it computes in.
        quantization: How the checkpoint is quantised; empty: it is not.
        weight_bits: Bits a linear weight takes in the checkpoint.
        embedding_params: Parameters of the embedding and the output head, never quantised.
        linear_params: All other parameters.
        expert_params: Those of them that are in experts.
        active_params: Parameters that one token goes through.
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
        """All parameters."""
        return self.embedding_params + self.linear_params

    @property
    def latent(self) -> bool:
        """Whether it keeps one latent vector a token instead of keys and values (MLA)."""
        return self.latent_size > 0

    @property
    def is_moe(self) -> bool:
        """Whether it has experts."""
        return self.experts > 0

    @property
    def attention_kind(self) -> str:
        """The kind of attention, in the field's words."""
        if self.latent:
            return "MLA"
        if self.kv_heads == self.attention_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"
