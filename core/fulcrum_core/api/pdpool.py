"""PDPool: interchangeable instances, made by the operator from a pool of a PDService.

Its spec contains the launch spec, from which the revision of the instances is computed. The operator's plan
makes pools, and people and autoscalers write `replicas`.
"""

import hashlib
import json
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fulcrum_core.api.engine import (
    EngineSettingsSpec,
    EngineType,
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
)
from fulcrum_core.api.env import EnvVar
from fulcrum_core.api.meta import EXTERNAL_INPUT, ApiModel, Condition, PrinterColumn, Resource, cel_rule
from fulcrum_core.api.pod_template import PodTemplatePatch
from fulcrum_core.api.quantity import ByteQuantity
from fulcrum_core.hardware import Fabric
from fulcrum_core.profiles import PROFILE_NAMES, UNKNOWN_PROFILE, is_profile_path
from fulcrum_core.values import Role

PoolRole = Literal["Prefill", "Decode", "Flexible"]


class Bounds(ApiModel):
    """Bounds of a pool's number of instances."""

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
        """The allowed count nearest to `replicas`."""
        return max(self.min, min(replicas, self.effective_max))


class EngineSpec(ApiModel):
    """Which engine the instances run."""

    type: EngineType = Field(
        default="vLLM",
        description="Kind of engine: vLLM, or Simulated, which computes no text (default vLLM).",
    )
    profile: str = Field(
        default="laptop",
        min_length=1,
        max_length=253,
        description="Simulated accelerator: a built-in profile, in a local run also a file (default laptop).",
        json_schema_extra={"enum": list(PROFILE_NAMES)},
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image of the engine (default: vLLM's own; for a simulated engine the "
        "operator's).",
    )
    args: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=128, description="Arguments appended to those that the operator sets."
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        description="Environment variables of the engine.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, profile: str, info: ValidationInfo) -> str:
        """Refuse unknown names in manifests. Stored objects may have names of another version."""
        known = profile in PROFILE_NAMES or is_profile_path(profile)
        if info.context == EXTERNAL_INPUT and not known:
            raise ValueError(UNKNOWN_PROFILE)
        return profile

    @model_validator(mode="after")
    def _check_unique_names(self) -> Self:
        names = [pair.name for pair in self.env]
        if len(set(names)) < len(names):
            raise ValueError("names an environment variable twice")
        return self

    @property
    def is_simulated(self) -> bool:
        """Whether the instances run the simulated engine, which loads no model and needs no accelerator."""
        return self.type == "Simulated"


class HardwareSpec(ApiModel):
    """Devices that one instance requests."""

    resource: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="Extended resource of the node, such as nvidia.com/gpu; or cpu.",
    )
    count: StrictInt = Field(default=1, ge=1, le=1024, description="Devices for each instance (default 1).")
    type: str = Field(
        default="",
        max_length=63,
        description="Type of the device, such as H100-SXM, or its name in node labels (default: unknown).",
    )
    memory: ByteQuantity | None = Field(
        default=None, description="Memory of one device (default: that of the type, if known)."
    )
    fabric: Fabric | None = Field(
        default=None,
        description="Network between instances (default: chosen by the engine's transport).",
    )


class InstanceShapeSpec(ApiModel):
    """Settings that may differ between pools."""

    hardware: HardwareSpec | None = Field(
        default=None, description="Devices that each instance requests (default: none)."
    )
    parallelism: ParallelismSpec | None = Field(
        default=None,
        description="How an instance is split over its devices (default: tensor-parallel over all).",
    )
    quantization: QuantizationSpec | None = Field(
        default=None, description="Precision of weights and KV cache (default: the checkpoint's)."
    )
    settings: EngineSettingsSpec | None = Field(
        default=None, description="Engine settings (default: chosen from model, hardware and role)."
    )
    template: PodTemplatePatch | None = Field(
        default=None, description="Strategic merge patch of each instance's pod (default: the service's)."
    )


class LaunchSpec(InstanceShapeSpec):
    """Everything that an engine is launched with except its role. Its hash is the revision."""

    model: str = Field(max_length=253, description="Model to serve.")
    engine: EngineSpec = Field(description="Engine to run.")
    model_source: ModelSourceSpec | None = Field(
        default=None, description="Where the engine finds the model (default: at the hub)."
    )
    kv_transfer: KvTransferSpec | None = Field(
        default=None, description="How KV is transferred from prefill to decode instances (default: NIXL)."
    )
    kv_cache: KvCacheSpec | None = Field(
        default=None, description="Tiers that keep KV outside the device's memory (default: none)."
    )
    role_fixed_at_start: StrictBool = Field(
        default=False,
        description="Whether the engine takes its role only at start, so that a flip restarts it.",
    )
    default_image: str | None = Field(
        default=None,
        max_length=512,
        description="Image that the operator chose because engine.image is not set; kept until a roll-out.",
    )

    @property
    def is_on_cpu(self) -> bool:
        """Whether the instances request no accelerator but CPUs."""
        return self.hardware is not None and self.hardware.resource == "cpu"

    @property
    def launch_spec(self) -> "LaunchSpec":
        """The launch spec alone, without the fields of a subclass."""
        return LaunchSpec.model_construct(**{name: getattr(self, name) for name in LaunchSpec.model_fields})

    @property
    def launch_revision(self) -> str:
        """Short hash of the launch spec. Defaults are not hashed, so a new field changes no revision.

        `engine.type` is hashed as if its default were still `Simulated`, as it was at first: an upgrade of
        the operator must not replace the instances of every pool.
        """
        content = self.launch_spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        engine = content["engine"]
        engine["type"] = self.engine.type
        if self.engine.type == "Simulated":
            del engine["type"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


class PDPoolSpec(LaunchSpec):
    """Desired state of a pool."""

    service: str = Field(max_length=253, description="PDService of the pool.")
    role: PoolRole = Field(description="Prefill or Decode: fixed; Flexible: instances flip.")
    replicas: StrictInt = Field(
        ge=0, le=1024, description="Desired instances, limited to the bounds in `instances`."
    )
    instances: Bounds = Field(description="Bounds of `replicas`. They apply to every writer.")


class RefusedRevision(ApiModel):
    """Revision whose instances did not become ready; not retried until the spec changes."""

    revision: str = Field(description="The revision.")
    reason: str = Field(max_length=1024, description="Why its instances did not become ready.")


class PDPoolStatus(ApiModel):
    """Observed state of a pool."""

    replicas: int = Field(default=0, description="Instances that exist.")
    ready_replicas: int = Field(default=0, description="Instances that serve.")
    selector: str = Field(default="", description="Label selector of the pool's instances.")
    revision: str = Field(default="", description="Desired revision of the instances.")
    updated_replicas: int = Field(default=0, description="Instances of the desired revision.")
    last_good: LaunchSpec | None = Field(
        default=None, description="Launch spec with which all instances were last ready."
    )
    refused: RefusedRevision | None = Field(
        default=None, description="Revision that was rolled back to the last good one."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="ScalingLimited: the bounds or the floors limit replicas.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    observed_generation: int = Field(
        default=0, description="Generation of the spec that this status describes."
    )


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
    spec: PDPoolSpec = Field(description="Desired state of the pool.")
    status: PDPoolStatus = Field(default_factory=PDPoolStatus, description="Observed state of the pool.")


def fixed_role(role: PoolRole) -> Role | None:
    """The fixed role of a pool's instances; None for a flexible pool."""
    return None if role == "Flexible" else Role(role)
