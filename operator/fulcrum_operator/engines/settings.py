"""The engine's settings: what the manifest says, else what model, hardware and role call for.

Each comes with its reason.
"""

from dataclasses import dataclass

from fulcrum_core.hardware import HardwareFacts, Vendor
from fulcrum_core.models import Fit, KvPrecision, Layout, ModelFacts, WeightPrecision, weight_bytes
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


def choose_settings(request: EngineRequest, fit: Fit) -> tuple[Settings, tuple[Choice, ...]]:
    """The settings of one engine and why each is what it is."""
    attention = _attention(request)
    block = _block_size(request)
    scheduling = _async_scheduling(request)
    tokens = _batched_tokens(request)
    sequences = _sequences(request, fit, tokens)
    all2all = _all2all(request)
    halves = _micro_batching(request, all2all)
    settings = Settings(
        attention=attention.value if attention.value != LEFT else None,
        block_size=int(block.value),
        async_scheduling=scheduling.value == "true",
        batched_tokens=int(tokens.value) if tokens.value != LEFT else None,
        sequences=int(sequences.value),
        sleep_mode=request.settings.sleep_mode,
        all2all=all2all.value if all2all else None,
        micro_batching=halves is not None and halves.value == "true",
    )
    rows = (attention, block, scheduling, tokens, sequences, all2all, halves)
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


def _attention(request: EngineRequest) -> Choice:
    name = "attentionBackend"
    if request.settings.attention_backend is not None:
        return Choice(name, _BACKENDS[request.settings.attention_backend], _WRITTEN)
    hardware, facts = request.hardware, request.facts
    if hardware.vendor is not Vendor.NVIDIA:
        return Choice(name, LEFT, f"it knows the kernels for {hardware.name}")
    if facts is None or not hardware.known:
        return Choice(name, LEFT, "model or device are not known")
    if facts.window_layers and hardware.capability < 90:
        return Choice(name, LEFT, "before Hopper not every kernel knows this model's windows")
    kv = request.quantization.kv_cache
    return Choice(name, *(_latent_backend(hardware) if facts.latent else _backend(hardware, kv)))


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
    if request.pool_role == "Prefill":
        return Choice(name, str(_PREFILL_TOKENS), "no decoding request waits for these steps")
    if request.facts is None or not request.hardware.known or not request.hardware.flops:
        return Choice(name, LEFT, "model or device are not known")
    return Choice(name, *_tokens_within(request.facts, request.hardware, request.layout, request.slo.tpot_s))


def _tokens_within(
    facts: ModelFacts, hardware: HardwareFacts, layout: Layout, tpot_s: float
) -> tuple[str, str]:
    """The largest step that still takes no longer than one output token may."""
    fixed_s, token_s = step_costs(facts, hardware, layout)
    free = int((tpot_s - fixed_s) / token_s) // _STEP_TOKENS * _STEP_TOKENS
    tokens = max(_LEAST_TOKENS, min(_MOST_TOKENS, free))
    costs = f"a step takes {fixed_s * 1e3:.1f} ms and {token_s * 1e6:.0f} µs a prefill token"
    if free < _LEAST_TOKENS:
        return str(
            tokens
        ), f"{costs}: the least that makes sense, more than a TPOT of {tpot_s * 1e3:g} ms allows"
    return str(tokens), f"{costs}, within a TPOT of {tpot_s * 1e3:g} ms"


def step_costs(facts: ModelFacts, hardware: HardwareFacts, layout: Layout) -> tuple[float, float]:
    """Seconds of a step: its fixed part, and what each prefill token adds.

    The weights are read once a step; a token costs 2 FLOP for each parameter that it goes through.
    Tensor-parallel ranks share both; pipeline stages follow one another and share nothing of a step's time.
    """
    fast = facts.weight_bits <= 8 or layout.weights is not WeightPrecision.AUTO
    flops = hardware.flops * (2 if fast and hardware.fp8 else 1) * PREFILL_EFFICIENCY
    read = weight_bytes(facts, layout.weights) / (layout.data if layout.expert else 1)
    fixed_s = read / (layout.tensor * hardware.bandwidth_bytes_s * READ_EFFICIENCY)
    return fixed_s, 2 * facts.active_params / (layout.tensor * flops)


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
    if request.hardware.capability < 90 or request.pool_role == "Flexible":
        why = (
            "serves both phases: the instances flip" if request.pool_role == "Flexible" else "needs no DeepEP"
        )
        return Choice(name, "allgather_reducescatter", why)
    if request.pool_role == "Prefill":
        return Choice(name, "deepep_high_throughput", "many tokens a step")
    return Choice(name, "deepep_low_latency", "few tokens a step, each of them awaited")
