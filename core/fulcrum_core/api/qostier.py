"""QoSTier: priority and latency objectives of a class of requests. A user writes it; a PDService names it.

The router serves by it (`fulcrum_router.settings`), and the operator checks that tiers fit each other.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, model_validator

from fulcrum_core.api.meta import ApiModel, Duration, PrinterColumn, Resource, cel_rules
from fulcrum_core.values import OverloadAction, Slo


class SloSpec(ApiModel):
    """Latency objectives. A request meets them when TTFT and TPOT are both within."""

    ttft: Duration = Field(
        default=1.0,
        gt=0,
        description="Time to first token, from a request's arrival at the router to the first byte of its "
        "response (default 1s).",
    )
    tpot: Duration = Field(
        default=0.05,
        gt=0,
        description="Time per output token after the first, averaged over a request (default 50ms).",
    )

    def to_slo(self) -> Slo:
        """Convert to the value that policies use."""
        return Slo(ttft_s=self.ttft, tpot_s=self.tpot)


TENANT_PATTERN = r"^[-._a-zA-Z0-9]{1,253}$"
"""What may name an entry of a Secret: API keys are kept by tenant."""
KEY_PATTERN = r"^[-._a-zA-Z0-9]{1,253}/[-._a-zA-Z0-9]{1,63}$"


class TierMatchSpec(ApiModel):
    """Whose requests belong to a tier."""

    tenants: tuple[Annotated[str, Field(pattern=TENANT_PATTERN, max_length=253)], ...] = Field(
        default=(),
        max_length=1024,
        description="Tenants whose requests get this tier, unless a trusted x-customer-tier names another.",
    )
    keys: tuple[Annotated[str, Field(pattern=KEY_PATTERN, max_length=317)], ...] = Field(
        default=(),
        max_length=1024,
        description="API keys whose requests get this tier, as TENANT/NAME; keys decide before tenants.",
    )


NO_OUTPUT_LIMIT_MESSAGE = "has mode Degrade without maxOutputTokens: write it"
NOT_DEGRADED_MESSAGE = "has maxOutputTokens, which has no effect: it needs mode Degrade"
NOT_QUEUED_MESSAGE = "has maxQueueTime, which has no effect: it needs mode Queue"
DEFAULT_MAX_QUEUE_S = 10.0


class TierAdmissionSpec(ApiModel):
    """What is done with requests that would miss their objectives, where router.admission is Enforce."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("self.mode != 'Degrade' || has(self.maxOutputTokens)", NO_OUTPUT_LIMIT_MESSAGE),
            ("self.mode == 'Degrade' || !has(self.maxOutputTokens)", NOT_DEGRADED_MESSAGE),
            ("self.mode == 'Queue' || !has(self.maxQueueTime)", NOT_QUEUED_MESSAGE),
        )
    )

    mode: OverloadAction = Field(
        default=OverloadAction.REJECT,
        description="Reject: they are refused. Queue: they are served late, but refused when they wait for "
        "longer than maxQueueTime. Degrade: while decode is nearly full, answers have at most "
        "maxOutputTokens; requests that would still miss their objectives are refused (default "
        "Reject).",
    )
    max_queue_time: Duration | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="With mode Queue: longest wait for prefill, from a request's arrival. With "
        "router.dispatch.mode Direct it is only predicted, at the arrival (default 10s).",
    )
    max_output_tokens: StrictInt | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="With mode Degrade: output tokens of each answer, while decode is nearly full.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode is OverloadAction.DEGRADE and self.max_output_tokens is None:
            raise ValueError(NO_OUTPUT_LIMIT_MESSAGE)
        if self.mode is not OverloadAction.DEGRADE and self.max_output_tokens is not None:
            raise ValueError(NOT_DEGRADED_MESSAGE)
        if self.mode is not OverloadAction.QUEUE and self.max_queue_time is not None:
            raise ValueError(NOT_QUEUED_MESSAGE)
        return self


class RateLimitSpec(ApiModel):
    """How much each tenant of a tier may use."""

    tokens_per_minute: StrictInt = Field(
        ge=1_000,
        le=1_000_000_000,
        description="Prompt and output tokens of each tenant in a minute. Requests over it get status 429 "
        "with Retry-After. Requests without a tenant share one limit.",
    )


TWO_OBJECTIVES_MESSAGE = "has slo and sloFactor: write one of them"
NO_RESERVE_MESSAGE = "has reclaimWithin, which has no effect: it needs a reservedFraction above 0"


class QoSTierSpec(ApiModel):
    """Priority, objectives and tenants of a tier."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "!has(self.reclaimWithin) || has(self.reservedFraction) && self.reservedFraction > 0.0",
                NO_RESERVE_MESSAGE,
            ),
            ("!has(self.slo) || !has(self.sloFactor)", TWO_OBJECTIVES_MESSAGE),
        )
    )

    priority: StrictInt = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Higher is more important: requests that wait in an engine start in this order. So do "
        "those that wait in the router (router.dispatch.mode Queue), but there lower priorities still get a "
        "share (default 0).",
    )
    slo: SloSpec | None = Field(default=None, description="Objectives of the tier (default: the service's).")
    slo_factor: StrictFloat | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Objectives of the tier as a multiple of the service's, in place of slo: with 2, both "
        "may take twice as long.",
    )
    reserved_fraction: StrictFloat = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Share of the prefill instances that is kept nearly idle for the tier while it sends "
        "requests, and of the decode KV cache that lower tiers leave free. It has no effect unless requests "
        "wait in the router (router.dispatch.mode Queue). All tiers of a service together can reserve "
        "at most 1 (default 0).",
    )
    reclaim_within: Duration | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="While the tier sends no requests, lower tiers may use what it has reserved of the "
        "decode KV cache, as far as that is expected to be free again within this time: a running answer "
        "cannot be interrupted. It needs reservedFraction (default: lower tiers may use all of it).",
    )
    weight: StrictInt = Field(
        default=1,
        ge=1,
        le=100,
        description="How much the tier gets compared with other tiers of the same priority while requests of "
        "several of them wait in the router (router.dispatch.mode Queue). A tier with weight 2 gets twice as "
        "many weighted tokens as one with weight 1 (default 1).",
    )
    sheddable: StrictBool = Field(
        default=True,
        description="Whether requests may be refused when they would miss their objectives and the service's "
        "router.admission is Enforce (default true).",
    )
    admission: TierAdmissionSpec = Field(
        default_factory=TierAdmissionSpec,
        description="What is done with requests that would miss their objectives, where the service's "
        "router.admission is Enforce.",
    )
    rate_limit: RateLimitSpec | None = Field(
        default=None,
        description="How much each tenant of the tier may use, whatever router.admission is (default: no "
        "limit). It applies only to tenants that cannot choose their own names: see router.auth.",
    )
    match: TierMatchSpec = Field(
        default_factory=TierMatchSpec,
        description="Whose requests belong to the tier (default: those that name it in x-customer-tier).",
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.slo is not None and self.slo_factor is not None:
            raise ValueError(TWO_OBJECTIVES_MESSAGE)
        if self.reclaim_within is not None and not self.reserved_fraction:
            raise ValueError(NO_RESERVE_MESSAGE)
        return self

    def find_slo(self, service: Slo) -> Slo:
        """Find the objectives of the tier in a service with these."""
        if self.slo is not None:
            return self.slo.to_slo()
        factor = self.slo_factor or 1.0
        return Slo(ttft_s=factor * service.ttft_s, tpot_s=factor * service.tpot_s)


class QoSTier(Resource):
    """A class of requests, named by services in spec.qosTiers. A request gets its tier by its tenant, or by
    x-customer-tier where the service trusts that header (spec.router.auth)."""

    plural: ClassVar[str] = "qostiers"
    short_name: ClassVar[str] = "qos"
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Priority", type="integer", json_path=".spec.priority"),
        PrinterColumn(name="TTFT", type="string", json_path=".spec.slo.ttft"),
        PrinterColumn(name="TPOT", type="string", json_path=".spec.slo.tpot"),
        PrinterColumn(name="SLO factor", type="number", json_path=".spec.sloFactor"),
        PrinterColumn(name="Admission", type="string", json_path=".spec.admission.mode"),
        PrinterColumn(name="Sheddable", type="boolean", json_path=".spec.sheddable"),
        PrinterColumn(name="Tokens/min", type="integer", json_path=".spec.rateLimit.tokensPerMinute"),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["QoSTier"] = "QoSTier"
    spec: QoSTierSpec = Field(
        default_factory=QoSTierSpec, description="Priority, objectives and tenants of the tier."
    )
