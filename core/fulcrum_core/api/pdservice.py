"""PDService: the kind that a user writes. Every field but the model has a default.

Parts of the spec are in `engine`, `pdpool`, `replacement` and `router`. The operator reads it and writes the
status. Rules that need other objects are checked by the operator's plan, not here.
"""

import re
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationInfo, model_validator

from fulcrum_core.api.engine import (
    Connector,
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
)
from fulcrum_core.api.env import TokenLiteral, cel_no_tokens, check_no_tokens
from fulcrum_core.api.meta import (
    EXTERNAL_INPUT,
    ApiModel,
    Condition,
    Duration,
    PrinterColumn,
    Resource,
    Time,
    cel_rule,
)
from fulcrum_core.api.pdassignment import Floors
from fulcrum_core.api.pdinstance import ConfigExcerpt
from fulcrum_core.api.pdpool import Bounds, EngineSpec, InstanceShapeSpec, PoolRole
from fulcrum_core.api.pod_template import PodTemplatePatch, find_template_problems
from fulcrum_core.api.qostier import SloSpec
from fulcrum_core.api.replacement import DisruptionSpec, DrainSpec, RolloutSpec
from fulcrum_core.api.router import RouterSpec
from fulcrum_core.values import AutoscalingMode, FlipPolicy

DEFAULT_INSTANCES = 2

NAME_LENGTH_MAX = 40
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
INVALID_NAME_MESSAGE = (
    "has a metadata.name that does not start with a letter, does not end with a letter or digit, has other "
    f"characters than a-z, 0-9 and `-`, or is longer than {NAME_LENGTH_MAX}: pods, a Service and labels are "
    "named after it"
)
FLOORS_TOO_HIGH_MESSAGE = "has fewer instances than the floors of prefill and decode ask for"
_HAS_POOLS = "has(self.pools) && size(self.pools) > 0"
_FLOORS_OF_COUNT = (
    f"({_HAS_POOLS}) || !has(self.instances) || self.roles.prefill.min + self.roles.decode.min"
    " <= (self.instances == 1 ? 2 : self.instances)"
)
_FLOORS_OF_DEFAULT = (
    f"({_HAS_POOLS}) || has(self.instances) || self.roles.prefill.min + self.roles.decode.min"
    f" <= {DEFAULT_INSTANCES}"
)
"""A single instance plays both roles. Pools have bounds, so missing instances are reported in status."""

_KV_CACHE_NEEDS_LMCACHE = (
    "!has(self.kvCache) || (has(self.kvTransfer) && "
    "self.kvTransfer.connector in ['NIXLWithLMCache', 'LMCache'])"
)
KV_CACHE_NEEDS_LMCACHE_MESSAGE = (
    "has kvCache, which needs kvTransfer.connector NIXLWithLMCache or LMCache: NIXL keeps no tiers"
)


class ServiceSloSpec(SloSpec):
    """Latency objectives of a service, and the share of requests that must meet them."""

    attainment: StrictFloat = Field(
        default=99.0,
        gt=0,
        le=100,
        description="Requests of each tier that must meet TTFT and TPOT, in per cent (default 99).",
    )
    window: Duration = Field(
        default=300.0, ge=60, le=3600, description="Time over which attainment is computed (default 5m)."
    )


class PoolSpec(InstanceShapeSpec):
    """A group of interchangeable instances."""

    name: str = Field(
        min_length=1,
        max_length=22,  # `<service>-<pool>` is the value of a label: 63 characters
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="Name of the pool.",
    )
    role: PoolRole = Field(
        default="Flexible",
        description="Prefill or Decode: fixed; Flexible: instances flip (default Flexible).",
    )
    instances: Bounds = Field(description="Bounds of the pool's instances, as {min, max}.")


class RoleFloor(ApiModel):
    """Floor of one role."""

    min: StrictInt = Field(
        default=1,
        ge=1,
        le=1024,
        description="Fewest serving instances that a flip or drain may leave (default 1).",
    )


class RolesSpec(ApiModel):
    """Floors of both roles."""

    prefill: RoleFloor = Field(default_factory=RoleFloor, description="How many instances must prefill.")
    decode: RoleFloor = Field(default_factory=RoleFloor, description="How many instances must decode.")

    def to_floors(self) -> Floors:
        """Convert to the floors of the PDAssignment."""
        return Floors(prefill=self.prefill.min, decode=self.decode.min)


class ArrowSpec(ApiModel):
    """Thresholds of the arrow policy (Arrow, Algorithm 2): loads are ratios to the SLO."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule("self.shrink <= self.expand", "shrink is greater than expand")
    )

    expand: StrictFloat = Field(
        default=1.0,
        gt=0,
        le=10,
        description="Decode load (inter-token latency / TPOT, or KV cache in use / 0.8 if that is more) "
        "above which decode gets instances (default 1).",
    )
    shrink: StrictFloat = Field(
        default=0.5, ge=0, le=10, description="Load below which a role counts as idle (default 0.5)."
    )
    consecutive_ticks: StrictInt = Field(
        default=3, ge=1, le=100, description="Consecutive ticks for which a condition must hold (default 3)."
    )
    interval: Duration = Field(default=1.0, gt=0, le=60, description="Time between two ticks (default 1s).")

    @model_validator(mode="after")
    def _check_shrink_not_above_expand(self) -> Self:
        if self.shrink > self.expand:
            raise ValueError(f"shrink ({self.shrink:g}) is greater than expand ({self.expand:g})")
        return self


class FlipSpec(ApiModel):
    """When and how instances flip."""

    strategy: Literal["Auto", "Relabel", "Restart"] = Field(
        default="Auto",
        description="Relabel: the engine takes its role from each request. Restart: it takes its role at its "
        "start, so a flip restarts it. Auto: Relabel if the engine supports it (default Auto).",
    )
    prefill_to_decode_cooldown: Duration = Field(
        default=10.0,
        ge=0,
        description="Pause between flips from Prefill to Decode; none in the other direction (default 10s).",
    )
    paused: StrictBool = Field(
        default=False, description="Whether flips are paused: the autoscaler makes none (default false)."
    )


class ScaleSpec(ApiModel):
    """Who writes the replicas of the pools."""

    owner: Literal["Fulcrum", "External"] = Field(
        default="Fulcrum",
        description="External: only you, or an autoscaler of yours, write the replicas of PDPools. "
        "Fulcrum: the operator also writes them when the bounds change (default Fulcrum).",
    )


class AutoscalingSpec(ApiModel):
    """How the split between prefill and decode follows the load."""

    mode: AutoscalingMode = Field(
        default=AutoscalingMode.AUTO,
        description="'Off' (in quotes: YAML reads a bare Off as false): no decisions; Advise: report "
        "decisions without acting; Auto: flip (default Auto).",
    )
    policy: FlipPolicy = Field(
        default=FlipPolicy.BALANCED,
        description="arrow: flip one instance when a load crosses a threshold; balanced: flip to the split "
        "that the work in flight and the arriving work need (default balanced).",
    )
    arrow: ArrowSpec = Field(
        default_factory=ArrowSpec,
        description="Thresholds of the arrow policy; interval applies to every policy.",
    )
    flip: FlipSpec = Field(default_factory=FlipSpec, description="When and how instances flip.")
    scale: ScaleSpec = Field(default_factory=ScaleSpec, description="Who writes the replicas of the pools.")


class PDServiceSpec(ApiModel):
    """A model served by prefill and decode instances."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!(has(self.instances) && has(self.pools) && size(self.pools) > 0)",
                    "message": "has both instances and pools: write one of them",
                },
                {"rule": _FLOORS_OF_COUNT, "message": FLOORS_TOO_HIGH_MESSAGE},
                {"rule": _FLOORS_OF_DEFAULT, "message": FLOORS_TOO_HIGH_MESSAGE},
                {"rule": _KV_CACHE_NEEDS_LMCACHE, "message": KV_CACHE_NEEDS_LMCACHE_MESSAGE},
            ]
        }
    )

    model: str = Field(min_length=1, max_length=253, description="The model to serve, as clients name it.")
    model_source: ModelSourceSpec | None = Field(
        default=None, description="Where engines find the model (default: at the hub)."
    )
    instances: StrictInt | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Short form for one Flexible pool of this size; not together with pools (default: 2).",
    )
    engine: EngineSpec = Field(
        default_factory=EngineSpec,
        description="The engine that every instance runs.",
        json_schema_extra=cel_no_tokens(),
    )
    slo: ServiceSloSpec = Field(
        default_factory=ServiceSloSpec, description="Latency objectives of the service."
    )
    qos_tiers: tuple[str, ...] = Field(
        default=(), max_length=32, description="QoSTiers that requests may name (none: one built-in tier)."
    )
    pools: tuple[PoolSpec, ...] = Field(
        default=(),
        max_length=16,
        description="Groups of instances; not together with instances.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    template: PodTemplatePatch | None = Field(
        default=None,
        description="Strategic merge patch of each instance's pod, for pools without their own.",
    )
    roles: RolesSpec = Field(default_factory=RolesSpec, description="How many instances each role must have.")
    kv_transfer: KvTransferSpec | None = Field(
        default=None, description="How KV is transferred from prefill to decode instances (default: NIXL)."
    )
    kv_cache: KvCacheSpec | None = Field(
        default=None, description="Tiers that keep KV outside the device's memory (default: none)."
    )
    autoscaling: AutoscalingSpec = Field(
        default_factory=AutoscalingSpec,
        description="How the split between prefill and decode follows the load.",
    )
    drain: DrainSpec = Field(
        default_factory=DrainSpec, description="How an instance is drained before it stops."
    )
    rollout: RolloutSpec = Field(
        default_factory=RolloutSpec,
        description="How instances are replaced when their launch spec changes.",
    )
    disruption: DisruptionSpec = Field(
        default_factory=DisruptionSpec, description="How many instances evictions may take away."
    )
    router: RouterSpec = Field(default_factory=RouterSpec, description="How requests are routed.")

    @model_validator(mode="after")
    def _check_pools_or_instances(self) -> Self:
        if self.instances is not None and self.pools:
            raise ValueError("has both instances and pools: write one of them")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("names a pool twice")
        return self

    @model_validator(mode="after")
    def _check_floors(self) -> Self:
        count = DEFAULT_INSTANCES if self.instances is None else self.instances
        floors = self.roles.to_floors()
        if not self.pools and floors.prefill + floors.decode > max(count, 2):
            raise ValueError(FLOORS_TOO_HIGH_MESSAGE)
        return self

    @model_validator(mode="after")
    def _check_kv_cache_connector(self) -> Self:
        nixl = self.kv_transfer is None or self.kv_transfer.connector is Connector.NIXL
        if self.kv_cache is not None and nixl:
            raise ValueError(KV_CACHE_NEEDS_LMCACHE_MESSAGE)
        return self

    @model_validator(mode="after")
    def _check_new_input(self, info: ValidationInfo) -> Self:
        """Refuse tokens and settings without effect in manifests; stored objects are reported instead."""
        if info.context == EXTERNAL_INPUT:
            check_no_tokens(self.engine.env, self.engine.args)
            for problem in self.find_template_problems():
                raise TokenLiteral(problem)
        return self

    def find_template_problems(self) -> tuple[str, ...]:
        """What the templates contain that has no effect or belongs into a Secret, for people."""
        templates = {
            "template": self.template,
            "router.template": self.router.template,
            **{f"pool {pool.name}: template": pool.template for pool in self.pools},
        }
        return tuple(
            f"{name}: {problem}"
            for name, template in templates.items()
            for problem in find_template_problems(template or {})
        )

    def resolve_pools(self) -> tuple[PoolSpec, ...]:
        """The pools; the short form `instances` becomes one Flexible pool called `flex`."""
        if self.pools:
            return self.pools
        count = DEFAULT_INSTANCES if self.instances is None else self.instances
        return (PoolSpec(name="flex", instances=Bounds(min=count)),)


class RoleStatus(ApiModel):
    """Instances of one role."""

    desired: int = Field(default=0, description="Instances assigned to the role.")
    ready: int = Field(default=0, description="Instances of the role that are serving.")
    draining: int = Field(default=0, description="Instances of the role that are draining.")


class LastDecision(ApiModel):
    """Last flip or refusal, for people."""

    at: Time = Field(description="When it was decided.")
    action: str = Field(description="Instance and new role, and whether the change was refused.")
    reason: str = Field(description="Why, with numbers.")


class ModelStatus(ApiModel):
    """Result of reading the model that new instances serve."""

    key: str = Field(description="Hash of the model and its source; if it changes, the model is read again.")
    config_excerpt: ConfigExcerpt | None = None
    error: str | None = Field(default=None, max_length=1024, description="Why the model could not be read.")
    attempts: int = Field(description="Attempts to read the model.")
    at: Time = Field(description="Time of the last attempt.")


class TierStatus(ApiModel):
    """Outcome of one tier's requests, as of the router's last report."""

    name: str = Field(description="Name of the tier.")
    attainment: str | None = Field(
        default=None,
        description="Requests that met TTFT and TPOT in slo.window, in per cent; unset: too few requests.",
    )
    ended: int = Field(default=0, description="Requests that ended in slo.window, without cancelled ones.")


class PDServiceStatus(ApiModel):
    """Observed state of a service."""

    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="Ready, Progressing, Degraded, TiersAccepted, ScalingLimited, ModelFits, "
        "KVTransferVerified, SLOMet, Simulated.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    ready: str = Field(default="", description="Serving and desired instances, such as 7/8.")
    reason: str = Field(
        default="",
        max_length=64,
        description="Why the service is degraded or not ready, by the conditions Degraded and Ready; "
        "otherwise empty.",
    )
    prefill: RoleStatus = Field(default_factory=RoleStatus, description="Instances that play prefill.")
    decode: RoleStatus = Field(default_factory=RoleStatus, description="Instances that play decode.")
    ratio: str = Field(default="", description="Serving prefill to serving decode instances, such as 5:3.")
    attainment: str | None = Field(
        default=None,
        description="Requests of all tiers that met TTFT and TPOT in slo.window, in per cent, such as 98.7; "
        "unset: too few requests.",
    )
    tiers: tuple[TierStatus, ...] = Field(
        default=(),
        description="Attainment of each tier.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    flips: int = Field(default=0, description="Number of flips so far.")
    last_decision: LastDecision | None = Field(
        default=None, description="Last flip or refused change, for people."
    )
    endpoint: str | None = Field(default=None, description="Where clients send requests.")
    state_tls: bool = Field(
        default=False, description="Whether the state port of the active router serves TLS."
    )
    model: ModelStatus | None = Field(
        default=None, description="Result of reading the model; only for real engines in a cluster."
    )
    observed_generation: int = Field(
        default=0, description="Generation of the spec that this status describes."
    )


class PDService(Resource):
    """A model served with prefill and decode on different instances; their split follows the load."""

    plural: ClassVar[str] = "pdservices"
    short_name: ClassVar[str] = "pds"
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Model", type="string", json_path=".spec.model"),
        PrinterColumn(
            name="Engine",
            type="string",
            json_path=".spec.engine.type",
            description="vLLM, or Simulated: then the text of responses is made up.",
        ),
        PrinterColumn(name="Ready", type="string", json_path=".status.ready"),
        PrinterColumn(name="P", type="integer", json_path=".status.prefill.ready"),
        PrinterColumn(name="D", type="integer", json_path=".status.decode.ready"),
        PrinterColumn(name="Ratio", type="string", json_path=".status.ratio"),
        PrinterColumn(
            name="KV",
            type="string",
            json_path='.status.conditions[?(@.type=="KVTransferVerified")].reason',
            description="Verified, or why KV transfer is not verified.",
        ),
        PrinterColumn(
            name="SLO",
            type="string",
            json_path=".status.attainment",
            description="Requests that met TTFT and TPOT in slo.window, in per cent.",
        ),
        PrinterColumn(name="Flips", type="integer", json_path=".status.flips"),
        PrinterColumn(
            name="Reason",
            type="string",
            json_path=".status.reason",
            description="Why the service is degraded or not ready; otherwise empty.",
        ),
        PrinterColumn(name="Endpoint", type="string", json_path=".status.endpoint", priority=1),
        PrinterColumn(
            name="Message",
            type="string",
            json_path='.status.conditions[?(@.type=="Degraded")].message',
            description="The condition Degraded.",
            priority=1,
        ),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            f"self.metadata.name.matches('{NAME_PATTERN}') && size(self.metadata.name) <= {NAME_LENGTH_MAX}",
            INVALID_NAME_MESSAGE,
        )
    )

    kind: Literal["PDService"] = "PDService"
    spec: PDServiceSpec = Field(description="Desired state, written by the user.")
    status: PDServiceStatus = Field(default_factory=PDServiceStatus, description="Observed state.")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        name = self.metadata.name
        if len(name) > NAME_LENGTH_MAX or not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(INVALID_NAME_MESSAGE)
        return self
