"""What is known of each directed pair of instances: whether KV really moves between them, and what it costs.

The evidence is the decode engine's own count of prompt tokens that it did not compute. A pair is warm
while its engines remember each other; the first hand-off of a cold one waits for a handshake, and engines
shake hands one after another. One miss makes a pair suspect, the second one in a row bad: an instance that
has just died is no broken network.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import permutations
from statistics import fmean
from typing import NamedTuple

from fulcrum_core.api import conditions
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import Role
from fulcrum_router.policy.dispatch import InstanceView, TransferDelay

WARM_FOR_S = 3_300.0
"""Engines forget a peer that they have not read from for 3,600 s (vLLM's engine_ttl)."""
DEFAULT_HANDSHAKE_S = 0.2
"""What a first hand-off is taken to cost before one was measured."""
HANDSHAKE_TIMEOUT_S = 5.0
"""For so long an engine waits for a peer that does not answer (vLLM)."""
DEFAULT_BLOCK_TOKENS = 128
MAX_FULL_MESH_INSTANCES = 16
"""Up to so many instances every pair is kept warm, above that a sample of them."""
MAX_PAIRS = 1_024
MAX_REPORTED_PAIRS = 256
MIN_TIMED_TOKENS = 256
"""Of a shorter prompt the time is the engine's step, not the wire's."""
BAD_AFTER_MISSES = 2
BAD_PAIR_RETRY_S = 10.0
"""A suspect or bad pair is tried again after so long."""
_SLOW_FACTOR, _SLOW_AFTER_TRANSFERS = 3.0, 3
_ENGINE_OVERHEAD_S, _ENGINE_OVERHEAD_STEPS = 0.1, 3
"""What a hand-off takes an engine whatever the wire does: three of its steps, and at least so long."""
_SIMILAR_FACTOR = 2.0
"""Pairs that take up to so many times as long as the quickest count as quick as that."""
_SMOOTHING = 0.3

BROKEN_REASONS = frozenset({conditions.HANDSHAKE_FAILED, conditions.INCOMPATIBLE})
"""Reasons for which nothing gets through, however often it is tried."""


class TransferOutcome(StrEnum):
    """What a hand-off came to."""

    VERIFIED = "verified"
    RECOMPUTED = "recomputed"
    UNKNOWN = "unknown"
    """The engine did not say."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


def classify_transfer(*, prompt_tokens: int, cached_tokens: int | None, block_tokens: int) -> TransferOutcome:
    """Whether an engine that computed all but `cached_tokens` of a prompt was given the rest.

    Whole blocks count. The last token does not: the engine computes it anew where it had all, and some round
    down then. Its own prefix cache counts as given: see the salt of a canary.
    """
    if cached_tokens is None:
        return TransferOutcome.UNKNOWN
    needed = max(1, (prompt_tokens - 1) // block_tokens * block_tokens)
    return TransferOutcome.VERIFIED if cached_tokens >= needed else TransferOutcome.RECOMPUTED


class PairKey(NamedTuple):
    """Who computes, and who reads."""

    prefill: str
    decode: str


class TransferPair:
    """The record of one directed pair. Times are seconds of the caller's clock."""

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
        self.reason = conditions.NO_TRAFFIC_YET
        self.last_verified_at_s: float | None = None
        self.last_used_s = -math.inf
        self.handshake_s: float | None = None
        """How long the decode engine took for the first hand-off."""
        self.transfer_s_per_1k_tokens: float | None = None
        self.lag_s_per_1k_tokens: float | None = None
        """The same without what is the engine's own: 0 of a pair whose wire nobody notices."""
        self.slow_prompt_tokens = 0
        """The prompt of the last slow hand-off: one of its size tells whether the pair still is."""
        self.warm_until_s = -math.inf
        self.has_transferred = False
        """Whether anything is known to have got from the one engine to the other."""
        self._miss_reason = ""
        self._misses = self._slow_transfers = 0
        self._slow_s_per_token = 0.0

    @property
    def suspect(self) -> bool:
        """Whether the last hand-off was not what it should be."""
        return self._misses > 0 or self.reason in conditions.KV_TRANSFER_PROBLEMS

    def invalidate(self) -> None:
        """One of its engines is another process now: what was found says nothing of the new one."""
        self.warm_until_s = self.last_used_s = -math.inf
        self.reason = conditions.NO_TRAFFIC_YET
        self.has_transferred, self._miss_reason = False, ""
        self._misses = self._slow_transfers = 0
        self.transfer_s_per_1k_tokens = self.lag_s_per_1k_tokens = None

    def record(self, outcome: TransferOutcome, *, now_s: float, reason: str = "") -> None:
        """One hand-off more; `reason` is a reason that is known better than by the outcome."""
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
        """One of which the cause is not known is taken to have that of the one before."""
        self._misses += 1
        self._miss_reason = reason or self._miss_reason
        self.warm_until_s = -math.inf
        if self._misses >= BAD_AFTER_MISSES:
            self.reason = self._miss_reason or conditions.RECOMPUTED

    def record_duration(
        self,
        seconds: float,
        *,
        tokens: int,
        recompute_s: float,
        cold: bool,
        step_s: float = 0.0,
        wire_s: float = 0.0,
    ) -> None:
        """How long the decode engine took for a hand-off that it had to itself, until its first token.

        A pair is slow if it takes, time after time, longer than the declared fabric would.

        Args:
            seconds: That time.
            tokens: Of the prompt.
            recompute_s: What computing it there would take. Where no fabric is declared, a pair is slow that
                takes several times as long.
            cold: Whether the engines had to shake hands.
            step_s: A step of the decode engine.
            wire_s: The longest that the declared fabric takes; 0: none is.
        """
        if cold:
            self.handshake_s = seconds
            return
        if tokens < MIN_TIMED_TOKENS:
            return
        overhead_s = max(_ENGINE_OVERHEAD_S, _ENGINE_OVERHEAD_STEPS * step_s)
        lag_s = max(0.0, seconds - overhead_s)
        self.transfer_s_per_1k_tokens = _smooth(self.transfer_s_per_1k_tokens, 1_000 * seconds / tokens)
        self.lag_s_per_1k_tokens = _smooth(self.lag_s_per_1k_tokens, 1_000 * lag_s / tokens)
        limit_s = overhead_s + wire_s if wire_s else _SLOW_FACTOR * max(recompute_s, _ENGINE_OVERHEAD_S)
        if seconds > limit_s:
            self._slow_transfers += 1
            self.slow_prompt_tokens, self._slow_s_per_token = tokens, seconds / tokens
        elif tokens * self._slow_s_per_token > limit_s:  # a shorter one is quick over any wire
            self._slow_transfers = 0


def _smooth(known: float | None, sample: float) -> float:
    return sample if known is None else known + _SMOOTHING * (sample - known)


class TransferPairs:
    """The pairs of one service."""

    def __init__(self) -> None:
        self.pairs: dict[PairKey, TransferPair] = {}
        self.decode_delay_tokens: dict[str, Mapping[str, TransferDelay]] = {}
        """By prefill instance: the decode instances that get its KV late, in prompt tokens that they would
        compute meanwhile."""
        self.prefill_delays_s: Mapping[str, TransferDelay] = {}
        """Seconds by prefill instance: of those whose KV every decode instance gets later than another's."""
        self.broken_prefill_instances: tuple[str, ...] = ()
        """Prefill instances whose KV no decode instance gets: handing off costs time and brings nothing."""

    def __getitem__(self, key: PairKey) -> TransferPair:
        """The record of a pair, begun at its first use."""
        pair = self.pairs.get(key)
        if pair is None:
            if len(self.pairs) >= MAX_PAIRS:
                del self.pairs[min(self.pairs, key=lambda k: (self.pairs[k].last_used_s, k))]
            pair = self.pairs[key] = TransferPair()
        return pair

    def invalidate(self, name: str) -> None:
        """An instance has another engine process, or may have."""
        for key, pair in self.pairs.items():
            if name in key:
                pair.invalidate()

    def refresh(self, instances: Sequence[InstanceView], *, now_s: float) -> None:
        """Forget pairs of instances that are gone, and see what is cold, slow or broken."""
        known = {instance.name for instance in instances}
        for key in [key for key in self.pairs if not known.issuperset(key)]:
            del self.pairs[key]
        prefill_instances = [i for i in instances if i.serving and i.role is not Role.DECODE]
        decode_instances = [i for i in instances if i.serving and i.role is not Role.PREFILL]
        delays = self._find_delays(prefill_instances, decode_instances, now_s)
        speeds = {i.name: 1_000 / max(i.prefill_model.ttft_s(1_000), 1e-6) for i in decode_instances}
        self.decode_delay_tokens = {
            name: tokens for name, found in delays.items() if (tokens := _convert_to_tokens(found, speeds))
        }
        self.prefill_delays_s = _subtract_least_delay(
            {name: _find_least_delay(found.values()) for name, found in delays.items()}
        )
        self.broken_prefill_instances = tuple(
            prefill.name for prefill in prefill_instances if self._is_broken(prefill, decode_instances)
        )

    @property
    def handshake_s(self) -> float:
        """What a handshake is expected to take."""
        measured = [pair.handshake_s for pair in self.pairs.values() if pair.handshake_s is not None]
        return fmean(measured) if measured else DEFAULT_HANDSHAKE_S

    def _find_delays(
        self,
        prefill_instances: Iterable[InstanceView],
        decode_instances: Sequence[InstanceView],
        now_s: float,
    ) -> dict[str, dict[str, TransferDelay]]:
        """What each hand-off would take longer than by a warm and quick pair, in seconds."""
        cold = TransferDelay(self.handshake_s)
        lags = [p.lag_s_per_1k_tokens for p in self.pairs.values() if p.lag_s_per_1k_tokens is not None]
        usual_s = _SIMILAR_FACTOR * min(lags, default=0.0)
        delays = {
            prefill.name: {i.name: cold for i in decode_instances if i is not prefill}
            for prefill in prefill_instances
        }
        for key, pair in self.pairs.items():
            found = delays.get(key.prefill)
            if found is not None and key.decode in found:
                found[key.decode] = _estimate_delay(pair, cold, usual_s, now_s)
        return delays

    def _is_broken(self, prefill: InstanceView, decode_instances: Sequence[InstanceView]) -> bool:
        found = (self.pairs.get(PairKey(prefill.name, decode.name)) for decode in decode_instances)
        return bool(decode_instances) and all(pair and pair.reason in BROKEN_REASONS for pair in found)

    def list_due(
        self, instances: Sequence[InstanceView], *, now_s: float, interval_s: float
    ) -> list[PairKey]:
        """The pairs of these instances that a canary should try now, the most urgent ones first.

        Those never used, then suspect ones, then those without traffic for `interval_s`; of each the longest
        unused first, and those that hand off by the roles of now.
        """
        ranked = [
            ((urgency, self._last_used_s(key), not _matches_roles(prefill, decode), key), key)
            for prefill, decode in _list_candidate_pairs(instances)
            if (urgency := self._rank_urgency(key := PairKey(prefill.name, decode.name), now_s, interval_s))
        ]
        return [key for _, key in sorted(ranked)]

    def _last_used_s(self, key: PairKey) -> float:
        pair = self.pairs.get(key)
        return -math.inf if pair is None else pair.last_used_s

    def _rank_urgency(self, key: PairKey, now_s: float, interval_s: float) -> int:
        """1 is the most urgent, 0 is none."""
        pair = self.pairs.get(key)
        if pair is None or pair.last_used_s == -math.inf:
            return 1
        idle_s = now_s - pair.last_used_s
        suspect = pair.suspect and pair.reason != conditions.SLOW_TRANSPORT  # a slow one works
        if suspect and idle_s >= (
            BAD_PAIR_RETRY_S if pair.reason in conditions.KV_TRANSFER_PROBLEMS else 0.0
        ):
            return 2
        return 3 if idle_s >= interval_s else 0

    def list_reported(self) -> list[tuple[PairKey, TransferPair]]:
        """The pairs worth telling of: bad ones first, then the last used, at most `MAX_REPORTED_PAIRS`."""
        if len(self.pairs) <= MAX_REPORTED_PAIRS:
            return sorted(self.pairs.items())
        ranked = sorted(self.pairs.items(), key=lambda kv: (not kv[1].suspect, -kv[1].last_used_s, kv[0]))
        return sorted(ranked[:MAX_REPORTED_PAIRS])


_NO_DELAY = TransferDelay()


def _estimate_delay(pair: TransferPair, cold: TransferDelay, usual_s: float, now_s: float) -> TransferDelay:
    lag_s = max(0.0, (pair.lag_s_per_1k_tokens or 0.0) - usual_s)
    if pair.reason == conditions.HANDSHAKE_FAILED:
        wait_s = HANDSHAKE_TIMEOUT_S
    elif pair.warm_until_s <= now_s:
        wait_s = pair.handshake_s or cold.fixed
    elif lag_s:
        wait_s = 0.0
    else:
        return _NO_DELAY
    return TransferDelay(wait_s, lag_s / 1_000)


def _convert_to_tokens(
    delays: Mapping[str, TransferDelay], speeds: Mapping[str, float]
) -> dict[str, TransferDelay]:
    """What each could compute meanwhile, of those that get anything late; speeds are tokens a second."""
    return {
        name: TransferDelay(delay.fixed * speeds[name], delay.per_token * speeds[name])
        for name, delay in delays.items()
        if delay is not _NO_DELAY
    }


def _find_least_delay(delays: Iterable[TransferDelay]) -> TransferDelay:
    return (
        TransferDelay(*map(min, zip(*delays, strict=True))) if (delays := tuple(delays)) else TransferDelay()
    )


def _subtract_least_delay(delays: Mapping[str, TransferDelay]) -> dict[str, TransferDelay]:
    """Where all are late, nobody is: only what one takes longer than another tells who is chosen."""
    least_delay = _find_least_delay(delays.values())
    excess = {
        name: TransferDelay(*(one - other for one, other in zip(delay, least_delay, strict=True)))
        for name, delay in delays.items()
    }
    return {name: delay for name, delay in excess.items() if any(delay)}


def _list_candidate_pairs(instances: Sequence[InstanceView]) -> Iterable[tuple[InstanceView, InstanceView]]:
    """Every pair that can hand off; of many instances each one's to those 1, 2, 4, … places further on."""
    count = len(instances)
    if count <= MAX_FULL_MESH_INSTANCES:
        pairs: Iterable[tuple[InstanceView, InstanceView]] = permutations(instances, 2)
    else:
        steps = [2**power for power in range(count.bit_length()) if 2**power < count]
        pairs = ((one, instances[(i + step) % count]) for i, one in enumerate(instances) for step in steps)
    return (pair for pair in pairs if _can_transfer(*pair))


def _can_transfer(prefill: InstanceView, decode: InstanceView) -> bool:
    source, reader = prefill.identity, decode.identity
    return source is None or reader is None or source is reader or can_transfer(source, reader).allowed


def _matches_roles(prefill: InstanceView, decode: InstanceView) -> bool:
    return prefill.role is not Role.DECODE and decode.role is not Role.PREFILL
