"""Choose the settings of a vLLM engine: from the manifest, else from model, hardware and role.

Each setting comes with its reason, which `fulcrum plan` shows. `vllm/launch` turns the settings into
arguments, and `unsupported` refuses combinations that do not work.
"""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from fulcrum_core.hardware import HardwareFacts, Vendor
from fulcrum_core.models import (
    Fit,
    KvPrecision,
    ModelFacts,
    format_gib,
    kv_bytes_per_token,
    step_costs_s,
)
from fulcrum_operator.engines.launch import Choice
from fulcrum_operator.engines.launch_request import LaunchRequest

BLOCK_TOKENS = 128
"""KV moves block by block: 7,500 tokens took 20 ms in blocks of 16 tokens, 8 ms in blocks of 128."""
_CPU_MLA_BLOCK_TOKENS = 16
_PREFILL_STEP_TOKENS = 8192
_STEP_TOKENS_MIN, _STEP_TOKENS_MAX, _STEP_TOKENS_MULTIPLE = 256, 8192, 128
_SEQUENCES_MAX, _CPU_SEQUENCES_MAX = 256, 16
_TOKENS_PER_SEQUENCE = 1024
"""Assumed minimum tokens of a request, to derive the number of sequences from the KV capacity."""

_CPU_KV_BYTES_MIN, _CPU_KV_BYTES_MAX = 64 * 2**20, 4 * 2**30
_CPU_KV_TOKENS = 4096
"""Tokens of a request for which a CPU's KV cache is sized."""


T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class _Setting(Generic[T_co]):
    """A setting with its reason; the value None leaves it to the engine."""

    name: str
    value: T_co
    reason: str

    def to_choice(self) -> Choice:
        """The row of `fulcrum plan`."""
        if self.value is None:
            return Choice(self.name, LEFT_TO_ENGINE, self.reason)
        text = str(self.value)
        return Choice(self.name, text.lower() if isinstance(self.value, bool) else text, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings that are passed to the engine; None leaves a setting to the engine."""

    attention_backend: str | None
    block_size: int
    async_scheduling: bool
    max_batched_tokens: int | None
    max_sequences: int
    sleep_mode: bool
    all2all_backend: str | None
    micro_batching: bool
    kv_cache_bytes: int | None


def choose_settings(request: LaunchRequest, fit: Fit) -> tuple[VllmSettings, tuple[Choice, ...]]:
    """The settings of one engine, and a row with value and reason for each."""
    attention_backend = _choose_attention_backend(request)
    block = _choose_block_size(request)
    async_scheduling = _choose_async_scheduling(request)
    step_tokens = _choose_step_tokens(request)
    max_sequences = _choose_max_sequences(request, fit, step_tokens.value)
    all2all_backend = _choose_all2all_backend(request)
    micro_batching = _choose_micro_batching(request, all2all_backend)
    kv = _choose_kv_cache_bytes(request, max_sequences=max_sequences.value, block=block.value)
    settings = VllmSettings(
        attention_backend=attention_backend.value,
        block_size=block.value,
        async_scheduling=async_scheduling.value,
        max_batched_tokens=step_tokens.value,
        max_sequences=max_sequences.value,
        sleep_mode=request.settings.sleep_mode,
        all2all_backend=all2all_backend.value if all2all_backend else None,
        micro_batching=micro_batching is not None and micro_batching.value,
        kv_cache_bytes=kv,
    )
    priority = _Setting("schedulingPolicy", "priority", "each request has the priority of its QoS tier")
    kv_memory = None if kv is None else _Setting("kvMemory", format_gib(kv), _KV_CACHE_REASON)
    rows: tuple[_Setting[object] | None, ...] = (
        attention_backend,
        block,
        async_scheduling,
        step_tokens,
        max_sequences,
        priority,
        all2all_backend,
        micro_batching,
        kv_memory,
        _choose_sleep_mode(request),
    )
    return settings, tuple(row.to_choice() for row in rows if row is not None)


LEFT_TO_ENGINE = "left to the engine"
_SET_IN_MANIFEST = "set in the manifest"

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
DEEPEP_BACKENDS = frozenset({"deepep_high_throughput", "deepep_low_latency"})
_LATENT_SIZES = (320, 512, 576)
_HEAD_SIZES = {
    "FLASHINFER": (64, 128, 256, 512),
    "FLASH_ATTN": tuple(range(8, 257, 8)),
    "FLASHMLA": _LATENT_SIZES,
    "CUTLASS_MLA": _LATENT_SIZES,
}
"""Head sizes that a kernel supports. An engine with a kernel for other sizes does not start."""


def _choose_attention_backend(request: LaunchRequest) -> _Setting[str | None]:
    name = "attentionBackend"
    if request.settings.attention_backend is not None:
        return _Setting(name, _BACKENDS[request.settings.attention_backend], _SET_IN_MANIFEST)
    hardware, facts = request.hardware, request.facts
    if hardware.vendor is not Vendor.NVIDIA:
        return _Setting(name, None, f"the engine chooses the kernel for {hardware.name}")
    if facts is None or not hardware.compute_capability:
        return _Setting(name, None, "model or device is not known")
    if (why := _why_no_usual_kernel(facts, hardware)) is not None:
        return _Setting(name, None, why)
    backend, why = (
        _choose_latent_backend(hardware)
        if facts.latent
        else _choose_plain_backend(hardware, request.quantization.kv_cache)
    )
    size = facts.latent_size or facts.head_size
    if size not in _HEAD_SIZES.get(backend, (size,)):
        return _Setting(name, None, f"{backend} has no kernel for {size} values a head")
    return _Setting(name, backend, why)


def _why_no_usual_kernel(facts: ModelFacts, hardware: HardwareFacts) -> str | None:
    """Why the usual kernel of this device does not suit the model; None if it does."""
    if facts.index_bytes:
        return "sparse attention needs its own kernels"
    if facts.dtype == "float32":
        return "few kernels compute in float32"
    if facts.window_layers and hardware.compute_capability < 90:
        return "before Hopper not every kernel supports this model's windows"
    return None


def _choose_latent_backend(hardware: HardwareFacts) -> tuple[str, str]:
    if hardware.compute_capability >= 100:
        return "CUTLASS_MLA", "latent attention on Blackwell: its kernel reads blocks of 128"
    if hardware.compute_capability >= 90:
        return "FLASHMLA", "latent attention on Hopper"
    return "TRITON_MLA", "latent attention before Hopper: there is no other kernel"


def _choose_plain_backend(hardware: HardwareFacts, kv: KvPrecision) -> tuple[str, str]:
    if hardware.compute_capability >= 100:
        return "FLASHINFER", "Blackwell: FlashInfer has its tensor-core kernels"
    if hardware.compute_capability >= 90:
        return "FLASH_ATTN", "Hopper: FlashAttention 3, also with FP8 KV"
    if kv is not KvPrecision.AUTO:
        return "FLASHINFER", "FP8 KV before Hopper: FlashAttention 2 cannot read it"
    return "FLASH_ATTN", "FlashAttention 2 is the fastest before Hopper"


def _choose_block_size(request: LaunchRequest) -> _Setting[int]:
    if request.settings.block_size is not None:
        return _Setting("blockSize", request.settings.block_size, _SET_IN_MANIFEST)
    latent = request.facts is not None and request.facts.latent
    if request.hardware.vendor is Vendor.CPU and latent:
        return _Setting("blockSize", _CPU_MLA_BLOCK_TOKENS, "latent attention on CPUs supports no other size")
    reason = "fewer and larger transfers; kernels with smaller blocks divide them"
    return _Setting("blockSize", BLOCK_TOKENS, reason)


def _choose_async_scheduling(request: LaunchRequest) -> _Setting[bool]:
    name = "asyncScheduling"
    if request.settings.async_scheduling is not None:
        return _Setting(name, request.settings.async_scheduling, _SET_IN_MANIFEST)
    if request.hardware.vendor is Vendor.CPU:
        return _Setting(name, False, "a CPU has nothing to overlap with")
    if request.layout.pipeline > 1:
        return _Setting(name, False, "pipeline stages keep several steps in flight already")
    return _Setting(name, True, "the next step is scheduled while the device works")


def _choose_step_tokens(request: LaunchRequest) -> _Setting[int | None]:
    name = "maxBatchedTokens"
    if request.settings.max_batched_tokens is not None:
        return _Setting(name, request.settings.max_batched_tokens, _SET_IN_MANIFEST)
    if request.hardware.vendor is Vendor.CPU:
        return _Setting(name, None, "its default for CPUs is small enough")
    minimum = max(
        _STEP_TOKENS_MIN, request.settings.max_sequences or 0
    )  # a step has a token of each running request
    if request.started_for_prefill:
        return _Setting(name, max(minimum, _PREFILL_STEP_TOKENS), "no decoding request waits for these steps")
    if request.facts is None or not request.hardware.memory_known or not request.hardware.flops:
        return _Setting(name, None, "model or device is not known")
    costs = step_costs_s(request.facts, request.hardware, request.layout)
    return _Setting(name, *_step_tokens_within_tpot(costs, request.slo.tpot_s, minimum=minimum))


def _step_tokens_within_tpot(costs: tuple[float, float], tpot_s: float, *, minimum: int) -> tuple[int, str]:
    """Largest number of tokens in a step that takes no longer than the TPOT objective; at least `minimum`."""
    fixed_s, token_s = costs
    affordable = int((tpot_s - fixed_s) / token_s) // _STEP_TOKENS_MULTIPLE * _STEP_TOKENS_MULTIPLE
    cost_text = f"a step takes {fixed_s * 1e3:.1f} ms and {token_s * 1e6:.0f} µs a prefill token"
    tpot = f"a TPOT of {tpot_s * 1e3:g} ms"
    if affordable < minimum:
        return minimum, f"{cost_text}: the smallest useful step takes longer than {tpot} allows"
    return max(minimum, min(_STEP_TOKENS_MAX, affordable)), f"{cost_text}, within {tpot}"


def _choose_max_sequences(request: LaunchRequest, fit: Fit, step_tokens: int | None) -> _Setting[int]:
    name = "maxSequences"
    if request.settings.max_sequences is not None:
        return _Setting(name, request.settings.max_sequences, _SET_IN_MANIFEST)
    if request.hardware.vendor is Vendor.CPU:
        return _Setting(name, _CPU_SEQUENCES_MAX, "more would not be faster on a CPU")
    maximum = _SEQUENCES_MAX if step_tokens is None else min(_SEQUENCES_MAX, step_tokens)
    if fit.kv_capacity_tokens is None:
        return _Setting(name, maximum, "the KV capacity is not known")
    room = fit.kv_capacity_tokens // request.layout.data // _TOKENS_PER_SEQUENCE
    if room < maximum:
        return _Setting(name, max(1, room), f"KV capacity in requests of {_TOKENS_PER_SEQUENCE:,} tokens")
    return _Setting(name, maximum, f"KV capacity for {room:,} requests of {_TOKENS_PER_SEQUENCE:,} tokens")


def _choose_kv_cache_bytes(request: LaunchRequest, *, max_sequences: int, block: int) -> int | None:
    """Size of a CPU's KV cache in bytes: what the running requests need, within bounds; None on a GPU.

    The engine shares a CPU's memory, so it must not take all of it. One request of the longest context
    always has room, even above the bounds: the engine would not start otherwise.
    """
    if request.hardware.vendor is not Vendor.CPU:
        return None
    if request.facts is None:
        return _CPU_KV_BYTES_MAX
    longest = request.longest_prompt_tokens or _CPU_KV_TOKENS
    token_bytes = kv_bytes_per_token(request.facts, request.quantization.kv_cache)
    desired_bytes = max_sequences * min(_CPU_KV_TOKENS, longest) * token_bytes
    blocks = math.ceil(longest / block) + 1  # the engine reserves one block
    return max(_CPU_KV_BYTES_MIN, min(_CPU_KV_BYTES_MAX, desired_bytes), blocks * block * token_bytes)


_KV_CACHE_REASON = "for the running requests, at least for one of the longest context"


def _choose_sleep_mode(request: LaunchRequest) -> _Setting[bool] | None:
    if not request.settings.sleep_mode:
        return None
    warning = (
        "/sleep and /wake_up come with vLLM's other development endpoints, open to anyone who reaches the pod"
    )
    return _Setting("sleepMode", True, f"set in the manifest; {warning}")


def _choose_micro_batching(
    request: LaunchRequest, all2all_backend: _Setting[str] | None
) -> _Setting[bool] | None:
    """Whether a step is split: one half computes while tokens of the other are sent to their experts."""
    name = "microBatching"
    if request.settings.micro_batching is not None:
        return _Setting(name, request.settings.micro_batching, _SET_IN_MANIFEST)
    if all2all_backend is None:
        return None
    if all2all_backend.value in DEEPEP_BACKENDS:
        return _Setting(name, True, "one half of a step computes while tokens of the other are sent")
    return _Setting(name, False, "only DeepEP's kernels overlap with computing")


def _choose_all2all_backend(request: LaunchRequest) -> _Setting[str] | None:
    """How tokens are sent to their experts; None unless data-parallel ranks share the experts."""
    layout, name = request.layout, "all2allBackend"
    if not layout.expert or layout.data == 1:
        return None
    if request.pool_role == "Flexible":
        return _Setting(name, "allgather_reducescatter", "suits both roles: the instances flip")
    if request.hardware.compute_capability < 90:
        return _Setting(name, "allgather_reducescatter", "DeepEP's kernels need Hopper")
    if request.pool_role == "Prefill":
        return _Setting(name, "deepep_high_throughput", "many tokens a step")
    return _Setting(name, "deepep_low_latency", "few tokens a step, and a client waits for each")
