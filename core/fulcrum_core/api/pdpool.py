"""PDPool: interchangeable instances, made by the operator from a pool of a PDService."""

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from fulcrum_core.api.engine import (
    EngineSettingsSpec,
    EngineType,
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
)
from fulcrum_core.api.meta import ApiModel, Condition, PrinterColumn, Resource, cel_rule
from fulcrum_core.api.quantity import ByteQuantity
from fulcrum_core.hardware import Fabric
from fulcrum_core.values import Role

PoolRole = Literal["Prefill", "Decode", "Flexible"]


class Bounds(ApiModel):
    """How many instances a pool may have."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule("!has(self.max) || self.min <= self.max", "min is greater than max")
    )

    min: StrictInt = Field(ge=1, le=1024, description="Fewest instances; a new pool starts with this many.")
    max: StrictInt | None = Field(default=None, ge=1, le=1024, description="Most instances (default: min).")

    @model_validator(mode="before")
    @classmethod
    def _refuse_plain_number(cls, raw: object) -> object:
        if isinstance(raw, int) and not isinstance(raw, bool):
            raise ValueError(f"is {{min, max}}: write {{min: {raw}}}")
        return raw

    @model_validator(mode="after")
    def _check_min_not_above_max(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is greater than max ({self.max})")
        return self

    @property
    def effective_max(self) -> int:
        """Most instances."""
        return self.min if self.max is None else self.max

    def clamp(self, replicas: int) -> int:
        """The nearest allowed count."""
        return max(self.min, min(replicas, self.effective_max))


class EnvVar(ApiModel):
    """One environment variable."""

    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$",
        description="Name of the variable.",
    )
    value: str = Field(default="", max_length=4096, description="Its value (default empty).")


class EngineSpec(ApiModel):
    """Which engine the instances run."""

    type: EngineType = Field(
        default="Simulated", description="Kind of engine: Simulated or vLLM (default Simulated)."
    )
    profile: str = Field(
        default="laptop",
        min_length=1,
        max_length=253,
        description="Simulated accelerator: name of a built-in profile, or a file (default laptop).",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image of the engine (default: vLLM's own; of a simulated one the operator's).",
    )
    args: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=128, description="Arguments after those that the operator writes."
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        description="Environment variables of the engine.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    @model_validator(mode="after")
    def _check_unique_names(self) -> Self:
        names = [pair.name for pair in self.env]
        if len(set(names)) < len(names):
            raise ValueError("names an environment variable twice")
        return self


class HardwareSpec(ApiModel):
    """What an instance asks of its node."""

    resource: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="Name of a resource of nodes, as nvidia.com/gpu.",
    )
    count: StrictInt = Field(default=1, ge=1, le=1024, description="How many of it (default 1).")
    type: str = Field(
        default="",
        max_length=63,
        description="The device, as H100-SXM, or as its nodes are labelled (default: not known).",
    )
    memory: ByteQuantity | None = Field(
        default=None, description="Memory of one device (default: as known of the type)."
    )
    fabric: Fabric | None = Field(
        default=None, description="What carries KV between instances (default: what is found)."
    )


PodTemplatePatch = Annotated[
    dict[str, Any],
    Field(
        description="Laid over the pod of each instance, as a strategic merge patch.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    ),
]


class InstanceShapeSpec(ApiModel):
    """What one pool's instances are that another's need not be."""

    hardware: HardwareSpec | None = Field(
        default=None, description="What an instance asks of its node (default: nothing)."
    )
    parallelism: ParallelismSpec | None = Field(
        default=None, description="How an instance is laid over its devices (default: all share each layer)."
    )
    quantization: QuantizationSpec | None = Field(
        default=None, description="Bits of weights and KV cache (default: the checkpoint's)."
    )
    settings: EngineSettingsSpec | None = Field(
        default=None, description="Settings of the engine (default: by model, hardware and role)."
    )
    template: PodTemplatePatch | None = None


class LaunchSpec(InstanceShapeSpec):
    """What an instance is started with, but for its role. Its hash is the instance's revision."""

    model: str = Field(max_length=253, description="The model that it serves.")
    engine: EngineSpec = Field(description="The engine that it runs.")
    model_source: ModelSourceSpec | None = Field(
        default=None, description="Where the model is (default: at the hub)."
    )
    kv_transfer: KvTransferSpec | None = Field(
        default=None, description="How KV gets from prefill to decode (default: NIXL)."
    )
    kv_cache: KvCacheSpec | None = Field(
        default=None, description="Tiers of KV below the device's memory (default: none)."
    )
    role_fixed_at_start: StrictBool = Field(
        default=False,
        description="Whether the role is a start-up option of the engine, so that a flip restarts it.",
    )

    @property
    def launch_spec(self) -> "LaunchSpec":
        """Only what it is started with."""
        return LaunchSpec.model_construct(**{name: getattr(self, name) for name in LaunchSpec.model_fields})

    @property
    def launch_revision(self) -> str:
        """Short hash of what it is started with. A field that a later version adds leaves it as it is."""
        content = self.launch_spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


class PDPoolSpec(LaunchSpec):
    """What the operator asks of a pool."""

    service: str = Field(max_length=253, description="The PDService this pool belongs to.")
    role: PoolRole = Field(description="Prefill or Decode for ever, or Flexible: instances flip.")
    replicas: StrictInt = Field(ge=0, le=1024, description="Instances wanted; clamped to `instances`.")
    instances: Bounds = Field(description="Bounds that clamp every writer of `replicas`.")


class RefusedRevision(ApiModel):
    """A revision that did not come to serve. It is not tried again until the spec changes."""

    revision: str = Field(description="Which.")
    reason: str = Field(max_length=1024, description="What became of it.")


class PDPoolStatus(ApiModel):
    """What is seen of a pool."""

    replicas: int = Field(default=0, description="Instances that exist.")
    ready_replicas: int = Field(default=0, description="Instances that serve.")
    selector: str = Field(default="", description="Label selector of the pool's instances.")
    revision: str = Field(default="", description="The revision that instances shall have.")
    updated_replicas: int = Field(default=0, description="Instances that have it.")
    last_good: LaunchSpec | None = Field(
        default=None, description="What all instances were last started with and served."
    )
    refused: RefusedRevision | None = Field(
        default=None, description="The revision that was given up for the last good one."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="ScalingLimited: a wish was clamped.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    observed_generation: int = Field(default=0, description="Generation of the spec this status speaks of.")


class PDPool(Resource):
    """Interchangeable instances of one service: same model, engine and role rule."""

    plural: ClassVar[str] = "pdpools"
    short_name: ClassVar[str] = "pdp"
    immutable_fields: ClassVar[tuple[str, ...]] = ("service",)
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Service", type="string", json_path=".spec.service"),
        PrinterColumn(name="Role", type="string", json_path=".spec.role"),
        PrinterColumn(name="Desired", type="integer", json_path=".spec.replicas"),
        PrinterColumn(name="Ready", type="integer", json_path=".status.readyReplicas"),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["PDPool"] = "PDPool"
    spec: PDPoolSpec = Field(description="What the operator asks of the pool.")
    status: PDPoolStatus = Field(default_factory=PDPoolStatus, description="What is seen of the pool.")


def fixed_role(role: PoolRole) -> Role | None:
    """The role that a pool's instances can never leave; None for a flexible pool."""
    return None if role == "Flexible" else Role(role)
