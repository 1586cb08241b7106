"""The values that policies, plans and the API share.

All are frozen: a decision is a frozen value made from frozen values. Seconds, tokens and bytes are named in
the suffix. No decision is made here.
"""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Request phase that an instance serves. `BOTH` is only an effective role, never an assigned one."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    BOTH = "Both"

    @property
    def other(self) -> "Role":
        """The opposite phase.

        Raises:
            ValueError: for `BOTH`, which has none.
        """
        if self is Role.BOTH:
            raise ValueError("Both has no opposite role")
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL

    def serves(self, phase: "Role") -> bool:
        """Whether an instance of this role takes work of `phase`."""
        return self is phase or self is Role.BOTH


class Phase(StrEnum):
    """Lifecycle phase of an instance."""

    PENDING = "Pending"
    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"
    SWITCHING = "Switching"
    VERIFYING = "Verifying"
    TERMINATING = "Terminating"
    FAILED = "Failed"


class FlipStrategy(StrEnum):
    """How an instance changes its role, as probed when its engine started."""

    RELABEL = "Relabel"
    RESTART = "Restart"


class Actor(StrEnum):
    """Writer of an entry of a PDAssignment."""

    OPERATOR = "Operator"
    AUTOSCALER = "Autoscaler"
    PERSON = "Person"


class AutoscalingMode(StrEnum):
    """What the autoscaler may do: nothing, explain, or act."""

    OFF = "Off"
    ADVISE = "Advise"
    AUTO = "Auto"


class FlipPolicy(StrEnum):
    """The rule by which the autoscaler flips instances."""

    ARROW = "arrow"
    """One instance at a time, on loads above thresholds (Arrow, Algorithms 1 to 3)."""
    BALANCED = "balanced"
    """To the split that best meets the work in flight and the work to come."""


class DispatchMode(StrEnum):
    """When a request is given to a prefill instance."""

    DIRECT = "Direct"
    """At once: it waits in the engine."""
    QUEUE = "Queue"
    """When the instance is about to run out of prefill work: it waits in the router."""


class AdmissionMode(StrEnum):
    """What the router does about requests that would miss their objectives: nothing, count, or act."""

    OFF = "Off"
    ADVISE = "Advise"
    ENFORCE = "Enforce"

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class OverloadAction(StrEnum):
    """What admission does with a request of a sheddable tier that would miss its objectives."""

    REJECT = "Reject"
    """It is refused."""
    QUEUE = "Queue"
    """It is served late, if it does not wait for too long."""
    DEGRADE = "Degrade"
    """While decode is nearly full, its output is limited; it is refused if that is not enough."""

    __hash__ = str.__hash__  # see AdmissionMode


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a service or a tier.

    `ttft_s` counts from the request's arrival at the router to the first byte to the client, `tpot_s` is
    (end − first) / (tokens − 1).
    """

    ttft_s: float
    tpot_s: float

    def is_met(self, *, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether one finished request met both objectives; with a single output token TPOT counts as met."""
        return ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)

    def compute_response_limit_s(self, tokens: int) -> float:
        """Longest duration with which a whole response of m `tokens` meets both: S_T + (m − 1) · S_D.

        A response that is not streamed has no first token of its own, so the two objectives are one.
        """
        return self.ttft_s + max(0, tokens - 1) * self.tpot_s


FAILED_STARTS_MAX = 3
"""Failed starts in a row after which the start of an engine or a local program counts as failed."""

KV_LEASE_S = 30.0
"""vLLM's default time, in seconds, for which an engine keeps KV that no decode instance fetches."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Properties of an engine that decide with which engines it can exchange KV (`can_transfer`).

    Attributes:
        revision: Revision of the model. Two revisions compute different KV of the same shape.
        attention: Attention back end, which decides the layout of KV.
        latent: Whether KV is one latent vector a token, of which every tensor-parallel rank holds a copy.
        kv_heads: KV heads of the model; 0: unknown, and then not compared.
        kv_lease_s: Time for which the engine keeps KV that no decode instance fetches; not compared.
        kv_transfer_s_per_1k_tokens: Longest transfer time of 1,000 tokens' KV over the declared fabric;
            0: unknown; not compared.
    """

    model: str
    engine: str
    kv_dtype: str
    block_size: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    revision: str = ""
    dtype: str = ""
    attention: str = ""
    connector: str = ""
    latent: bool = False
    kv_heads: int = 0
    kv_lease_s: float = KV_LEASE_S
    kv_transfer_s_per_1k_tokens: float = 0.0
