"""PDInstance: one engine of a service. Its status is observed; its desired role is in the PDAssignment.

The operator writes it; users only read it.
"""

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
        description="Part of the model's config.json from which sizes and settings are computed.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    ),
]


class PDInstanceSpec(LaunchSpec):
    """What the instance runs."""

    service: str = Field(max_length=253, description="PDService of the instance.")
    pool: str = Field(max_length=253, description="PDPool of the instance.")
    revision: str = Field(
        default="",
        max_length=63,
        description="Hash of the launch spec: everything that the engine is launched with, except its role.",
    )
    role: AssignedRole | None = Field(
        default=None, description="Role that the engine is started with, if it takes its role only at start."
    )
    config_excerpt: ConfigExcerpt | None = None


class EngineIdentitySpec(ApiModel):
    """Identity of an engine. Engines can exchange KV if all fields but kvLease and
    kvTransferTimePer1KTokens agree."""

    model: str = Field(description="Model, spelled as on the engine's command line.")
    engine: str = Field(description="Engine and its version.")
    kv_dtype: str = Field(description="Data type of the KV cache.")
    block_size: int = Field(description="Tokens in a KV block.")
    tensor_parallel: int = Field(description="Tensor-parallel size.")
    pipeline_parallel: int = Field(default=1, description="Pipeline stages.")
    revision: str = Field(default="", description="Revision of the model.")
    dtype: str = Field(default="", description="Data type of the computation.")
    attention: str = Field(default="", description="Attention back end, which decides the layout of KV.")
    connector: str = Field(default="", description="Connector that transfers KV.")
    latent: bool = Field(default=False, description="Whether KV is one latent vector per token, as in MLA.")
    kv_heads: int = Field(default=0, description="KV heads of the model; 0: unknown.")
    kv_lease: Duration = Field(
        default=KV_LEASE_S, description="How long the engine keeps KV that no decode instance fetches."
    )
    kv_transfer_time_per_1k_tokens: Duration = Field(
        default=0.0,
        description="Longest transfer time of the KV of 1,000 tokens over the declared fabric; 0: unknown.",
    )

    def to_identity(self) -> EngineIdentity:
        """Convert to the value that `can_transfer` compares."""
        plain = self.model_dump(exclude={"kv_lease", "kv_transfer_time_per_1k_tokens"})
        return EngineIdentity(
            **plain, kv_lease_s=self.kv_lease, kv_transfer_s_per_1k_tokens=self.kv_transfer_time_per_1k_tokens
        )


class PDInstanceStatus(ApiModel):
    """Observed state of the instance."""

    phase: Phase = Field(default=Phase.PENDING, description="Lifecycle phase.")
    phase_since: Time | None = Field(default=None, description="When the instance entered the phase.")
    role: Role | None = Field(
        default=None,
        description="Effective role: Prefill or Decode; Both if no other instance can take the other role.",
    )
    endpoint: str | None = Field(default=None, description="host:port of its HTTP API.")
    node: str = Field(
        default="",
        max_length=253,
        description="Node of its pod; empty before there is one, and in local runs.",
    )
    identity: EngineIdentitySpec | None = Field(
        default=None, description="Engine identity, which must agree between engines that exchange KV."
    )
    flip_strategy: FlipStrategy | None = Field(
        default=None, description="How the instance flips, as probed when the engine started."
    )
    restarts: int = Field(default=0, description="Restarts of the engine.")
    kv_verified_at: Time | None = Field(
        default=None,
        description="When a KV transfer with this instance was first verified since the engine last started.",
    )
    reason: str = Field(
        default="",
        max_length=64,
        description="Reason of the phase, for programs: Drained, or why the engine cannot start "
        "(ImagePullFailed, Unschedulable, EngineStartFailed); empty otherwise.",
    )
    message: str = Field(default="", description="Why the instance is in this phase, for people.")


class PDInstance(Resource):
    """One engine of a service."""

    plural: ClassVar[str] = "pdinstances"
    short_name: ClassVar[str] = "pdi"
    immutable_fields: ClassVar[tuple[str, ...]] = ("service", "pool")
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Pool", type="string", json_path=".spec.pool"),
        PrinterColumn(name="Role", type="string", json_path=".status.role"),
        PrinterColumn(name="Phase", type="string", json_path=".status.phase"),
        PrinterColumn(name="Reason", type="string", json_path=".status.reason"),
        PrinterColumn(name="Restarts", type="integer", json_path=".status.restarts"),
        PrinterColumn(name="Node", type="string", json_path=".status.node"),
        PrinterColumn(name="Service", type="string", json_path=".spec.service", priority=1),
        PrinterColumn(name="Revision", type="string", json_path=".spec.revision", priority=1),
        PrinterColumn(name="Endpoint", type="string", json_path=".status.endpoint", priority=1),
        PrinterColumn(name="Message", type="string", json_path=".status.message", priority=1),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["PDInstance"] = "PDInstance"
    spec: PDInstanceSpec = Field(description="Engine that the instance runs, and its settings.")
    status: PDInstanceStatus = Field(
        default_factory=PDInstanceStatus, description="Observed state of the instance."
    )

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
