"""RouterState: what a router tells about itself at its state port.

The autoscaler decides flips from it and the operator decides drains from it, so it is the one live
contract between the shells. It crosses the wire as JSON; both ends use these models.
"""

from pydantic import BaseModel, ConfigDict, Field

from fulcrum_core.values import Role

STATE_PORT_AUDIENCE = "fulcrum.dev/router-state"
"""Audience of the ServiceAccount tokens with which the state port is called."""
ROUTER_HANDOVER_TIMEOUT_S = 5
"""Seconds that a router that shuts down serves new requests, at most, while a successor takes over."""


class _WireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer router may say more


class InstanceState(_WireModel):
    """The router's ledger of one instance, with what it last read from the engine."""

    name: str
    role: Role = Field(description="The role the router dispatches by now.")
    serving: bool = Field(description="Whether the router sends it new work.")
    prefill_queued_s: float = Field(description="Predicted seconds of prefill work sent and not answered.")
    prefill_tokens: int = Field(description="Prompt tokens of prefill legs in flight.")
    decode_tokens: int = Field(description="KV tokens of decode legs in flight: prompt and output so far.")
    decode_legs: int = Field(description="Decode legs in flight.")
    legs: int = Field(description="All legs in flight.")
    pending_transfers: int = Field(
        description="Prompts prefilled here whose KV no decode instance has taken yet."
    )
    itl_s: float | None = Field(
        description="Mean inter-token latency over the last completed second; None: no tokens."
    )
    kv_usage: float | None = Field(
        default=None, description="The engine's KV cache use, 0 to 1; None: not read."
    )
    missed_probes: int = Field(default=0, description="Probes in a row that the engine did not answer.")
    engine_requests: int | None = Field(
        default=None, description="Requests in the engine, by its own count; None: it does not say."
    )
    engine_read_at_s: float = Field(default=0.0, description="Unix time at which it was last asked for that.")

    def is_idle(self, *, since_s: float) -> bool:
        """Whether nothing is on it: by the router's ledger, and by its own count as of `since_s` or later.

        Its own count knows what another router sent. An engine that does not answer is not waited for.
        """
        if self.legs or self.pending_transfers:
            return False
        return self.engine_requests is None or (not self.engine_requests and self.engine_read_at_s >= since_s)


class TierState(_WireModel):
    """What became of the requests of one tier since the router started."""

    name: str
    offered: int
    ok: int
    failed: int = Field(description="Ended before the first byte of an answer.")
    broken: int = Field(description="Ended with an error event after the first byte.")
    cancelled: int = Field(description="The client left.")
    slo_met: int = Field(description="Requests that met TTFT and TPOT.")


class PairState(_WireModel):
    """What the router knows of hand-offs from one instance to another."""

    prefill: str
    decode: str
    verified: int = Field(description="Hand-offs whose prompt decode did not compute, by its own count.")
    recomputed: int = Field(description="Hand-offs whose prompt decode computed all the same.")
    unknown: int = Field(description="Hand-offs of which decode did not say.")
    verified_age_s: float | None = Field(description="Seconds since the last verified one; None: none.")
    handshake_s: float | None = Field(description="What the first hand-off took decode; None: not measured.")
    transfer_s_per_1k_tokens: float | None = Field(
        description="What a hand-off takes decode now, per 1,000 tokens; None: not measured."
    )
    last_reason: str = Field(description="The last finding, as a reason of the condition KVTransferVerified.")


class RouterState(_WireModel):
    """One consistent picture of a router."""

    service: str
    generation: int = Field(description="Last PDAssignment generation applied: the router's acknowledgement.")
    acknowledged_at_s: float = Field(description="Unix time at which that generation was applied.")
    at_s: float = Field(description="Unix time of this picture.")
    ledger_since_s: float = Field(
        default=0.0, description="Unix time at which its ledger begins: of what came before it knows nothing."
    )
    instances: tuple[InstanceState, ...]
    flip_request_role: Role | None = Field(
        description="The phase for which dispatch last found no instance within the SLO."
    )
    flip_request_seq: int = Field(
        description="Counts such findings; the long-poll of `/flip-requests` resumes after one."
    )
    prediction_error: float | None = Field(
        description="Mean of (predicted − measured)/measured of recent prefills."
    )
    local_prefills: int = Field(
        description="Requests decoded without a prefill leg because no prefill answered."
    )
    tiers: tuple[TierState, ...]
    pairs: tuple[PairState, ...] = Field(
        default=(), description="Directed pairs of instances: of very many those that matter most."
    )


class FlipRequest(_WireModel):
    """Answer of `/flip-requests`: dispatch found no instance of `role` within the SLO."""

    seq: int
    role: Role
    reason: str
