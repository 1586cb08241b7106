"""Whether a model fits the hardware it is to run on, and how much KV cache is left.

`fulcrum plan`, the vLLM adapter and the condition ModelFits ask. It is an estimate: an engine that serves is
right.
"""

from dataclasses import dataclass
from typing import Literal

from fulcrum_core.formatting import format_count
from fulcrum_core.hardware import HardwareFacts, Vendor
from fulcrum_core.models.facts import KvPrecision, ModelFacts, WeightPrecision
from fulcrum_core.models.sizes import GIB, rank_kv_bytes_per_token, rank_weight_bytes

MODEL_UNKNOWN = "ModelUnknown"
"""The model's config.json could not be read."""
HARDWARE_UNKNOWN = "HardwareUnknown"
"""The devices of the instance, or their memory, are not known."""
FITS = "Fits"
"""The weights and the KV cache of one request of the longest context fit."""
WEIGHTS_TOO_LARGE = "WeightsTooLarge"
"""The weights alone exceed the memory of the devices."""
CONTEXT_TOO_LONG = "ContextTooLong"
"""The KV cache has no room for one request of the longest context, or the model has no such context."""
DEVICES_DO_NOT_MATCH = "DevicesDoNotMatch"
"""The parallelism needs another number of devices than the instance has."""
HEADS_DO_NOT_DIVIDE = "HeadsDoNotDivide"
"""The attention heads or KV heads do not divide over the ranks of tensor parallelism."""
LAYERS_DO_NOT_DIVIDE = "LayersDoNotDivide"
"""The model has fewer layers than pipeline stages."""
NO_EXPERTS = "NoExperts"
"""Expert parallelism is set for a model without experts."""
GPU_UTILIZATION = 0.9
"""The share of a device's memory that the engine may take."""
_RESERVE_SHARE = 0.07
_RESERVE_MIN_BYTES = 2 * GIB
"""Activations, graphs and the libraries themselves: 5.5 GiB were seen on 80 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one instance is split over its devices.

    `max_tokens` is the longest context that is served; None: the model's own. `devices` is the number of
    devices of the instance; None: unknown. `buffer_bytes` of each device go to a transfer buffer.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    weights: WeightPrecision = WeightPrecision.AUTO
    kv: KvPrecision = KvPrecision.AUTO
    max_tokens: int | None = None
    devices: int | None = None
    buffer_bytes: int = 0

    @property
    def devices_needed(self) -> int:
        """The devices that it takes."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of the check, with its numbers; None where a number is unknown."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    device_weight_bytes: int | None = None
    kv_capacity_tokens: int | None = None


def check_fit(facts: ModelFacts | None, hardware: HardwareFacts, layout: Layout) -> Fit:
    """Check whether an instance has room for the model and one request of the longest context.

    Unknown if the model or the device's memory is unknown and the layout alone rules nothing out.
    """
    refusal = _refuse_layout(facts, layout)
    if refusal is not None:
        return refusal
    if facts is None:
        return Fit(status="Unknown", reason=MODEL_UNKNOWN, message="the model's config.json was not read")
    weights = rank_weight_bytes(
        facts,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        weights=layout.weights,
    )
    if not hardware.memory_known:
        message = (
            f"the memory of {hardware.name} is not known, hardware.memory would say it; "
            f"{format_gib(weights)} of weights go to each device"
        )
        return Fit(
            status="Unknown",
            reason=HARDWARE_UNKNOWN,
            message=message,
            device_weight_bytes=round(weights),
        )
    return _memory_fit(facts, hardware, layout, weights)


def format_gib(size: float) -> str:
    """Format a size for people: `61.2 GiB`, small sizes in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def usable_bytes(hardware: HardwareFacts) -> float:
    """Memory of one device for weights and KV cache."""
    share = 1.0 if hardware.vendor is Vendor.CPU else GPU_UTILIZATION
    reserve = max(_RESERVE_MIN_BYTES, _RESERVE_SHARE * hardware.memory_bytes)
    return max(0.0, hardware.memory_bytes * share - reserve)


def _memory_fit(facts: ModelFacts, hardware: HardwareFacts, layout: Layout, weights: float) -> Fit:
    usable = max(0.0, usable_bytes(hardware) - layout.buffer_bytes)
    if weights >= usable:
        message = (
            f"{format_gib(weights)} of weights a device do not fit the {format_gib(usable)} that "
            f"{hardware.name} has for "
            f"weights and KV cache; {_suggest_tensor_parallel(weights, usable, layout)}"
        )
        return Fit(
            status="False", reason=WEIGHTS_TOO_LARGE, message=message, device_weight_bytes=round(weights)
        )
    per_token = rank_kv_bytes_per_token(facts, tensor=layout.tensor, pipeline=layout.pipeline, kv=layout.kv)
    rank_tokens = int((usable - weights) / per_token)
    request_tokens = layout.max_tokens or facts.context_tokens
    numbers = (
        f"{format_gib(weights)} of weights and {format_gib(usable - weights)} of KV cache a device, "
        f"{layout.data * rank_tokens:,} tokens"
    )
    fits = rank_tokens >= request_tokens
    many = f"{layout.data * rank_tokens / request_tokens:.1f} requests of {request_tokens:,} tokens"
    none = f"one request of {request_tokens:,} tokens does not fit; maxLength {rank_tokens:,} would"
    return Fit(
        status="True" if fits else "False",
        reason=FITS if fits else CONTEXT_TOO_LONG,
        message=f"{numbers}: {many if fits else none}",
        device_weight_bytes=round(weights),
        kv_capacity_tokens=layout.data * rank_tokens,
    )


def _suggest_tensor_parallel(weights: float, usable: float, layout: Layout) -> str:
    """Suggest a tensor-parallel size that leaves room, in powers of two, because heads divide evenly."""
    if not usable:
        return "no memory is left for them"
    tensor = layout.tensor
    while weights * layout.tensor / tensor >= usable:
        tensor *= 2
    return f"tensor {tensor} would leave room"


def _refuse_layout(facts: ModelFacts | None, layout: Layout) -> Fit | None:
    """Why the layout cannot work whatever the memory; None if it can."""
    if layout.devices is not None and layout.devices != layout.devices_needed:
        message = (
            f"tensor {layout.tensor} × pipeline {layout.pipeline} × data {layout.data} takes "
            f"{format_count(layout.devices_needed, 'device')}, the hardware has {layout.devices}"
        )
        return Fit(status="False", reason=DEVICES_DO_NOT_MATCH, message=message)
    if facts is None:
        return None
    if facts.attention_heads % layout.tensor:
        message = f"{facts.attention_heads} attention heads do not divide over {layout.tensor} ranks"
        return Fit(status="False", reason=HEADS_DO_NOT_DIVIDE, message=message)
    if not facts.latent and facts.kv_heads % layout.tensor and layout.tensor % facts.kv_heads:
        message = f"{facts.kv_heads} KV heads and {layout.tensor} ranks: neither divides the other"
        return Fit(status="False", reason=HEADS_DO_NOT_DIVIDE, message=message)
    if layout.pipeline > facts.layers:
        message = f"{facts.layers} layers do not divide over {layout.pipeline} pipeline stages"
        return Fit(status="False", reason=LAYERS_DO_NOT_DIVIDE, message=message)
    if layout.expert and not facts.is_moe:
        message = "expert parallelism needs a model with experts"
        return Fit(status="False", reason=NO_EXPERTS, message=message)
    longest = layout.max_tokens
    if longest and longest > facts.context_tokens:
        message = f"maxLength {longest:,} is beyond the model's context of {facts.context_tokens:,} tokens"
        return Fit(status="False", reason=CONTEXT_TOO_LONG, message=message)
    return None
