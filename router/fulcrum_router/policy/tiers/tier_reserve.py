"""The share of prefill and decode that is kept for tiers with `reservedFraction`.

A prompt cannot be interrupted: one that arrives while every instance computes a long prompt of another tier
waits for the first of them, however high its priority is. So while a tier with a reserve sends requests, some
prefill instances are kept *spare* for it: they get no work of other tiers that would keep them for longer
than `SPARE_S`. That is its fraction of the prefill instances, rounded up, less those that compute its prompts
now; one instance at least is for everybody. Which instances these are is not fixed: it only counts how many
are spare.

The reserve is lent while it is idle: short prompts always use it, and all prompts do when the tier has sent
no request for `IDLE_S`. But in as many instances as are lent, no prompt waits behind another one for longer
than `SPARE_S`. So when the tier returns, its first prompt waits for one other and `SPARE_S` at most, as far
as predictions are right. In decode, the lower tiers leave at least the fraction of the KV cache free
(`decode_share`). An answer that runs cannot be interrupted: so there the idle reserve is lent to answers that
are expected to end within `Reserve.reclaim_within_s`, W. It is lent to a longer one if the answers that still
run after 0.8·W, this one included, fit beside the reserves: with E the expected tokens of an answer

    Σ E(answers that end later than now + 0.8·W)  ≤  KV cache − all reserves that are due by then

holds when one is sent, and then until another is sent, since the sum only falls as time passes. So whenever
the tier returns, its reserve is free within that time, as far as answers are no longer than expected.

`JourneyContext` has one. Journeys record arrivals and ends, and ask it before they send; it sends and refuses
nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fulcrum_router.policy.candidates import V

SPARE_S = 0.1
"""Predicted prefill work up to which an instance counts as spare."""
IDLE_S = 10.0
"""Time without a request after which the reserve of a tier is lent."""


class Reserve(NamedTuple):
    """What one tier reserves."""

    fraction: float = 0.0
    """Share of the prefill instances and of decode, 0 to 1."""
    reclaim_within_s: float = math.inf
    """Time after which the idle reserve of decode is free again if the tier returns, in seconds."""


NO_RESERVE = Reserve()


class TierReserve:
    """The reserves of one service, and which instances compute prompts of the tiers that have one."""

    __slots__ = ("_computing", "_last_arrival_s", "_reserves")

    def __init__(self) -> None:
        self._reserves: dict[str, Reserve] = {}
        self._computing: Counter[str] = Counter()
        """Prompts in flight of tiers with a reserve, by prefill instance."""
        self._last_arrival_s: dict[str, float] = {}

    def set_reserves(self, reserves: Mapping[str, Reserve]) -> None:
        """Set the reserves by tier. Fractions of a sum above 1 count in proportion."""
        scale = max(1.0, math.fsum(reserve.fraction for reserve in reserves.values()))
        self._reserves = {
            tier: reserve._replace(fraction=reserve.fraction / scale)
            for tier, reserve in reserves.items()
            if reserve.fraction > 0
        }
        self._last_arrival_s = {
            tier: at_s for tier, at_s in self._last_arrival_s.items() if tier in self._reserves
        }

    def record_arrival(self, tier: str, now_s: float) -> None:
        """A request of a tier arrived, which takes its reserve back."""
        if tier in self._reserves:
            self._last_arrival_s[tier] = now_s

    def begin(self, tier: str, instance: str) -> bool:
        """Count a prompt that an instance gets; False: its tier has no reserve, and nothing is counted."""
        if tier not in self._reserves:
            return False
        self._computing[instance] += 1
        return True

    def end(self, instance: str) -> None:
        """The instance has computed a prompt that was counted, or has given it up."""
        self._computing[instance] -= 1
        if not self._computing[instance]:
            del self._computing[instance]

    def list_fractions(self, now_s: float) -> Iterator[tuple[str, float, float]]:
        """Yield each tier with a reserve, the fraction that is kept for it now, and the one that it lends."""
        for tier, reserve in self._reserves.items():
            kept = reserve.fraction if self._is_used(tier, now_s) else 0.0
            yield tier, kept, reserve.fraction - kept

    def _is_used(self, tier: str, now_s: float) -> bool:
        return self._last_arrival_s.get(tier, -math.inf) >= now_s - IDLE_S

    def find_kept_fraction(self, tier: str, now_s: float) -> float:
        """The fraction that other tiers than this one have reserved and do not lend now."""
        used = [
            r.fraction for other, r in self._reserves.items() if other != tier and self._is_used(other, now_s)
        ]
        return math.fsum(used) if used else 0.0

    def lends(self, tier: str, now_s: float) -> bool:
        """Whether another tier lends its reserve to this one now."""
        return any(other != tier and not self._is_used(other, now_s) for other in self._reserves)

    def find_kept_decode(
        self, tier: str, *, stay_s: float, now_s: float, predict_kv_in_use: Callable[[float], float]
    ) -> float:
        """The fraction of decode that others do not lend to an answer that is expected to take `stay_s`.

        `predict_kv_in_use` returns the share of decode that is still in use after a time, with this answer.
        """
        return math.fsum(
            reserve.fraction
            for other, reserve in self._reserves.items()
            if other != tier
            and (
                self._is_used(other, now_s)
                or (
                    stay_s > (within_s := reserve.reclaim_within_s)
                    and predict_kv_in_use(within_s) > 1.0 - self._sum_due(within_s)
                )
            )
        )

    def _sum_due(self, within_s: float) -> float:
        """All reserves that are to be free within a time."""
        return math.fsum(r.fraction for r in self._reserves.values() if r.reclaim_within_s <= within_s)

    @property
    def is_empty(self) -> bool:
        """Whether no tier has a reserve."""
        return not self._reserves

    def count_own(self, tier: str, instances: int) -> int:
        """How many of so many prefill instances a tier has reserved for itself."""
        reserve = self._reserves.get(tier)
        return 0 if reserve is None else _count_kept(reserve.fraction, instances)

    def list_left(self, instances: tuple[V, ...], tier: str, *, tokens: int, now_s: float) -> tuple[V, ...]:
        """The prefill instances that the reserves of others leave to a prompt of a tier.

        Reserved are those that compute for a tier with a reserve, and then those with the least work. A
        prompt that leaves an idle instance spare may use it.
        """
        wanted = _count_kept(self.find_kept_fraction(tier, now_s), len(instances))
        if not wanted:
            return instances
        in_order = sorted(
            instances, key=lambda i: (i.name not in self._computing, i.ledger.remaining_s(now_s))
        )
        reserved = {i.name for i in in_order[:wanted] if i.prefill_model.ttft_s(tokens) > SPARE_S}
        return tuple(i for i in in_order if i.name not in reserved) if reserved else instances

    def list_kept(self, instances: Sequence[V], tier: str, *, tokens: int, now_s: float) -> tuple[str, ...]:
        """Names of those prefill instances, of `instances`, that a prompt of `tokens` must leave to other
        tiers."""
        fraction = self.find_kept_fraction(tier, now_s)
        if not fraction:
            return ()
        in_use = sum(instance.name in self._computing for instance in instances)
        kept_spare = _count_kept(fraction, len(instances)) - in_use
        if kept_spare <= 0:
            return ()
        left_s = {instance.name: instance.ledger.remaining_s(now_s) for instance in instances}
        spare = {name for name, seconds in left_s.items() if seconds <= SPARE_S}
        return tuple(
            instance.name
            for instance in instances
            if left_s[instance.name] + instance.prefill_model.ttft_s(tokens) > SPARE_S
            and len(spare) - (instance.name in spare) < kept_spare
        )

    def list_lent(self, instances: Sequence[V], tier: str, *, tokens: int, now_s: float) -> tuple[str, ...]:
        """Names of those prefill instances in which a prompt of `tokens` may not wait behind another one.

        They are as many as other tiers lend now, of those that compute for no tier with a reserve. A prompt
        may wait in any of `instances` if enough others have none that waits.
        """
        lent = math.fsum(
            reserve.fraction
            for other, reserve in self._reserves.items()
            if other != tier and not self._is_used(other, now_s)
        )
        wanted = _count_kept(lent, len(instances))
        if not wanted:
            return ()
        others = [instance for instance in instances if instance.name not in self._computing]
        without_waiting = {i.name for i in others if i.ledger.behind_oldest_s <= SPARE_S}
        return tuple(
            i.name
            for i in others
            if len(without_waiting) - (i.name in without_waiting) < wanted
            and i.ledger.remaining_s(now_s) > SPARE_S
            and i.ledger.behind_oldest_s + i.prefill_model.ttft_s(tokens) > SPARE_S
        )


def _count_kept(fraction: float, instances: int) -> int:
    """Prefill instances that a fraction keeps: rounded up, and one is for everybody."""
    return max(0, min(math.ceil(fraction * instances), instances - 1))
