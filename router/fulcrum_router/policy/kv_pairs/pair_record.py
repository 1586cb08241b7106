"""Record of the KV transfers from one prefill instance to one decode instance: outcomes and durations.

`kv_transfer` records every transfer here; `pairs` combines the records of a service. The evidence of a
transfer is the decode engine's own count of prompt tokens that it did not compute. A record neither warms nor
verifies anything itself: canaries do.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from fulcrum_core.api import conditions

WARM_FOR_S = 3_300.0
"""Seconds for which two engines count as connected (warm) after a transfer that was not recomputed; a miss
makes the pair cold at once. vLLM drops a peer after 3,600 s without a read (engine_ttl)."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that an engine waits for a peer that does not respond (vLLM)."""
DEFAULT_BLOCK_TOKENS = 128
"""Tokens of a KV block where the engine's block size is unknown."""
MIN_TIMED_TOKENS = 256
"""Shorter prompts are not timed: the engine's step dominates."""
PROBLEM_AFTER_MISSES = 2
"""Misses in a row after which a pair has a problem; a single one may mean that an instance just died.

A miss is a transfer with outcome RECOMPUTED.
"""
_SLOW_FACTOR = 3.0
"""A transfer is slow above this multiple of the time to compute the prompt, if no fabric is declared."""
_SLOW_AFTER_TRANSFERS = 3
"""Slow transfers in a row after which a pair is slow."""
_ENGINE_OVERHEAD_S, _ENGINE_OVERHEAD_STEPS = 0.1, 3
"""Time of a transfer that the network does not cause: three engine steps, at least 0.1 s."""
_SMOOTHING = 0.3
"""Weight of the last transfer in the smoothed durations."""


class TransferOutcome(StrEnum):
    """Result of one KV transfer, by the decode engine's cached-token count."""

    VERIFIED = "verified"
    """The engine used the transferred KV."""
    RECOMPUTED = "recomputed"
    """The engine computed the prompt, or part of it, itself."""
    UNKNOWN = "unknown"
    """The engine does not report cached tokens. Counts as a success: it ends a row of misses and
    makes the pair warm, but verifies nothing."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


def classify_transfer(*, prompt_tokens: int, cached_tokens: int | None, block_tokens: int) -> TransferOutcome:
    """Classify a transfer by the number of prompt tokens that the decode engine reports as cached.

    Verified if all whole blocks of the prompt without its last token are cached. The last token does not
    count: an engine computes it again even with the whole KV, and some then report one block less. Tokens
    from the engine's own prefix cache count as transferred; a canary's cache salt rules these out.
    """
    if cached_tokens is None:
        return TransferOutcome.UNKNOWN
    needed = max(1, (prompt_tokens - 1) // block_tokens * block_tokens)
    return TransferOutcome.VERIFIED if cached_tokens >= needed else TransferOutcome.RECOMPUTED


class PairKey(NamedTuple):
    """Names of the instance that computes the prompt and of the instance that fetches its KV."""

    prefill: str
    decode: str


class TransferDelay(NamedTuple):
    """Time of a KV transfer before decode can start: seconds of each transfer, and more for each token."""

    fixed_s: float = 0.0
    s_per_token: float = 0.0


class TransferPair:
    """Record of the transfers of one directed pair. Times are seconds of the caller's monotonic clock."""

    __slots__ = (
        "_miss_reason",
        "_misses",
        "_slow_s_per_token",
        "_slow_transfers",
        "counts",
        "handshake_s",
        "has_transferred",
        "lag_s_per_1k_tokens",
        "last_used_s",
        "last_verified_at_s",
        "reason",
        "slow_prompt_tokens",
        "transfer_s_per_1k_tokens",
        "warm_until_s",
    )

    def __init__(self) -> None:
        self.counts = dict.fromkeys(TransferOutcome, 0)
        """Transfers since the record began, canaries included, by outcome."""
        self.reason = conditions.NO_TRAFFIC_YET
        """State of the pair, as a reason of the condition KVTransferVerified."""
        self.last_verified_at_s: float | None = None
        self.last_used_s = -math.inf
        """Time of the last transfer, whatever its outcome; -inf: none by the engines that run now."""
        self.handshake_s: float | None = None
        """Duration of the last transfer that included a handshake, in seconds."""
        self.transfer_s_per_1k_tokens: float | None = None
        """Duration of a transfer per 1,000 prompt tokens, smoothed."""
        self.lag_s_per_1k_tokens: float | None = None
        """The same without the engine's own time; 0: the network adds no noticeable time."""
        self.slow_prompt_tokens = 0
        """Size of the last slow prompt: a prompt of this size shows whether the pair is still slow."""
        self.warm_until_s = -math.inf
        """Time until which the engines keep their last handshake; -inf: the next transfer needs a new one."""
        self.has_transferred = False
        """Whether any transfer between these two engines has succeeded."""
        self._miss_reason = ""
        self._misses = self._slow_transfers = 0
        self._slow_s_per_token = 0.0

    @property
    def suspect(self) -> bool:
        """Whether the last transfer was a miss, or the pair has a problem."""
        return self._misses > 0 or self.reason in conditions.KV_TRANSFER_PROBLEMS

    def estimate_wait_s(self, cold_s: float, now_s: float) -> float:
        """Estimate the handshake that the next transfer waits for, in seconds; `cold_s` if none was timed."""
        if self.reason == conditions.HANDSHAKE_FAILED:
            return HANDSHAKE_TIMEOUT_S
        return (self.handshake_s or cold_s) if self.warm_until_s <= now_s else 0.0

    def invalidate(self) -> None:
        """Forget the state and the transfer times, since one of the engines was restarted, or may have been.

        The counts and the time of the last handshake remain.
        """
        self.warm_until_s = self.last_used_s = -math.inf
        self.reason = conditions.NO_TRAFFIC_YET
        self.has_transferred, self._miss_reason = False, ""
        self._misses = self._slow_transfers = 0
        self.transfer_s_per_1k_tokens = self.lag_s_per_1k_tokens = None

    def record(self, outcome: TransferOutcome, *, now_s: float, reason: str = "") -> None:
        """Record one transfer: counts, warmth and the state of the pair.

        `reason` is the cause of a miss where it is known.
        """
        self.counts[outcome] += 1
        self.last_used_s = now_s
        if outcome is TransferOutcome.RECOMPUTED:
            self._record_miss(reason)
            return
        self.has_transferred, self._miss_reason = True, ""
        self._misses = 0
        self.warm_until_s = now_s + WARM_FOR_S
        if outcome is TransferOutcome.VERIFIED:
            self.last_verified_at_s = now_s
            self.reason = (
                conditions.SLOW_TRANSPORT
                if self._slow_transfers >= _SLOW_AFTER_TRANSFERS
                else conditions.VERIFIED
            )
        else:
            self.reason = conditions.NOT_REPORTED

    def _record_miss(self, reason: str) -> None:
        """Record a recomputed prompt. A miss without a known cause keeps the cause of the previous miss."""
        self._misses += 1
        self._miss_reason = reason or self._miss_reason
        self.warm_until_s = -math.inf
        if self._misses >= PROBLEM_AFTER_MISSES:
            self.reason = self._miss_reason or conditions.RECOMPUTED

    def record_duration(
        self,
        duration_s: float,
        *,
        tokens: int,
        recompute_s: float,
        cold: bool,
        step_s: float = 0.0,
        wire_s: float = 0.0,
    ) -> None:
        """Record the time from sending a request to an otherwise idle decode instance until its first token.

        A pair is slow after several transfers in a row that took longer than the declared fabric needs.

        Args:
            duration_s: Measured time in seconds.
            tokens: Tokens of the prompt.
            recompute_s: Predicted seconds to compute the prompt on the decode instance. Without a declared
                fabric, a transfer is slow if it takes several times as long.
            cold: Whether the transfer included a handshake.
            step_s: Duration of one step of the decode engine.
            wire_s: Longest transfer time over the declared fabric; 0: no fabric is declared.
        """
        if cold:
            self.handshake_s = duration_s
            return
        if tokens < MIN_TIMED_TOKENS:
            return
        overhead_s = max(_ENGINE_OVERHEAD_S, _ENGINE_OVERHEAD_STEPS * step_s)
        lag_s = max(0.0, duration_s - overhead_s)
        self.transfer_s_per_1k_tokens = _smooth(self.transfer_s_per_1k_tokens, 1_000 * duration_s / tokens)
        self.lag_s_per_1k_tokens = _smooth(self.lag_s_per_1k_tokens, 1_000 * lag_s / tokens)
        limit_s = overhead_s + wire_s if wire_s else _SLOW_FACTOR * max(recompute_s, _ENGINE_OVERHEAD_S)
        if duration_s > limit_s:
            self._slow_transfers += 1
            self.slow_prompt_tokens, self._slow_s_per_token = tokens, duration_s / tokens
        elif tokens * self._slow_s_per_token > limit_s:  # a shorter prompt is fast over any network
            self._slow_transfers = 0


class SourcePairs:
    """The pairs of one prefill instance, and two durations of the whole service to compare them with."""

    __slots__ = ("by_decode", "cold_s", "usual_lag_s_per_1k_tokens")

    def __init__(
        self, by_decode: Mapping[str, TransferPair], cold_s: float, usual_lag_s_per_1k_tokens: float
    ) -> None:
        self.by_decode = by_decode
        """Pairs of the source by decode instance. One without a record has never transferred: it is cold."""
        self.cold_s = cold_s
        """Expected duration of a handshake in seconds."""
        self.usual_lag_s_per_1k_tokens = usual_lag_s_per_1k_tokens
        """Pairs up to this lag count as equally fast."""

    def compute_delay_s(self, pair: TransferPair | None, tokens: int, now_s: float) -> float:
        """Compute the extra time of a transfer of `tokens` over that of a warm and fast pair, in seconds."""
        if pair is None:
            return self.cold_s
        lag_s = max(0.0, (pair.lag_s_per_1k_tokens or 0.0) - self.usual_lag_s_per_1k_tokens)
        return pair.estimate_wait_s(self.cold_s, now_s) + lag_s * tokens / 1_000


def _smooth(previous: float | None, sample: float) -> float:
    return sample if previous is None else previous + _SMOOTHING * (sample - previous)
