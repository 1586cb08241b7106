"""The nouns that policies reason about.

All are frozen: a decision is a frozen value made from frozen values. Seconds, tokens and bytes are
named in the suffix.
"""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Which phase an instance serves. `BOTH` is only ever effective, where there is nobody to share with."""

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
    """Where an instance stands in its life."""

    PENDING = "Pending"
    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"
    SWITCHING = "Switching"
    VERIFYING = "Verifying"
    TERMINATING = "Terminating"
    FAILED = "Failed"


class FlipStrategy(StrEnum):
    """How an instance changes its role, as probed at its start."""

    RELABEL = "Relabel"
    RESTART = "Restart"


class Actor(StrEnum):
    """Who wrote a wish into a PDAssignment."""

    OPERATOR = "Operator"
    AUTOSCALER = "Autoscaler"
    PERSON = "Person"


class AutoscalingMode(StrEnum):
    """What the autoscaler may do: nothing, explain, or act."""

    OFF = "Off"
    ADVISE = "Advise"
    AUTO = "Auto"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a service or a tier.

    `ttft_s` counts from the router's arrival to the first content byte to the client, `tpot_s` is
    (end − first) / (tokens − 1).
    """

    ttft_s: float
    tpot_s: float

    def is_met(self, *, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether one finished request met both objectives; with a single output token TPOT counts as met."""
        return ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)


KV_LEASE_S = 30.0
"""For how long an engine that was told nothing else keeps a hand-off that nobody fetches (vLLM)."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine is to those that it exchanges KV blocks with.

    `revision` is of the model: weights of two revisions make KV that fits and is wrong. `attention` is the
    back end, which lays KV out; `latent` says that every tensor-parallel rank holds all of it. `kv_lease_s`
    is for how long it keeps the blocks of a hand-off that nobody fetches, `kv_transfer_s_per_1k_tokens` the
    longest that its
    declared fabric takes for the KV of 1,000 tokens (0: not known): those two need not agree. `kv_heads` are
    the model's; 0: not known, and not held against it.
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
