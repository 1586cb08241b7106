"""All pairs of a service that can transfer KV: which are slow, broken or due for a canary.

Dispatch reads the delays and the broken prefill instances; the canary scheduler reads the pairs that are due;
metrics and state port report the records. `pair_record` holds what was measured of one pair.
A pair is warm while its engines keep their last handshake. The first transfer of a cold pair waits for a new
handshake, and an engine does one handshake at a time.
A pair is suspect if its last transfer failed or it has a problem, and broken if none of its transfers can
succeed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from statistics import fmean

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.policy.dispatch import InstanceView, TransferDelay, can_read
from fulcrum_router.policy.pair_record import HANDSHAKE_TIMEOUT_S, PairKey, TransferPair

DEFAULT_HANDSHAKE_S = 0.2
"""Expected duration of a handshake before one was measured, in seconds."""
MAX_FULL_MESH_INSTANCES = 16
"""Largest service in which all pairs get canaries; in a larger one, only a sample of the pairs does."""
MAX_PAIRS = 1_024
"""Largest number of pairs with a record; the least recently used one is dropped for a new one."""
MAX_REPORTED_PAIRS = 256
"""Largest number of pairs in metrics and router state."""
PROBLEM_PAIR_RETRY_S = 10.0
"""Seconds after which a pair with a known problem gets another canary."""
_SIMILAR_FACTOR = 2.0
"""Pairs up to this many times slower than the fastest count as equally fast."""

BROKEN_REASONS = frozenset({conditions.HANDSHAKE_FAILED, conditions.INCOMPATIBLE})
"""Reasons of a broken pair: no transfer can succeed, however often it is retried."""


class TransferPairs:
    """The pairs of one service. Times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self.pairs: dict[PairKey, TransferPair] = {}
        self.decode_delay_tokens: dict[str, Mapping[str, TransferDelay]] = {}
        """Delays by prefill instance, then by decode instance, in prompt tokens that the decode instance
        could compute meanwhile. Decode instances without a delay are left out."""
        self.prefill_delays_s: Mapping[str, TransferDelay] = {}
        """Least delay of each prefill instance to any decode instance, in seconds more than the best prefill
        instance's. Prefill instances without a delay are left out."""
        self.broken_prefill_instances: tuple[str, ...] = ()
        """Prefill instances whose pairs with all decode instances are broken: they get no prefill legs."""

    def __getitem__(self, key: PairKey) -> TransferPair:
        """Return the record of a pair; creates it at its first use."""
        pair = self.pairs.get(key)
        if pair is None:
            if len(self.pairs) >= MAX_PAIRS:  # drop the least recently used pair
                del self.pairs[min(self.pairs, key=lambda k: (self.pairs[k].last_used_s, k))]
            pair = self.pairs[key] = TransferPair()
        return pair

    def invalidate(self, name: str) -> None:
        """Reset the pairs of an instance whose engine was restarted, or may have been."""
        for key, pair in self.pairs.items():
            if name in key:
                pair.invalidate()

    def refresh(self, instances: Sequence[InstanceView], *, now_s: float) -> None:
        """Drop the pairs of removed instances, and update delays and broken prefill instances."""
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
        """Expected duration of a handshake in seconds: the mean of those measured."""
        measured = [pair.handshake_s for pair in self.pairs.values() if pair.handshake_s is not None]
        return fmean(measured) if measured else DEFAULT_HANDSHAKE_S

    def _find_delays(
        self,
        prefill_instances: Iterable[InstanceView],
        decode_instances: Sequence[InstanceView],
        now_s: float,
    ) -> dict[str, dict[str, TransferDelay]]:
        """Find each delay in seconds compared with a warm and fast pair, by prefill and decode."""
        cold = TransferDelay(self.handshake_s)
        lags = [p.lag_s_per_1k_tokens for p in self.pairs.values() if p.lag_s_per_1k_tokens is not None]
        usual_s = _SIMILAR_FACTOR * min(lags, default=0.0)
        # A pair without a record has never transferred, so it is cold.
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
        """List the pairs of these instances that are due for a canary, the most urgent first.

        Pairs that were never used come first, then suspect ones, then those without traffic for
        `interval_s`. Among equals, the least recently used pair comes first; if these are equal too, a pair
        whose instances have the matching roles now.
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
        """Rank how soon a pair needs a canary: 1 is the most urgent, 0 is not due."""
        pair = self.pairs.get(key)
        if pair is None or pair.last_used_s == -math.inf:
            return 1
        idle_s = now_s - pair.last_used_s
        suspect = pair.suspect and pair.reason != conditions.SLOW_TRANSPORT  # a slow pair works
        if suspect and idle_s >= (
            PROBLEM_PAIR_RETRY_S if pair.reason in conditions.KV_TRANSFER_PROBLEMS else 0.0
        ):
            return 2
        return 3 if idle_s >= interval_s else 0

    def list_reported(self) -> list[tuple[PairKey, TransferPair]]:
        """List the pairs to report, by key. Above `MAX_REPORTED_PAIRS`: suspect ones, then the last used."""
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
    """Convert delays in seconds to the tokens that each decode instance could compute meanwhile.

    `speeds` are prefill tokens per second. Instances without a delay are left out.
    """
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
    """Subtract the least delay from all, and drop zeros: equal delays penalise no instance."""
    least_delay = _find_least_delay(delays.values())
    excess = {
        name: TransferDelay(*(one - other for one, other in zip(delay, least_delay, strict=True)))
        for name, delay in delays.items()
    }
    return {name: delay for name, delay in excess.items() if any(delay)}


def _list_candidate_pairs(instances: Sequence[InstanceView]) -> Iterable[tuple[InstanceView, InstanceView]]:
    """List compatible pairs; in a large service, each instance only with the 1st, 2nd, 4th … after it."""
    count = len(instances)
    if count <= MAX_FULL_MESH_INSTANCES:
        pairs: Iterable[tuple[InstanceView, InstanceView]] = permutations(instances, 2)
    else:
        steps = [2**power for power in range(count.bit_length()) if 2**power < count]
        pairs = ((one, instances[(i + step) % count]) for i, one in enumerate(instances) for step in steps)
    return (pair for pair in pairs if can_read(pair[0].identity, pair[1].identity))


def _matches_roles(prefill: InstanceView, decode: InstanceView) -> bool:
    return prefill.role is not Role.DECODE and decode.role is not Role.PREFILL
