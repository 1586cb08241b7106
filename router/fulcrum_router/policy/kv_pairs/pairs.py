"""All pairs of a service that can transfer KV: which are slow, broken or due for a canary.

Dispatch reads the delays and the broken prefill instances; the canary scheduler reads the pairs that are due;
metrics and state port report the records. `pair_record` holds what was measured of one pair. A pair is warm
while its engines keep their last handshake. The first transfer of a cold pair waits for a new handshake, and
an engine does one handshake at a time. A pair is suspect if its last transfer failed or it has a problem, and
broken if none of its transfers can succeed. `JourneyContext` has one; the canary scheduler refreshes it each
second.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from statistics import fmean

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.policy.candidates import can_fetch
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.kv_pairs.pair_record import PairKey, SourcePairs, TransferDelay, TransferPair

DEFAULT_HANDSHAKE_S = 0.2
"""Expected duration of a handshake before one was measured, in seconds."""
MAX_FULL_MESH_INSTANCES = 16
"""Largest service in which all pairs get canaries; in a larger one, only a sample of the pairs does."""
MAX_PAIRS_PER_SOURCE = 256
"""Largest number of pairs of one prefill instance with a record: about 150 KiB. The least recently used one
is dropped for a new one. Only services of more than 500 instances have this many decode instances."""
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
        self._by_source: dict[str, dict[str, TransferPair]] = {}
        """Pairs by prefill, then by decode instance; the least recently used pair of a source is first."""
        self._cold_s, self._least_lag_s_per_1k_tokens = DEFAULT_HANDSHAKE_S, 0.0
        self.prefill_delays: Mapping[str, TransferDelay] = {}
        """Least time of a KV transfer from each prefill instance to any decode instance. Prefill instances
        with a warm and fast pair are left out."""
        self.broken_prefill_instances: tuple[str, ...] = ()
        """Prefill instances whose pairs with all decode instances are broken: they get no prefill legs."""

    def __getitem__(self, key: PairKey) -> TransferPair:
        """Return the record of a pair that is used now; creates it at its first use.

        A source keeps `MAX_PAIRS_PER_SOURCE` records: a new one replaces the least recently used one.
        """
        pairs = self._by_source.get(key.prefill)
        if pairs is None:
            pairs = self._by_source[key.prefill] = {}
        pair = pairs.pop(key.decode, None)
        if pair is None:
            pair = TransferPair()
            if len(pairs) >= MAX_PAIRS_PER_SOURCE:
                del pairs[next(iter(pairs))]
        pairs[key.decode] = pair  # a dict keeps the order of insertion
        return pair

    def get(self, key: PairKey) -> TransferPair | None:
        """Return the record of a pair; None: it was never used, or its record was replaced."""
        pairs = self._by_source.get(key.prefill)
        return None if pairs is None else pairs.get(key.decode)

    def list_from(self, prefill: str) -> SourcePairs:
        """List the pairs of one prefill instance, for dispatch."""
        usual_lag = _SIMILAR_FACTOR * self._least_lag_s_per_1k_tokens
        return SourcePairs(self._by_source.get(prefill, _NO_PAIRS), self._cold_s, usual_lag)

    @property
    def pairs(self) -> dict[PairKey, TransferPair]:
        """The records of all pairs, in a new dictionary."""
        return dict(self._items())

    def _items(self) -> Iterator[tuple[PairKey, TransferPair]]:
        for prefill, pairs in self._by_source.items():
            for decode, pair in pairs.items():
                yield PairKey(prefill, decode), pair

    def _values(self) -> Iterator[TransferPair]:
        for pairs in self._by_source.values():
            yield from pairs.values()

    def invalidate(self, name: str) -> None:
        """Reset the pairs of an instance whose engine was restarted, or may have been."""
        for pair in self._by_source.get(name, _NO_PAIRS).values():
            pair.invalidate()
        for pairs in self._by_source.values():
            if name in pairs:
                pairs[name].invalidate()

    def refresh(self, instances: Sequence[InstanceRecord], *, now_s: float) -> None:
        """Drop the pairs of removed instances, and update delays and broken prefill instances."""
        known = {instance.name for instance in instances}
        self._by_source = {
            prefill: pairs if known.issuperset(pairs) else {d: p for d, p in pairs.items() if d in known}
            for prefill, pairs in self._by_source.items()
            if prefill in known
        }
        self._cold_s = self.handshake_s
        lags = (p.lag_s_per_1k_tokens for p in self._values() if p.lag_s_per_1k_tokens is not None)
        self._least_lag_s_per_1k_tokens = min(lags, default=0.0)
        prefill_instances = [i for i in instances if i.serving and i.role is not Role.DECODE]
        decode_instances = [i for i in instances if i.serving and i.role is not Role.PREFILL]
        found = {p.name: self._find_least_delay(p.name, decode_instances, now_s) for p in prefill_instances}
        self.prefill_delays = {name: delay for name, delay in found.items() if delay is not _NO_DELAY}
        self.broken_prefill_instances = tuple(
            prefill.name for prefill in prefill_instances if self._is_broken(prefill, decode_instances)
        )

    @property
    def handshake_s(self) -> float:
        """Expected duration of a handshake in seconds: the mean of those measured."""
        measured = [pair.handshake_s for pair in self._values() if pair.handshake_s is not None]
        return fmean(measured) if measured else DEFAULT_HANDSHAKE_S

    def _find_least_delay(
        self, prefill: str, decode_instances: Iterable[InstanceRecord], now_s: float
    ) -> TransferDelay:
        """Find the least delay of a prefill instance to any decode instance; similar lags count as equal."""
        pairs, least_lag_s = self.list_from(prefill), self._least_lag_s_per_1k_tokens
        wait_s = lag_s = math.inf
        for decode in decode_instances:
            if decode.name == prefill:
                continue
            pair = pairs.by_decode.get(decode.name)
            if pair is None:
                own_wait_s, own_lag_s = self._cold_s, 0.0
            else:
                own_wait_s, own_lag_s = (
                    pair.estimate_wait_s(self._cold_s, now_s),
                    pair.lag_s_per_1k_tokens or 0.0,
                )
            wait_s = min(wait_s, own_wait_s)
            lag_s = min(lag_s, least_lag_s + max(0.0, own_lag_s - _SIMILAR_FACTOR * least_lag_s))
            if not wait_s and not lag_s:
                return _NO_DELAY
        return _NO_DELAY if wait_s == math.inf else TransferDelay(wait_s, lag_s / 1_000)

    def _is_broken(self, prefill: InstanceRecord, decode_instances: Sequence[InstanceRecord]) -> bool:
        pairs = self._by_source.get(prefill.name, _NO_PAIRS)
        if not pairs or not decode_instances:
            return False
        for decode in decode_instances:
            pair = pairs.get(decode.name)
            if pair is None or pair.reason not in BROKEN_REASONS:
                return False
        return True

    def list_due(
        self, instances: Sequence[InstanceRecord], *, now_s: float, interval_s: float
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
        pair = self.get(key)
        return -math.inf if pair is None else pair.last_used_s

    def _rank_urgency(self, key: PairKey, now_s: float, interval_s: float) -> int:
        """Rank how soon a pair needs a canary: 1 is the most urgent, 0 is not due."""
        pair = self.get(key)
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
        pairs = [
            (not pair.suspect, -pair.last_used_s, prefill, decode)
            for prefill, by_decode in self._by_source.items()
            for decode, pair in by_decode.items()
        ]
        # 200 instances have 10,000 pairs: sorting them all took six times as long, at each poll of the state.
        chosen = heapq.nsmallest(MAX_REPORTED_PAIRS, pairs) if len(pairs) > MAX_REPORTED_PAIRS else pairs
        keys = sorted(PairKey(prefill, decode) for _, _, prefill, decode in chosen)
        return [(key, self._by_source[key.prefill][key.decode]) for key in keys]


_NO_DELAY = TransferDelay()
_NO_PAIRS: dict[str, TransferPair] = {}
"""Never written to."""


def _list_candidate_pairs(
    instances: Sequence[InstanceRecord],
) -> Iterable[tuple[InstanceRecord, InstanceRecord]]:
    """List compatible pairs; in a large service, each instance only with the 1st, 2nd, 4th … after it."""
    count = len(instances)
    if count <= MAX_FULL_MESH_INSTANCES:
        pairs: Iterable[tuple[InstanceRecord, InstanceRecord]] = permutations(instances, 2)
    else:
        steps = [2**power for power in range(count.bit_length()) if 2**power < count]
        pairs = ((one, instances[(i + step) % count]) for i, one in enumerate(instances) for step in steps)
    return (pair for pair in pairs if can_fetch(pair[0].identity, pair[1].identity))


def _matches_roles(prefill: InstanceRecord, decode: InstanceRecord) -> bool:
    return prefill.role is not Role.DECODE and decode.role is not Role.PREFILL
