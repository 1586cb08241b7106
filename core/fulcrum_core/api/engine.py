"""Settings of a real engine: source of the model, parallelism, precision, KV transfer and KV cache.

Unset fields (None) are chosen from the model and the hardware by the operator's `engines` package.
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
    """Software that moves KV from one engine to another."""

    NIXL = "NIXL"
    NIXL_WITH_LMCACHE = "NIXLWithLMCache"
    LMCACHE = "LMCache"


_ONE_DOWNLOAD_FOLDER = "needs either pvc or hostPath"
_ONE_SOURCE = "has more than one of pvc, hostPath, image and downloads: write one of them"


class DownloadsSpec(ApiModel):
    """Where engines keep the model that they download: the first one downloads each file, the others wait."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule("has(self.pvc) != has(self.hostPath)", _ONE_DOWNLOAD_FOLDER)
    )

    pvc: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="PersistentVolumeClaim, for one download in total; engines on several nodes need the "
        "access mode ReadWriteMany.",
    )
    host_path: str | None = Field(
        default=None,
        max_length=1024,
        pattern=r"^/",
        description="Folder on each node, for one download on each node. It must exist, and user 65532 must "
        "be able to write to it.",
    )

    @model_validator(mode="after")
    def _check_one_folder(self) -> Self:
        if (self.pvc is None) == (self.host_path is None):
            raise ValueError(_ONE_DOWNLOAD_FOLDER)
        return self


class ModelSourceSpec(ApiModel):
    """Where engines find the model: the hub, unless pvc, hostPath or image is set."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "[has(self.pvc), has(self.hostPath), has(self.image), has(self.downloads)]"
            ".filter(given, given).size() <= 1",
            _ONE_SOURCE,
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
        description="Folder that holds the model, on the node or on this machine.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="OCI image or artifact that holds the model, with its registry and a digest or tag. The "
        "container runtime pulls it once for each node. Needs image volumes: Kubernetes 1.35, or the feature "
        "gate ImageVolume.",
    )
    path: str = Field(
        default="",
        max_length=1024,
        description="Folder of the model inside the claim, hostPath or image (default: its root).",
    )
    downloads: DownloadsSpec | None = Field(
        default=None,
        description="Folder for downloads from the hub that engines share (default: each engine downloads "
        "the model into its pod).",
    )
    token_secret: str | None = Field(
        default=None, min_length=1, max_length=253, description="Secret with the hub's access token."
    )
    token_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        description="Key of the access token in tokenSecret (default: token).",
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
        given = (self.pvc, self.host_path, self.image, self.downloads)
        if sum(source is not None for source in given) > 1:
            raise ValueError(_ONE_SOURCE)
        return self

    @property
    def is_at_hub(self) -> bool:
        """Whether engines download the model."""
        return self.pvc is None and self.host_path is None and self.image is None


class ParallelismSpec(ApiModel):
    """How one instance is split over its devices."""

    tensor: StrictInt | None = Field(
        default=None, ge=1, le=64, description="Devices that share each layer (default: hardware.count)."
    )
    pipeline: StrictInt = Field(
        default=1, ge=1, le=64, description="Stages that share the layers (default 1)."
    )
    data: StrictInt = Field(default=1, ge=1, le=256, description="Data-parallel ranks (default 1).")
    expert: StrictBool = Field(
        default=False,
        description="Whether each rank holds whole experts instead of a slice of each (default false).",
    )


class QuantizationSpec(ApiModel):
    """Precision of weights and KV cache."""

    weights: WeightPrecision = Field(
        default=WeightPrecision.AUTO,
        description="Precision of the weights: auto (that of the checkpoint), fp8 or fp4 (default auto).",
    )
    kv_cache: KvPrecision = Field(
        default=KvPrecision.AUTO,
        description="Precision of the KV cache: auto (the model's data type), fp8 or fp4 (default auto).",
    )


class EngineSettingsSpec(ApiModel):
    """Engine settings; unset ones are chosen from model, hardware and role."""

    attention_backend: AttentionBackend | None = Field(default=None, description="Attention back end.")
    async_scheduling: StrictBool | None = Field(
        default=None, description="Whether the next step is scheduled while the current one runs."
    )
    micro_batching: StrictBool | None = Field(
        default=None, description="Whether a step is split in two, to overlap computation and communication."
    )
    max_batched_tokens: StrictInt | None = Field(
        default=None, ge=128, le=1_048_576, description="Most tokens in a step."
    )
    max_sequences: StrictInt | None = Field(
        default=None, ge=1, le=65_536, description="Most requests that run at the same time."
    )
    block_size: StrictInt | None = Field(
        default=None, ge=16, le=1024, multiple_of=16, description="Tokens in a KV block."
    )
    sleep_mode: StrictBool = Field(
        default=False,
        description="Whether the engine can release its memory while it is idle (default false).",
    )


class KvTransferSpec(ApiModel):
    """How KV is transferred from prefill to decode instances."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "!has(self.bufferSize) || self.connector == 'LMCache'",
            "has a bufferSize, which only the connector LMCache has: "
            "NIXL reads the engine's KV cache directly",
        )
    )

    connector: Connector = Field(
        default=Connector.NIXL,
        description="NIXL: the decode instance reads KV from the prefill instance's memory. NIXLWithLMCache: "
        "the same, and KV is also kept in the tiers of kvCache. LMCache: the prefill instance sends KV, and "
        "roles are fixed at start (default NIXL).",
    )
    buffer_size: ByteQuantity | None = Field(
        default=None,
        description="Transfer buffer of each rank (default: the longest prompt's KV, rounded up to 256Mi).",
    )
    devices: str | None = Field(
        default=None,
        max_length=253,
        pattern=r"^[A-Za-z0-9_:.,-]+$",
        description="Network devices for the transfer, such as mlx5_0:1,mlx5_1:1 (default: all).",
    )

    @model_validator(mode="after")
    def _check_buffer_size(self) -> Self:
        if self.buffer_size is not None and self.connector is not Connector.LMCACHE:
            raise ValueError(
                "has a bufferSize, which only the connector LMCache has: "
                "NIXL reads the engine's KV cache directly"
            )
        return self


class KvCacheSpec(ApiModel):
    """Tiers of each instance that keep KV outside the device's memory."""

    cpu: ByteQuantity | None = Field(default=None, description="Memory of the node for KV (default: none).")
    disk: ByteQuantity | None = Field(
        default=None, description="Disk of the node for KV evicted from memory (default: none)."
    )
    remote: str | None = Field(
        default=None,
        max_length=512,
        pattern=r"^(rediss?|valkey)://[A-Za-z0-9.-]+:[0-9]+$",
        description="Address of a store for KV that all instances share, such as redis://kv.default.svc:6379 "
        "(rediss:// for TLS, with the connector LMCache; default: none).",
    )

    @property
    def is_empty(self) -> bool:
        """Whether no tier is set."""
        return self.cpu is None and self.disk is None and self.remote is None
