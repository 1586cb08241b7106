"""What a user may say of a real engine: where the model is, how it is laid over devices, how KV moves.

Everything has a default that follows from the model and the hardware; None means that it is chosen there.
"""

from enum import StrEnum
from typing import Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from fulcrum_core.api.meta import ApiModel, cel_rule
from fulcrum_core.api.quantity import ByteQuantity
from fulcrum_core.models import KvPrecision, WeightPrecision

EngineType = Literal["Simulated", "vLLM"]

AttentionBackend = Literal[
    "FlashAttention",
    "FlashAttentionMLA",
    "FlashInfer",
    "FlashInferMLA",
    "FlashMLA",
    "CutlassMLA",
    "TritonMLA",
    "Triton",
    "FlexAttention",
    "AiterFlashAttention",
    "AiterMLA",
]


class Connector(StrEnum):
    """How KV gets from one engine to another."""

    NIXL = "NIXL"
    NIXL_WITH_LMCACHE = "NIXLWithLMCache"
    LMCACHE = "LMCache"


class ModelSourceSpec(ApiModel):
    """Where engines find the model; the hub, if neither a claim nor a path is named."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "!(has(self.pvc) && has(self.hostPath))", "has both pvc and hostPath: write one of them"
        )
    )

    revision: str | None = Field(
        default=None, min_length=1, max_length=128, description="Branch, tag or commit at the hub."
    )
    pvc: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="PersistentVolumeClaim that holds the model.",
    )
    host_path: str | None = Field(
        default=None,
        max_length=1024,
        pattern=r"^/",
        description="Folder of the node, or of this machine, that holds the model.",
    )
    path: str = Field(
        default="",
        max_length=1024,
        description="Folder of the model inside the claim or hostPath (default: its root).",
    )
    token_secret: str | None = Field(
        default=None, min_length=1, max_length=253, description="Secret whose key `token` the hub asks for."
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Name that clients use (default: spec.model).",
    )
    max_length: StrictInt | None = Field(
        default=None, ge=1, le=16_777_216, description="Longest context in tokens (default: the model's own)."
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if self.pvc and self.host_path:
            raise ValueError("has both pvc and hostPath: write one of them")
        return self


class ParallelismSpec(ApiModel):
    """How one instance is laid over its devices."""

    tensor: StrictInt | None = Field(
        default=None, ge=1, le=64, description="Devices that share each layer (default: hardware.count)."
    )
    pipeline: StrictInt = Field(
        default=1, ge=1, le=64, description="Stages that share the layers (default 1)."
    )
    data: StrictInt = Field(default=1, ge=1, le=256, description="Data-parallel ranks (default 1).")
    expert: StrictBool = Field(
        default=False,
        description="Whether each rank holds whole experts, not a slice of every one (default false).",
    )


class QuantizationSpec(ApiModel):
    """With how many bits weights and KV cache are kept."""

    weights: WeightPrecision = Field(
        default=WeightPrecision.AUTO, description="auto: as the checkpoint is; fp8; fp4 (default auto)."
    )
    kv_cache: KvPrecision = Field(
        default=KvPrecision.AUTO, description="auto: the model's data type; fp8; fp4 (default auto)."
    )


class EngineSettingsSpec(ApiModel):
    """Settings of the engine, each chosen by model, hardware and role if it is not written."""

    attention_backend: AttentionBackend | None = Field(default=None, description="Kernels of attention.")
    async_scheduling: StrictBool | None = Field(
        default=None, description="Whether a step is scheduled while the last one runs."
    )
    micro_batching: StrictBool | None = Field(
        default=None, description="Whether a step is cut in two that overlap computing and communication."
    )
    max_batched_tokens: StrictInt | None = Field(
        default=None, ge=128, le=1_048_576, description="Most tokens in a step."
    )
    max_sequences: StrictInt | None = Field(
        default=None, ge=1, le=65_536, description="Most requests that run at a time."
    )
    block_size: StrictInt | None = Field(
        default=None, ge=16, le=1024, multiple_of=16, description="Tokens in a KV block."
    )
    sleep_mode: StrictBool = Field(
        default=False,
        description="Whether the engine can give its memory back while it stands by (default false).",
    )


class KvTransferSpec(ApiModel):
    """How KV gets from prefill to decode."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "!has(self.bufferSize) || self.connector == 'LMCache'",
            "has a bufferSize, which only the connector LMCache has: NIXL reads KV where it lies",
        )
    )

    connector: Connector = Field(
        default=Connector.NIXL,
        description="NIXL: pulled from the peer's memory; NIXLWithLMCache: and kept in kvCache's tiers; "
        "LMCache: pushed, with the role fixed at start (default NIXL).",
    )
    buffer_size: ByteQuantity | None = Field(
        default=None, description="Of each rank (default: the longest prompt, rounded up to 256Mi)."
    )
    devices: str | None = Field(
        default=None,
        max_length=253,
        pattern=r"^[A-Za-z0-9_:.,-]+$",
        description="Network devices that may be used, as mlx5_0:1,mlx5_1:1 (default: all).",
    )

    @model_validator(mode="after")
    def _check_buffer_size(self) -> Self:
        if self.buffer_size is not None and self.connector is not Connector.LMCACHE:
            raise ValueError(
                "has a bufferSize, which only the connector LMCache has: NIXL reads KV where it lies"
            )
        return self


class KvCacheSpec(ApiModel):
    """Tiers below the device's memory, of each instance."""

    cpu: ByteQuantity | None = Field(default=None, description="Memory of the node for KV.")
    disk: ByteQuantity | None = Field(default=None, description="Disk of the node for KV that memory lost.")
    remote: str | None = Field(
        default=None,
        max_length=512,
        pattern=r"^(redis|valkey)://[A-Za-z0-9.-]+:[0-9]+$",
        description="A store that all instances share, as redis://kv.default.svc:6379.",
    )

    @property
    def is_empty(self) -> bool:
        """Whether it names no tier."""
        return self.cpu is None and self.disk is None and self.remote is None
