"""The engine's settings: what the manifest says, else what model, hardware and role call for.

Each comes with its reason.
"""

import math
from dataclasses import dataclass

from fulcrum_core.hardware import HardwareFacts, Vendor
from fulcrum_core.models import (
    Fit,
    KvPrecision,
    Layout,
    ModelFacts,
    WeightPrecision,
    gib,
    kv_bytes_per_token,
    linear_bits,
    rank_weight_bytes,
)
from fulcrum_operator.engines.launch import Choice
from fulcrum_operator.engines.request import EngineRequest

BLOCK_TOKENS = 128
"""KV moves block by block: 7,500 tokens took 20 ms in pieces of 16 tokens, 8 ms in pieces of 128."""
_CPU_MLA_BLOCK_TOKENS = 16
_PREFILL_TOKENS = 8192
_LEAST_TOKENS, _MOST_TOKENS, _STEP_TOKENS = 256, 8192, 128
_SEQUENCES, _CPU_SEQUENCES = 256, 16
_SEQUENCE_TOKENS = 1024
"""A request is taken to hold at least so many tokens when the number of them is sized."""

_CPU_KV_LEAST, _CPU_KV_MOST = 64 * 2**20, 4 * 2**30
_CPU_KV_TOKENS = 4096
"""A length that a CPU can be asked for."""

PREFILL_EFFICIENCY = 0.45
"""Share of the peak that prefill reaches (H100 and A100, fitted to public runs)."""
READ_EFFICIENCY = 0.7
"""Share of the memory bandwidth at which weights are read in a decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is passed to the engine; None: left to it."""

    attention: str | None
    block_size: int
    async_scheduling: bool
    batched_tokens: int | None
    sequences: int
    sleep_mode: bool
    all2all: str | None
    micro_batching: bool
    kv_bytes: int | None


def choose_settings(request: EngineRequest, fit: Fit) -> tuple[Settings, tuple[Choice, ...]]:
    """The settings of one engine and why each is what it is."""
    attention = _attention(request)
    block = _block_size(request)
    scheduling = _async_scheduling(request)
    tokens = _batched_tokens(request)
    sequences = _sequences(request, fit, tokens)
    all2all = _all2all(request)
    halves = _micro_batching(request, all2all)
    kv = _kv_bytes(request, sequences=int(sequences.value), block=int(block.value))
    settings = Settings(
        attention=attention.value if attention.value != LEFT else None,
        block_size=int(block.value),
        async_scheduling=scheduling.value == "true",
        batched_tokens=int(tokens.value) if tokens.value != LEFT else None,
        sequences=int(sequences.value),
        sleep_mode=request.settings.sleep_mode,
        all2all=all2all.value if all2all else None,
        micro_batching=halves is not None and halves.value == "true",
        kv_bytes=kv,
    )
    priority = Choice("schedulingPolicy", "priority", "each request carries its tier's")
    room = None if kv is None else Choice("kvMemory", gib(kv), _KV_BYTES_WHY)
    rows = (attention, block, scheduling, tokens, sequences, priority, all2all, halves, room, _sleep(request))
    return settings, tuple(row for row in rows if row is not None)


LEFT = "left to the engine"
_WRITTEN = "as written"

_BACKENDS = {
    "FlashAttention": "FLASH_ATTN",
    "FlashAttentionMLA": "FLASH_ATTN_MLA",
    "FlashInfer": "FLASHINFER",
    "FlashInferMLA": "FLASHINFER_MLA",
    "FlashMLA": "FLASHMLA",
    "CutlassMLA": "CUTLASS_MLA",
    "TritonMLA": "TRITON_MLA",
    "Triton": "TRITON_ATTN",
    "FlexAttention": "FLEX_ATTENTION",
    "AiterFlashAttention": "ROCM_AITER_FA",
    "AiterMLA": "ROCM_AITER_MLA",
}
LATENT_BACKENDS = frozenset(
    {"FLASHMLA", "CUTLASS_MLA", "TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "ROCM_AITER_MLA"}
)
_LATENT_SIZES = (320, 512, 576)
_HEAD_SIZES = {
    "FLASHINFER": (64, 128, 256, 512),
    "FLASH_ATTN": tuple(range(8, 257, 8)),
    "FLASHMLA": _LATENT_SIZES,
    "CUTLASS_MLA": _LATENT_SIZES,
}
"""Values a head that a kernel is made for. An engine that is told to use one that is not does not start."""


def _attention(request: EngineRequest) -> Choice:
    name = "attentionBackend"
    if request.settings.attention_backend is not None:
        return Choice(name, _BACKENDS[request.settings.attention_backend], _WRITTEN)
    hardware, facts = request.hardware, request.facts
    if hardware.vendor is not Vendor.NVIDIA:
        return Choice(name, LEFT, f"it knows the kernels for {hardware.name}")
    if facts is None or not hardware.capability:
        return Choice(name, LEFT, "model or device are not known")
    if (why := _unusual(facts, hardware)) is not None:
        return Choice(name, LEFT, why)
    backend, why = (
        _latent_backend(hardware) if facts.latent else _backend(hardware, request.quantization.kv_cache)
    )
    size = facts.latent_size or facts.head_size
    if size not in _HEAD_SIZES.get(backend, (size,)):
        return Choice(name, LEFT, f"{backend} has no kernel for {size} values a head")
    return Choice(name, backend, why)


def _unusual(facts: ModelFacts, hardware: HardwareFacts) -> str | None:
    """Why the usual kernel of this device is none for the model; None if it is."""
    if facts.index_bytes:
        return "sparse attention has kernels of its own"
    if facts.dtype == "float32":
        return "few kernels compute in float32"
    if facts.window_layers and hardware.capability < 90:
        return "before Hopper not every kernel knows this model's windows"
    return None


def _latent_backend(hardware: HardwareFacts) -> tuple[str, str]:
    if hardware.capability >= 100:
        return "CUTLASS_MLA", "latent attention on Blackwell, whose kernel reads blocks of 128"
    if hardware.capability >= 90:
        return "FLASHMLA", "latent attention on Hopper"
    return "TRITON_MLA", "latent attention before Hopper has no kernel of its own"


def _backend(hardware: HardwareFacts, kv: KvPrecision) -> tuple[str, str]:
    if hardware.capability >= 100:
        return "FLASHINFER", "Blackwell: FlashInfer carries its tensor-core kernels"
    if hardware.capability >= 90:
        return "FLASH_ATTN", "Hopper: FlashAttention 3, also with FP8 KV"
    if kv is not KvPrecision.AUTO:
        return "FLASHINFER", "FP8 KV before Hopper: FlashAttention 2 cannot read it"
    return "FLASH_ATTN", "FlashAttention 2 is the fastest before Hopper"


def _block_size(request: EngineRequest) -> Choice:
    if request.settings.block_size is not None:
        return Choice("blockSize", str(request.settings.block_size), _WRITTEN)
    latent = request.facts is not None and request.facts.latent
    if request.hardware.vendor is Vendor.CPU and latent:
        return Choice("blockSize", str(_CPU_MLA_BLOCK_TOKENS), "latent attention on CPUs reads no other")
    reason = "fewer and larger transfers; kernels that want smaller blocks divide them"
    return Choice("blockSize", str(BLOCK_TOKENS), reason)


def _async_scheduling(request: EngineRequest) -> Choice:
    name = "asyncScheduling"
    if request.settings.async_scheduling is not None:
        return Choice(name, str(request.settings.async_scheduling).lower(), _WRITTEN)
    if request.hardware.vendor is Vendor.CPU:
        return Choice(name, "false", "a CPU has nothing to overlap with")
    if request.layout.pipeline > 1:
        return Choice(name, "false", "pipeline stages keep several steps in flight already")
    return Choice(name, "true", "the next step is scheduled while the device works")


def _batched_tokens(request: EngineRequest) -> Choice:
    name = "maxBatchedTokens"
    if request.settings.max_batched_tokens is not None:
        return Choice(name, str(request.settings.max_batched_tokens), _WRITTEN)
    if request.hardware.vendor is Vendor.CPU:
        return Choice(name, LEFT, "its default for CPUs is small")
    least = max(_LEAST_TOKENS, request.settings.max_sequences or 0)  # each request has a token in a step
    if request.prefills_only:
        return Choice(name, str(max(least, _PREFILL_TOKENS)), "no decoding request waits for these steps")
    if request.facts is None or not request.hardware.known or not request.hardware.flops:
        return Choice(name, LEFT, "model or device are not known")
    costs = step_costs(request.facts, request.hardware, request.layout)
    return Choice(name, *_tokens_within(costs, request.slo.tpot_s, least=least))


def _tokens_within(costs: tuple[float, float], tpot_s: float, *, least: int) -> tuple[str, str]:
    """The largest step that still takes no longer than one output token may, and never less than `least`."""
    fixed_s, token_s = costs
    free = int((tpot_s - fixed_s) / token_s) // _STEP_TOKENS * _STEP_TOKENS
    told = f"a step takes {fixed_s * 1e3:.1f} ms and {token_s * 1e6:.0f} µs a prefill token"
    tpot = f"a TPOT of {tpot_s * 1e3:g} ms"
    if free < least:
        return str(least), f"{told}: the least that makes sense, more than {tpot} allows"
    return str(max(least, min(_MOST_TOKENS, free))), f"{told}, within {tpot}"


def step_costs(facts: ModelFacts, hardware: HardwareFacts, layout: Layout) -> tuple[float, float]:
    """Seconds of a step: its fixed part, and what each prefill token adds.

    The weights are read once a step; a token costs 2 FLOP for each parameter that it goes through.
    Tensor-parallel ranks share both; pipeline stages follow one another and share nothing of a step's time.
    """
    flops = hardware.flops * (2 if _multiplies_fast(facts, hardware, layout) else 1) * PREFILL_EFFICIENCY
    read = rank_weight_bytes(
        facts, tensor=layout.tensor, pipeline=1, data=layout.data, weights=layout.weights
    )
    fixed_s = read / (hardware.bandwidth_bytes_s * READ_EFFICIENCY)
    return fixed_s, 2 * facts.active_params / (layout.tensor * flops)


def _multiplies_fast(facts: ModelFacts, hardware: HardwareFacts, layout: Layout) -> bool:
    """Whether the device multiplies in the weights' own precision, at twice its rate of 16 bits or more.

    Weights of 4 bits are mostly a matter of memory: AWQ, GPTQ and MXFP4 are multiplied in 16 bits.
    """
    if layout.weights is WeightPrecision.FP4:
        return hardware.fp4
    return hardware.fp8 and linear_bits(facts, layout.weights) == 8


def _sequences(request: EngineRequest, fit: Fit, tokens: Choice) -> Choice:
    name = "maxSequences"
    if request.settings.max_sequences is not None:
        return Choice(name, str(request.settings.max_sequences), _WRITTEN)
    if request.hardware.vendor is Vendor.CPU:
        return Choice(name, str(_CPU_SEQUENCES), "a CPU gains nothing from more")
    most = _SEQUENCES if tokens.value == LEFT else min(_SEQUENCES, int(tokens.value))
    if fit.kv_capacity_tokens is None:
        return Choice(name, str(most), "room for KV is not known")
    room = fit.kv_capacity_tokens // request.layout.data // _SEQUENCE_TOKENS
    if room < most:
        return Choice(name, str(max(1, room)), f"KV for so many requests of {_SEQUENCE_TOKENS:,} tokens")
    return Choice(name, str(most), f"there is KV for {room:,} requests of {_SEQUENCE_TOKENS:,} tokens")


def _kv_bytes(request: EngineRequest, *, sequences: int, block: int) -> int | None:
    """KV cache of a CPU, whose memory is not the engine's alone: what running requests need, within bounds.

    One request of the longest context has room beyond the bounds: an engine without that does not start.
    """
    if request.hardware.vendor is not Vendor.CPU:
        return None
    if request.facts is None:
        return _CPU_KV_MOST
    longest = request.longest_tokens or _CPU_KV_TOKENS
    token_bytes = kv_bytes_per_token(request.facts, request.quantization.kv_cache)
    wanted = sequences * min(_CPU_KV_TOKENS, longest) * token_bytes
    blocks = math.ceil(longest / block) + 1  # the engine keeps one for itself
    return max(_CPU_KV_LEAST, min(_CPU_KV_MOST, wanted), blocks * block * token_bytes)


_KV_BYTES_WHY = "for the requests that run, at least for one of the longest context"


def _sleep(request: EngineRequest) -> Choice | None:
    if not request.settings.sleep_mode:
        return None
    opened = "/sleep and /wake_up come with vLLM's other development endpoints, open to all who reach the pod"
    return Choice("sleepMode", "true", f"as written; {opened}")


def _micro_batching(request: EngineRequest, all2all: Choice | None) -> Choice | None:
    """Whether a step is cut in two: one half computes while the other's tokens travel to their experts."""
    name = "microBatching"
    if request.settings.micro_batching is not None:
        return Choice(name, str(request.settings.micro_batching).lower(), _WRITTEN)
    if all2all is None:
        return None
    if all2all.value.startswith("deepep"):
        return Choice(name, "true", "one half of a step computes while the other's tokens travel")
    return Choice(name, "false", "only DeepEP's kernels overlap with computing")


def _all2all(request: EngineRequest) -> Choice | None:
    """How tokens get to their experts: only asked where data-parallel ranks share them."""
    layout, name = request.layout, "all2allBackend"
    if not layout.expert or layout.data == 1:
        return None
    if request.pool_role == "Flexible":
        return Choice(name, "allgather_reducescatter", "serves both phases: the instances flip")
    if request.hardware.capability < 90:
        return Choice(name, "allgather_reducescatter", "DeepEP's kernels need Hopper")
    if request.pool_role == "Prefill":
        return Choice(name, "deepep_high_throughput", "many tokens a step")
    return Choice(name, "deepep_low_latency", "few tokens a step, each of them awaited")
