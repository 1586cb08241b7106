"""Duration of an engine's steps, estimated from model and hardware.

A roofline: a step reads the weights once, a prompt token costs arithmetic, a token in the KV cache is read.
Settings are chosen by it before an engine runs, and a router predicts with it before it has measured one.
Measured coefficients come from engine profiles and from the router's own samples. Engine adapters, `fulcrum
plan` and the router ask.
"""

from fulcrum_core.hardware import HardwareFacts
from fulcrum_core.latency import StepModel
from fulcrum_core.models.facts import ModelFacts, WeightPrecision
from fulcrum_core.models.fit import Layout
from fulcrum_core.models.sizes import linear_bits, rank_kv_bytes_per_token, rank_weight_bytes

PREFILL_EFFICIENCY = 0.45
"""Share of the peak that prefill reaches (H100 and A100, fitted to public runs)."""
READ_EFFICIENCY = 0.7
"""Share of the memory bandwidth at which weights are read in a decode step."""


def step_costs_s(facts: ModelFacts, hardware: HardwareFacts, layout: Layout) -> tuple[float, float]:
    """Seconds of a step: the fixed part, and the part of each prefill token.

    A step reads the weights once; a token costs 2 FLOP for each active parameter. Tensor-parallel ranks
    share both costs; pipeline stages run one after another and do not shorten a step.
    """
    flops = (
        hardware.flops
        * (2 if _multiplies_in_weight_precision(facts, hardware, layout) else 1)
        * PREFILL_EFFICIENCY
    )
    read = rank_weight_bytes(
        facts, tensor=layout.tensor, pipeline=1, data=layout.data, weights=layout.weights
    )
    fixed_s = read / (hardware.bandwidth_bytes_per_s * READ_EFFICIENCY)
    return fixed_s, 2 * facts.active_params / (layout.tensor * flops)


def estimate_step_model(facts: ModelFacts, hardware: HardwareFacts, layout: Layout) -> StepModel | None:
    """Estimate the step model of an instance; None if the device's peaks are not known.

    A token attends to all before it: 2 FLOP for each number of each query head, in the scores and in their
    sum, and half of all pairs of tokens. The arithmetic of decoded tokens is hidden behind the reads.
    """
    if not hardware.flops or not hardware.bandwidth_bytes_per_s:
        return None
    fixed_s, token_s = step_costs_s(facts, hardware, layout)
    pair_flop = 2 * facts.kv_layers * facts.attention_heads * facts.head_size
    kv_bytes = rank_kv_bytes_per_token(facts, tensor=layout.tensor, pipeline=1, kv=layout.kv)
    return StepModel(
        t0=fixed_s,
        b=token_s,
        c=pair_flop / (layout.tensor * hardware.flops * PREFILL_EFFICIENCY),
        d1=0.0,
        d2=kv_bytes / (hardware.bandwidth_bytes_per_s * READ_EFFICIENCY),
    )


def _multiplies_in_weight_precision(facts: ModelFacts, hardware: HardwareFacts, layout: Layout) -> bool:
    """Whether the device multiplies in the precision of the weights, at twice its 16-bit rate.

    Most 4-bit formats only save memory: AWQ, GPTQ and MXFP4 are multiplied in 16 bits.
    """
    if layout.weights is WeightPrecision.FP4:
        return hardware.supports_fp4
    return hardware.supports_fp8 and linear_bits(facts, layout.weights) == 8
