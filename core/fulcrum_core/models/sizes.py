"""Sizes of a model's weights and KV in memory and on the network.

For L layers, H_kv heads of D values and b bytes a value, the KV of N tokens takes 2·L·N·(H_kv·D)·b; latent
attention keeps one vector a layer instead and every tensor-parallel rank has all of it.

`fit`, the vLLM adapter and `fulcrum plan` compute with them.
"""

import math

from fulcrum_core.models.facts import KvPrecision, ModelFacts, WeightPrecision

MIB = 2**20
GIB = 2**30
TRANSFER_ALIGN_BYTES = 256 * MIB
"""Transfer buffers are registered with the network card in pieces of this size."""

_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_KV_BYTES = {KvPrecision.FP8: 1.0, KvPrecision.FP4: 0.5 + 1 / 16}
"""FP4 comes with an 8-bit scale for each 16 values."""
_SPARSE_FP8_BYTES = 80
"""Sparse attention reads the 64 rotary values of a latent vector in 16 bits, the others with 4 scales."""
_WEIGHT_BITS = {WeightPrecision.FP8: 8.0, WeightPrecision.FP4: 4.5}


def value_bytes(facts: ModelFacts, kv: KvPrecision) -> float:
    """Bytes of one value in the KV cache."""
    return _DTYPE_BYTES[facts.dtype] if kv is KvPrecision.AUTO else _KV_BYTES[kv]


def kv_bytes_per_token(facts: ModelFacts, kv: KvPrecision = KvPrecision.AUTO) -> int:
    """KV cache of one token over all layers, as if no layer had a window."""
    return math.ceil((facts.kv_layers + facts.window_layers) * _layer_bytes(facts, kv))


def kv_bytes(facts: ModelFacts, tokens: int, kv: KvPrecision = KvPrecision.AUTO) -> int:
    """KV cache of a prompt of so many tokens: layers with a window keep no more than that."""
    kept = facts.kv_layers * tokens + facts.window_layers * min(tokens, facts.window_tokens or tokens)
    return math.ceil(kept * _layer_bytes(facts, kv))


def rank_kv_bytes_per_token(facts: ModelFacts, *, tensor: int, pipeline: int, kv: KvPrecision) -> float:
    """KV cache of one token on one device.

    Pipeline stages share the layers. Tensor-parallel ranks share the heads, down to one a rank: where there
    are more ranks than heads, and under latent attention, they hold copies.
    """
    return kv_bytes_per_token(facts, kv) * _rank_share(facts, tensor) / pipeline


def transfer_buffer_bytes(
    facts: ModelFacts, tokens: int, kv: KvPrecision = KvPrecision.AUTO, *, tensor: int = 1
) -> int:
    """Buffer of one rank for transferring the KV of a prompt of `tokens`, rounded up to 256 MiB."""
    share = kv_bytes(facts, tokens, kv) * _rank_share(facts, tensor)
    return TRANSFER_ALIGN_BYTES * max(1, math.ceil(share / TRANSFER_ALIGN_BYTES))


def weight_bytes(facts: ModelFacts, weights: WeightPrecision = WeightPrecision.AUTO) -> int:
    """Weights of one copy of the model. Embedding and output head stay as they are."""
    linear = facts.linear_params * linear_bits(facts, weights) / 8
    return math.ceil(facts.embedding_params * _DTYPE_BYTES[facts.dtype] + linear)


def rank_weight_bytes(
    facts: ModelFacts, *, tensor: int, pipeline: int, data: int, weights: WeightPrecision
) -> float:
    """Weights on one device.

    Tensor and pipeline ranks share them. Data-parallel ranks hold copies of all but the experts, which they
    share: whole ones under expert parallelism, else a slice of each.
    """
    experts = facts.expert_params * linear_bits(facts, weights) / 8
    rest = weight_bytes(facts, weights) - experts
    return (rest + experts / data) / (tensor * pipeline)


def linear_bits(facts: ModelFacts, weights: WeightPrecision) -> float:
    """Bits of a linear weight as it is served."""
    return facts.weight_bits if weights is WeightPrecision.AUTO else _WEIGHT_BITS[weights]


def _rank_share(facts: ModelFacts, tensor: int) -> float:
    return 1.0 if facts.latent else max(1, math.ceil(facts.kv_heads / tensor)) / facts.kv_heads


def _layer_bytes(facts: ModelFacts, kv: KvPrecision) -> float:
    values = facts.latent_size or 2 * facts.kv_heads * facts.head_size
    sparse = _SPARSE_FP8_BYTES if facts.index_bytes and kv is KvPrecision.FP8 else 0
    return values * value_bytes(facts, kv) + facts.index_bytes + sparse
