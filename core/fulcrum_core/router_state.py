"""RouterState: the report of a router at its state port, as JSON.

The autoscaler decides flips from it, the operator drains, the CLI shows it. Router and readers (the client is
`fulcrum_cluster.router_client`) use these models.
"""

from pydantic import BaseModel, ConfigDict, Field

from fulcrum_core.values import Role

STATE_PORT_AUDIENCE = "fulcrum.dev/router-state"
"""Audience of the ServiceAccount tokens with which the state port is called."""
ROUTER_HANDOVER_TIMEOUT_S = 30
"""Seconds that a router that shuts down serves new requests, at most, while a successor takes over.

A single router has no standby: its successor is a pod that has to start.
"""


class _WireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer router may send more fields


class InstanceState(_WireModel):
    """The router's ledger of one instance, with the figures that it last read from the engine."""

    name: str
    role: Role = Field(description="Role that the router dispatches by.")
    serving: bool = Field(description="Whether the router sends new work to the instance.")
    prefill_queued_s: float = Field(
        description="Predicted seconds of prefill work in flight, and of its share of the waiting room."
    )
    prefill_tokens: int = Field(description="Prompt tokens of prefill legs in flight.")
    decode_tokens: int = Field(description="KV tokens of decode legs in flight: prompt and output so far.")
    decode_legs: int = Field(description="Decode legs in flight.")
    legs: int = Field(description="All legs in flight.")
    pending_transfers: int = Field(
        description="Prompts prefilled here whose KV no decode instance has fetched yet."
    )
    itl_s: float | None = Field(
        description="Mean inter-token latency over the last completed second; None: no tokens."
    )
    kv_usage: float | None = Field(
        default=None, description="The engine's KV cache use, 0 to 1; None: not read."
    )
    missed_probes: int = Field(default=0, description="Consecutive probes without a response of the engine.")
    engine_requests: int | None = Field(
        default=None, description="Requests in the engine, by the engine's count; None: not reported."
    )
    engine_read_at_s: float = Field(
        default=0.0, description="Unix time of the request that read engine_requests."
    )

    reserved_tokens: int = Field(
        default=0, description="KV tokens of prompts that are computed elsewhere and will be decoded here."
    )
    max_seqs: int | None = Field(
        default=None,
        description="Requests that the engine decodes together, as full batches of its pool have shown; "
        "None: not known.",
    )
    decode_is_full: bool = Field(
        default=False,
        description="Whether requests of lower tiers, still in time, wait in the router for room in decode.",
    )
    kv_capacity_tokens: int | None = Field(
        default=None, description="Tokens that the engine's KV cache holds; None: not reported."
    )
    itl_intercept_s: float | None = Field(
        default=None, description="Predicted inter-token latency of an empty batch; None: not learned."
    )
    itl_slope_s: float | None = Field(
        default=None, description="Predicted inter-token latency per KV token of the batch."
    )
    suits_prefill: float | None = Field(
        default=None,
        description="How well the instance's pool suits prefill: time of a decode step with 10,000 tokens "
        "as a multiple of that for a prompt of 1,000 tokens; None: no pool, or not measured.",
    )
    on_cpu: bool = Field(default=False, description="Whether the engine runs on CPUs.")

    def is_idle(self, *, since_s: float) -> bool:
        """Whether nothing is in flight: by the ledger, and by the engine's count as of `since_s` or later.

        The engine's count includes requests of another router. An engine that reports no count is idle if
        the ledger is empty.
        """
        if self.legs or self.pending_transfers:
            return False
        return self.engine_requests is None or (not self.engine_requests and self.engine_read_at_s >= since_s)


class TierState(_WireModel):
    """Outcomes of one tier's requests since the router started."""

    name: str
    offered: int = Field(description="Requests that arrived, those in flight and invalid ones included.")
    ok: int
    failed: int = Field(description="Requests that failed before the first byte of the response.")
    refused: int = Field(default=0, description="Requests that were not admitted.")
    limited: int = Field(default=0, description="Requests over the rate limit of their tenant.")
    broken: int = Field(description="Requests that ended with an error event after the first byte.")
    cancelled: int = Field(
        description="Requests whose client disconnected while they could still meet their objectives."
    )
    left_late: int = Field(
        default=0, description="Requests whose client disconnected after they had missed their objectives."
    )
    slo_met: int = Field(description="Requests that met TTFT and TPOT.")
    queued: int = Field(default=0, description="Requests that were admitted although they would be late.")
    degraded: int = Field(default=0, description="Requests whose output was limited.")
    refusals: dict[str, int] = Field(
        default_factory=dict, description="Requests that were refused, by reason, rate limits included."
    )
    advised_refusals: dict[str, int] = Field(
        default_factory=dict,
        description="Requests that router.admission Enforce would have refused, by reason.",
    )
    misses: dict[str, int] = Field(
        default_factory=dict,
        description="Requests that did not, by the part that took the most time; empty: an older router.",
    )
    wait_mean_s: float | None = Field(
        default=None,
        description="Mean time from a request's arrival until its first leg is sent to an engine.",
    )
    reserve_kept: float = Field(
        default=0.0, description="Share of prefill and decode that is kept free for the tier now."
    )
    reserve_lent: float = Field(
        default=0.0, description="Share that the tier has reserved and lends now, since it sends no requests."
    )

    @property
    def ended(self) -> int:
        """Requests that ended and met the objectives or missed them: the denominator of the attainment.

        Cancelled, invalid and limited requests count as neither.
        """
        return self.ok + self.failed + self.refused + self.broken + self.left_late


class TenantState(_WireModel):
    """Outcomes of one tenant's requests, or of all that have no name of their own."""

    name: str
    met: int = Field(description="Requests that met their objectives.")
    missed: int
    refused: int
    limited: int


class DemandSums(_WireModel):
    """Work of requests, added up since the router started."""

    requests: int = 0
    prefill_s: float = Field(default=0.0, description="Predicted time to compute their prompts, in seconds.")
    output_tokens: float = Field(default=0.0, description="Output tokens, as predicted on arrival.")
    token_steps: float = Field(
        default=0.0,
        description="KV tokens in use summed over decode steps: output times (prompt + output / 2).",
    )


class DemandState(DemandSums):
    """Work of the requests that were admitted; two snapshots give the rates between them."""

    withdrawn: DemandSums = Field(
        default=DemandSums(),
        description="The part of it that needs no engine any more: an engine rejected the request, or its "
        "client left while it could still be in time, before any engine had computed its prompt.",
    )


class PairState(_WireModel):
    """KV transfers from one instance to another, as the router has observed them."""

    prefill: str
    decode: str
    verified: int = Field(
        description="KV transfers after which decode did not compute the prompt, by the engine's count."
    )
    recomputed: int = Field(description="KV transfers after which decode computed the prompt again.")
    unknown: int = Field(description="KV transfers of which decode reported no count.")
    verified_age_s: float | None = Field(
        description="Seconds since the last verified KV transfer; None: none was verified."
    )
    handshake_s: float | None = Field(
        description="Seconds of the last KV transfer that included a handshake; None: not measured."
    )
    transfer_s_per_1k_tokens: float | None = Field(
        description="Current duration of a KV transfer per 1,000 tokens, in seconds; None: not measured."
    )
    last_reason: str = Field(description="Last result, as a reason of the condition KVTransferVerified.")


class RouterState(_WireModel):
    """One consistent snapshot of a router."""

    service: str
    generation: int = Field(description="Last PDAssignment generation applied: the router's acknowledgement.")
    acknowledged_at_s: float = Field(description="Unix time at which that generation was applied.")
    at_s: float = Field(description="Unix time of the snapshot.")
    ledger_since_s: float = Field(
        default=0.0, description="Unix time at which the ledger begins; earlier requests are not in it."
    )
    instances: tuple[InstanceState, ...]
    flip_request_role: Role | None = Field(
        description="The phase for which dispatch last found no instance within the SLO."
    )
    flip_request_seq: int = Field(
        description="Number of the last flip request; a long poll of `/flip-requests` resumes after it."
    )
    prediction_error: float | None = Field(
        description="Mean of (predicted − measured)/measured of recent prefills."
    )
    local_prefills: int = Field(
        description="Requests whose prompt the decode instance computed because of a failure."
    )
    tiers: tuple[TierState, ...]
    tenants: tuple[TenantState, ...] = Field(
        default=(), description="The tenants with most requests, and the rest together."
    )
    access_problems: tuple[str, ...] = Field(
        default=(), description="Why API keys have no effect, for people; empty if no key is needed."
    )
    demand: DemandState | None = Field(
        default=None, description="Work that has arrived; None: an older router."
    )
    pairs: tuple[PairState, ...] = Field(
        default=(),
        description="Pairs of prefill and decode instances; if there are very many, the most relevant.",
    )


class FlipRequest(_WireModel):
    """Response of `/flip-requests`: dispatch found no instance of `role` within the SLO."""

    seq: int
    role: Role
    reason: str
    other: "FlipRequest | None" = Field(
        default=None,
        description="Newest flip request for the other role, which the poll has not returned yet; "
        "None: there is none, or an older router.",
    )
