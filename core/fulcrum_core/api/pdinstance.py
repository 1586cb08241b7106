"""PDInstance: one engine replica. Its status holds facts only; wishes stand in the PDAssignment."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fulcrum_core.api.meta import ApiModel, Duration, PrinterColumn, Resource, Time
from fulcrum_core.api.pdassignment import AssignedRole
from fulcrum_core.api.pdpool import LaunchSpec
from fulcrum_core.values import KV_LEASE_S, EngineIdentity, FlipStrategy, Phase, Role

DRAINED = "Drained"
"""Reason of an instance that is cordoned, or about to stop, and has no request left."""


ConfigExcerpt = Annotated[
    dict[str, Any],
    Field(
        description="The part of the model's config.json that sizes and settings follow from.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    ),
]


class PDInstanceSpec(LaunchSpec):
    """What this instance runs."""

    service: str = Field(max_length=253, description="The PDService it belongs to.")
    pool: str = Field(max_length=253, description="The PDPool it belongs to.")
    revision: str = Field(
        default="", max_length=63, description="Hash of what it is started with, but for its role."
    )
    role: AssignedRole | None = Field(
        default=None, description="The role that its engine is started for, where that is a start-up option."
    )
    config_excerpt: ConfigExcerpt | None = None


class EngineIdentitySpec(ApiModel):
    """What an engine is to those that it exchanges KV blocks with; all but lease and wire must agree."""

    model: str = Field(description="Model, spelled as on the engine's command line.")
    engine: str = Field(description="Engine and its version.")
    kv_dtype: str = Field(description="Data type of the KV cache.")
    block_size: int = Field(description="Tokens in a KV block.")
    tensor_parallel: int = Field(description="Tensor-parallel size.")
    pipeline_parallel: int = Field(default=1, description="Pipeline stages.")
    revision: str = Field(default="", description="Revision of the model.")
    dtype: str = Field(default="", description="Data type that it computes in.")
    attention: str = Field(default="", description="Attention back end, which lays KV out.")
    connector: str = Field(default="", description="How KV is handed over.")
    latent: bool = Field(default=False, description="Whether KV is one latent vector a token.")
    kv_heads: int = Field(default=0, description="KV heads of the model; 0: not known.")
    kv_lease: Duration = Field(
        default=KV_LEASE_S, description="For how long it keeps the KV of a hand-off that nobody fetches."
    )
    kv_transfer_time_per_1k_tokens: Duration = Field(
        default=0.0,
        description="Longest that the declared fabric takes for the KV of 1,000 tokens; 0: not known.",
    )

    def to_identity(self) -> EngineIdentity:
        """The value that `can_transfer` compares."""
        plain = self.model_dump(exclude={"kv_lease", "kv_transfer_time_per_1k_tokens"})
        return EngineIdentity(
            **plain, kv_lease_s=self.kv_lease, kv_transfer_s_per_1k_tokens=self.kv_transfer_time_per_1k_tokens
        )


class PDInstanceStatus(ApiModel):
    """What is seen of the instance."""

    phase: Phase = Field(default=Phase.PENDING, description="Where it stands in its life.")
    phase_since: Time | None = Field(default=None, description="When it entered the phase.")
    role: Role | None = Field(
        default=None, description="Effective role: Prefill, Decode, or Both where it serves alone."
    )
    endpoint: str | None = Field(default=None, description="host:port of its HTTP API.")
    identity: EngineIdentitySpec | None = Field(
        default=None, description="What must agree between engines that exchange KV."
    )
    flip_strategy: FlipStrategy | None = Field(
        default=None, description="How it flips, as probed at its start."
    )
    restarts: int = Field(default=0, description="How often its engine was started again.")
    kv_verified_at: Time | None = Field(
        default=None, description="When it was first seen to exchange KV, in this life of its engine."
    )
    reason: str = Field(
        default="",
        max_length=64,
        description="Why it is in this phase, for programs: Drained, or why its engine cannot start "
        "(ImagePullFailed, Unschedulable, EngineStartFailed); empty otherwise.",
    )
    message: str = Field(default="", description="Why it is in this phase, for people.")


class PDInstance(Resource):
    """One engine replica of a service."""

    plural: ClassVar[str] = "pdinstances"
    short_name: ClassVar[str] = "pdi"
    immutable_fields: ClassVar[tuple[str, ...]] = ("service", "pool")
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Service", type="string", json_path=".spec.service"),
        PrinterColumn(name="Role", type="string", json_path=".status.role"),
        PrinterColumn(name="Phase", type="string", json_path=".status.phase"),
        PrinterColumn(name="Endpoint", type="string", json_path=".status.endpoint"),
        PrinterColumn(name="Restarts", type="integer", json_path=".status.restarts"),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["PDInstance"] = "PDInstance"
    spec: PDInstanceSpec = Field(description="What it runs.")
    status: PDInstanceStatus = Field(default_factory=PDInstanceStatus, description="What is seen of it.")

    @property
    def is_serving(self) -> bool:
        """Whether the instance is ready and stays: phase Serving, and its deletion was not requested.

        Floors, replica counts and conditions count these instances. The operator also requires a running
        engine (`Observed`). A router requires `phase_takes_work` and successful probes
        (`InstanceState.serving`).
        """
        return self.status.phase is Phase.SERVING and self.metadata.deletion_timestamp is None

    @property
    def phase_takes_work(self) -> bool:
        """Whether a router may send new requests: phase Serving, or Verifying after a flip without restart.

        An instance whose deletion was requested still takes work until the operator drains it.
        """
        relabelled = (
            self.status.phase is Phase.VERIFYING and self.status.flip_strategy is FlipStrategy.RELABEL
        )
        return self.status.phase is Phase.SERVING or relabelled
