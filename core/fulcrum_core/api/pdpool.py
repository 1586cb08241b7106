"""PDPool: interchangeable instances, made by the operator from a pool of a PDService."""

from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StrictInt, model_validator

from fulcrum_core.api.meta import Condition, Model, Printer, Resource, between_fields
from fulcrum_core.values import Role

PoolRole = Literal["Prefill", "Decode", "Flexible"]


class Bounds(Model):
    """How many instances a pool may have."""

    model_config = ConfigDict(
        json_schema_extra=between_fields("!has(self.max) || self.min <= self.max", "min is greater than max")
    )

    min: StrictInt = Field(ge=1, le=1024, description="Fewest instances; a new pool starts with this many.")
    max: StrictInt | None = Field(default=None, ge=1, le=1024, description="Most instances (default: min).")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is greater than max ({self.max})")
        return self

    @property
    def ceiling(self) -> int:
        """Most instances."""
        return self.min if self.max is None else self.max

    def clamp(self, replicas: int) -> int:
        """The nearest allowed count."""
        return max(self.min, min(replicas, self.ceiling))


class EngineSpec(Model):
    """Which engine the instances run."""

    type: Literal["Simulated"] = Field(default="Simulated", description="Kind of engine (default Simulated).")
    profile: str = Field(
        default="laptop",
        min_length=1,
        max_length=253,
        description="Simulated accelerator: name of a built-in profile, or a file (default laptop).",
    )


class PDPoolSpec(Model):
    """What the operator asks of a pool."""

    service: str = Field(max_length=253, description="The PDService this pool belongs to.")
    model: str = Field(max_length=253, description="The model that every instance serves.")
    engine: EngineSpec = Field(description="The engine that every instance runs.")
    role: PoolRole = Field(description="Prefill or Decode for ever, or Flexible: instances flip.")
    replicas: StrictInt = Field(ge=0, le=1024, description="Instances wanted; clamped to `instances`.")
    instances: Bounds = Field(description="Bounds that clamp every writer of `replicas`.")


class PDPoolStatus(Model):
    """What is seen of a pool."""

    replicas: int = Field(default=0, description="Instances that exist.")
    ready_replicas: int = Field(default=0, description="Instances that serve.")
    selector: str = Field(default="", description="Label selector of the pool's instances.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="ScalingLimited: a wish was clamped.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    observed_generation: int = Field(default=0, description="Generation of the spec this status speaks of.")


class PDPool(Resource):
    """Interchangeable instances of one service: same model, engine and role rule."""

    plural: ClassVar[str] = "pdpools"
    short: ClassVar[str] = "pdp"
    printers: ClassVar[tuple[Printer, ...]] = (
        Printer(name="Service", type="string", json_path=".spec.service"),
        Printer(name="Role", type="string", json_path=".spec.role"),
        Printer(name="Desired", type="integer", json_path=".spec.replicas"),
        Printer(name="Ready", type="integer", json_path=".status.readyReplicas"),
        Printer(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["PDPool"] = "PDPool"
    spec: PDPoolSpec = Field(description="What the operator asks of the pool.")
    status: PDPoolStatus = Field(default_factory=PDPoolStatus, description="What is seen of the pool.")


def fixed_role(role: PoolRole) -> Role | None:
    """The role that a pool's instances can never leave; None for a flexible pool."""
    return None if role == "Flexible" else Role(role)
