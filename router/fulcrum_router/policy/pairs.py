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

from fulcrum_core.api import conditions as words
from fulcrum_core.transfer import can_transfer
from fulcrum_core.values import Role
from fulcrum_router.policy.dispatch import Delay, InstanceView

WARM_S = 3_300.0
"""Engines forget a peer that they have not read from for 3,600 s (vLLM's engine_ttl)."""
HANDSHAKE_S = 0.2
"""What a first hand-off is taken to cost before one was measured."""
HANDSHAKE_TIMEOUT_S = 5.0
"""For so long an engine waits for a peer that does not answer (vLLM)."""
DEFAULT_BLOCK_TOKENS = 128
MESH = 16
"""Up to so many instances every pair is kept warm, above that a sample of them."""
MOST_PAIRS = 1_024
TOLD_PAIRS = 256
SAMPLE_TOKENS = 256
"""Of a shorter prompt the time is the engine's step, not the wire's."""
BAD_AFTER = 2
RETRY_S = 10.0
"""A suspect or bad pair is tried again after so long."""
_SLOW_FACTOR, _SLOW_AFTER = 3.0, 3
_OWN_S, _OWN_STEPS = 0.1, 3
"""What a hand-off takes an engine whatever the wire does: three of its steps, and at least so long."""
_ALIKE = 2.0
"""Pairs that take up to so many times as long as the quickest count as quick as that."""
_WEIGHT = 0.3

CUT_OFF = frozenset({words.HANDSHAKE_FAILED, words.NOT_COMPATIBLE})
"""Reasons for which nothing gets through, however often it is tried."""


class Proof(StrEnum):
    """What a hand-off came to."""

    PROVEN = "proven"
    RECOMPUTED = "recomputed"
    UNKNOWN = "unknown"
    """The engine did not say."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


def judge(*, prompt_tokens: int, cached_tokens: int | None, block_tokens: int) -> Proof:
    """Whether an engine that computed all but `cached_tokens` of a prompt was given the rest.

    Whole blocks count. The last token does not: the engine computes it anew where it had all, and some round
    down then. Its own prefix cache counts as given: see the salt of a canary.
    """
    if cached_tokens is None:
        return Proof.UNKNOWN
    needed = max(1, (prompt_tokens - 1) // block_tokens * block_tokens)
    return Proof.PROVEN if cached_tokens >= needed else Proof.RECOMPUTED


class PairKey(NamedTuple):
    """Who computes, and who reads."""

    prefill: str
    decode: str


class Pair:
    """The record of one directed pair. Times are seconds of the caller's clock."""

    __slots__ = (
        "_cause",
        "_misses",
        "_slow",
        "_slow_s_per_token",
        "counts",
        "handshake_s",
        "lag_per_1k_tokens_s",
        "last_proven_s",
        "last_used_s",
        "met",
        "reason",
        "seconds_per_1k_tokens",
        "slow_tokens",
        "warm_until_s",
    )

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Proof, 0)
        self.reason = words.NO_TRAFFIC_YET
        self.last_proven_s: float | None = None
        self.last_used_s = -math.inf
        self.handshake_s: float | None = None
        """How long the decode engine took for the first hand-off."""
        self.seconds_per_1k_tokens: float | None = None
        self.lag_per_1k_tokens_s: float | None = None
        """The same without what is the engine's own: 0 of a pair whose wire nobody notices."""
        self.slow_tokens = 0
        """The prompt of the last slow hand-off: one of its size tells whether the pair still is."""
        self.warm_until_s = -math.inf
        self.met = False
        """Whether anything is known to have got from the one engine to the other."""
        self._cause = ""
        self._misses = self._slow = 0
        self._slow_s_per_token = 0.0

    @property
    def suspect(self) -> bool:
        """Whether the last hand-off was not what it should be."""
        return self._misses > 0 or self.reason in words.BAD_TRANSFERS

    def cool(self) -> None:
        """One of its engines is another process now: what was found says nothing of the new one."""
        self.warm_until_s = self.last_used_s = -math.inf
        self.reason = words.NO_TRAFFIC_YET
        self.met, self._cause = False, ""
        self._misses = self._slow = 0
        self.seconds_per_1k_tokens = self.lag_per_1k_tokens_s = None

    def record(self, proof: Proof, *, now_s: float, why: str = "") -> None:
        """One hand-off more; `why` is a reason that is known better than by the proof."""
        self.counts[proof] += 1
        self.last_used_s = now_s
        if proof is Proof.RECOMPUTED:
            self._miss(why)
            return
        self.met, self._cause = True, ""
        self._misses = 0
        self.warm_until_s = now_s + WARM_S
        if proof is Proof.PROVEN:
            self.last_proven_s = now_s
            self.reason = words.SLOW_TRANSPORT if self._slow >= _SLOW_AFTER else words.PROVEN
        else:
            self.reason = words.CANNOT_TELL

    def _miss(self, why: str) -> None:
        """One of which the cause is not known is taken to have that of the one before."""
        self._misses += 1
        self._cause = why or self._cause
        self.warm_until_s = -math.inf
        if self._misses >= BAD_AFTER:
            self.reason = self._cause or words.RECOMPUTED

    def timed(
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
        if tokens < SAMPLE_TOKENS:
            return
        own_s = max(_OWN_S, _OWN_STEPS * step_s)
        lag_s = max(0.0, seconds - own_s)
        self.seconds_per_1k_tokens = _mean(self.seconds_per_1k_tokens, 1_000 * seconds / tokens)
        self.lag_per_1k_tokens_s = _mean(self.lag_per_1k_tokens_s, 1_000 * lag_s / tokens)
        limit_s = own_s + wire_s if wire_s else _SLOW_FACTOR * max(recompute_s, _OWN_S)
        if seconds > limit_s:
            self._slow += 1
            self.slow_tokens, self._slow_s_per_token = tokens, seconds / tokens
        elif tokens * self._slow_s_per_token > limit_s:  # a shorter one is quick over any wire
            self._slow = 0


def _mean(known: float | None, sample: float) -> float:
    return sample if known is None else known + _WEIGHT * (sample - known)


class PairMap:
    """The pairs of one service."""

    def __init__(self) -> None:
        self.pairs: dict[PairKey, Pair] = {}
        self.delays: dict[str, Mapping[str, Delay]] = {}
        """By prefill instance: the decode instances that get its KV late, in prompt tokens that they would
        compute meanwhile."""
        self.giver_delays: Mapping[str, Delay] = {}
        """Seconds by prefill instance: of those whose KV every decode instance gets later than another's."""
        self.broken: tuple[str, ...] = ()
        """Prefill instances whose KV no decode instance gets: handing off costs time and brings nothing."""

    def __getitem__(self, key: PairKey) -> Pair:
        """The record of a pair, begun at its first use."""
        pair = self.pairs.get(key)
        if pair is None:
            if len(self.pairs) >= MOST_PAIRS:
                del self.pairs[min(self.pairs, key=lambda k: (self.pairs[k].last_used_s, k))]
            pair = self.pairs[key] = Pair()
        return pair

    def cool(self, name: str) -> None:
        """An instance has another engine process, or may have."""
        for key, pair in self.pairs.items():
            if name in key:
                pair.cool()

    def refresh(self, instances: Sequence[InstanceView], *, now_s: float) -> None:
        """Forget pairs of instances that are gone, and see what is cold, slow or broken."""
        known = {instance.name for instance in instances}
        for key in [key for key in self.pairs if not known.issuperset(key)]:
            del self.pairs[key]
        givers = [i for i in instances if i.serving and i.role is not Role.DECODE]
        takers = [i for i in instances if i.serving and i.role is not Role.PREFILL]
        late = self._late(givers, takers, now_s)
        speeds = {i.name: 1_000 / max(i.prefill_model.ttft_s(1_000), 1e-6) for i in takers}
        self.delays = {name: told for name, found in late.items() if (told := _in_tokens(found, speeds))}
        self.giver_delays = _beyond_least({name: _least(found.values()) for name, found in late.items()})
        self.broken = tuple(giver.name for giver in givers if self._is_broken(giver, takers))

    @property
    def handshake_s(self) -> float:
        """What a handshake is expected to take."""
        measured = [pair.handshake_s for pair in self.pairs.values() if pair.handshake_s is not None]
        return fmean(measured) if measured else HANDSHAKE_S

    def _late(
        self, givers: Iterable[InstanceView], takers: Sequence[InstanceView], now_s: float
    ) -> dict[str, dict[str, Delay]]:
        """What each hand-off would take longer than by a warm and quick pair, in seconds."""
        cold = Delay(self.handshake_s)
        lags = [p.lag_per_1k_tokens_s for p in self.pairs.values() if p.lag_per_1k_tokens_s is not None]
        usual_s = _ALIKE * min(lags, default=0.0)
        late = {giver.name: {i.name: cold for i in takers if i is not giver} for giver in givers}
        for key, pair in self.pairs.items():
            found = late.get(key.prefill)
            if found is not None and key.decode in found:
                found[key.decode] = _delay(pair, cold, usual_s, now_s)
        return late

    def _is_broken(self, giver: InstanceView, takers: Sequence[InstanceView]) -> bool:
        found = (self.pairs.get(PairKey(giver.name, taker.name)) for taker in takers)
        return bool(takers) and all(pair and pair.reason in CUT_OFF for pair in found)

    def due(self, instances: Sequence[InstanceView], *, now_s: float, interval_s: float) -> list[PairKey]:
        """The pairs of these instances that a canary should try now, the most urgent ones first.

        Those never used, then suspect ones, then those without traffic for `interval_s`; of each the longest
        unused first, and those that hand off by the roles of now.
        """
        ranked = [
            ((urgency, self._used_s(key), not _meet(giver, taker), key), key)
            for giver, taker in _mesh(instances)
            if (urgency := self._urgency(key := PairKey(giver.name, taker.name), now_s, interval_s))
        ]
        return [key for _, key in sorted(ranked)]

    def _used_s(self, key: PairKey) -> float:
        pair = self.pairs.get(key)
        return -math.inf if pair is None else pair.last_used_s

    def _urgency(self, key: PairKey, now_s: float, interval_s: float) -> int:
        """1 is the most urgent, 0 is none."""
        pair = self.pairs.get(key)
        if pair is None or pair.last_used_s == -math.inf:
            return 1
        idle_s = now_s - pair.last_used_s
        suspect = pair.suspect and pair.reason != words.SLOW_TRANSPORT  # a slow one works
        if suspect and idle_s >= (RETRY_S if pair.reason in words.BAD_TRANSFERS else 0.0):
            return 2
        return 3 if idle_s >= interval_s else 0

    def told(self) -> list[tuple[PairKey, Pair]]:
        """The pairs worth telling of: bad ones first, then the last used, at most `TOLD_PAIRS`."""
        if len(self.pairs) <= TOLD_PAIRS:
            return sorted(self.pairs.items())
        ranked = sorted(self.pairs.items(), key=lambda kv: (not kv[1].suspect, -kv[1].last_used_s, kv[0]))
        return sorted(ranked[:TOLD_PAIRS])


_PROMPT = Delay()


def _delay(pair: Pair, cold: Delay, usual_s: float, now_s: float) -> Delay:
    lag_s = max(0.0, (pair.lag_per_1k_tokens_s or 0.0) - usual_s)
    if pair.reason == words.HANDSHAKE_FAILED:
        wait_s = HANDSHAKE_TIMEOUT_S
    elif pair.warm_until_s <= now_s:
        wait_s = pair.handshake_s or cold.fixed
    elif lag_s:
        wait_s = 0.0
    else:
        return _PROMPT
    return Delay(wait_s, lag_s / 1_000)


def _in_tokens(late: Mapping[str, Delay], speeds: Mapping[str, float]) -> dict[str, Delay]:
    """What each could compute meanwhile, of those that get anything late; speeds are tokens a second."""
    return {
        name: Delay(delay.fixed * speeds[name], delay.per_token * speeds[name])
        for name, delay in late.items()
        if delay is not _PROMPT
    }


def _least(delays: Iterable[Delay]) -> Delay:
    return Delay(*map(min, zip(*delays, strict=True))) if (delays := tuple(delays)) else Delay()


def _beyond_least(delays: Mapping[str, Delay]) -> dict[str, Delay]:
    """Where all are late, nobody is: only what one takes longer than another tells who is chosen."""
    least = _least(delays.values())
    beyond = {
        name: Delay(*(one - other for one, other in zip(delay, least, strict=True)))
        for name, delay in delays.items()
    }
    return {name: delay for name, delay in beyond.items() if any(delay)}


def _mesh(instances: Sequence[InstanceView]) -> Iterable[tuple[InstanceView, InstanceView]]:
    """Every pair that can hand off; of many instances each one's to those 1, 2, 4, … places further on."""
    count = len(instances)
    if count <= MESH:
        pairs: Iterable[tuple[InstanceView, InstanceView]] = permutations(instances, 2)
    else:
        steps = [2**power for power in range(count.bit_length()) if 2**power < count]
        pairs = ((one, instances[(i + step) % count]) for i, one in enumerate(instances) for step in steps)
    return (pair for pair in pairs if _compatible(*pair))


def _compatible(giver: InstanceView, taker: InstanceView) -> bool:
    source, reader = giver.identity, taker.identity
    return source is None or reader is None or source is reader or can_transfer(source, reader).allowed


def _meet(giver: InstanceView, taker: InstanceView) -> bool:
    return giver.role is not Role.DECODE and taker.role is not Role.PREFILL
