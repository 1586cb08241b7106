"""The share of prefill and decode that is kept for tiers with `reservedFraction`.

A prompt cannot be interrupted: one that arrives while every instance computes a long prompt of another tier
waits for the first of them, however high its priority is. So while a tier with a reserve sends requests, some
prefill instances are kept *spare* for it: they get no work of other tiers that would keep them for longer
than `SPARE_S`. That is its fraction of the prefill instances, rounded up, less those that compute its prompts
now; one instance at least is for everybody. Which instances these are is not fixed: it only counts how many
are spare.

The reserve is lent while it is idle: short prompts always use it, and all prompts do when the tier has sent
no request for `IDLE_S`. Then it is back with the next dispatch. In decode, the other tiers leave at least the
fraction of the KV cache free (`decode_share`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fulcrum_router.policy.candidates import V

SPARE_S = 0.1
"""Predicted prefill work up to which an instance counts as spare."""
IDLE_S = 10.0
"""Time without a request after which the reserve of a tier is lent."""


class TierReserve:
    """The reserves of one service, and which instances compute prompts of the tiers that have one."""

    __slots__ = ("_computing", "_fractions", "_last_arrival_s")

    def __init__(self) -> None:
        self._fractions: dict[str, float] = {}
        self._computing: Counter[str] = Counter()
        """Prompts in flight of tiers with a reserve, by prefill instance."""
        self._last_arrival_s: dict[str, float] = {}

    def set_fractions(self, fractions: Mapping[str, float]) -> None:
        """Set the reserved fraction by tier. Those of a sum above 1 count in proportion."""
        scale = max(1.0, math.fsum(fractions.values()))
        self._fractions = {tier: fraction / scale for tier, fraction in fractions.items() if fraction > 0}
        self._last_arrival_s = {
            tier: at_s for tier, at_s in self._last_arrival_s.items() if tier in self._fractions
        }

    def record_arrival(self, tier: str, now_s: float) -> None:
        """A request of a tier arrived, which takes its reserve back."""
        if tier in self._fractions:
            self._last_arrival_s[tier] = now_s

    def begin(self, tier: str, instance: str) -> bool:
        """Count a prompt that an instance gets; False: its tier has no reserve, and nothing is counted."""
        if tier not in self._fractions:
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
        for tier, fraction in self._fractions.items():
            kept = fraction if self._last_arrival_s.get(tier, -math.inf) >= now_s - IDLE_S else 0.0
            yield tier, kept, fraction - kept

    def find_kept_fraction(self, tier: str, now_s: float) -> float:
        """The fraction that other tiers than this one have reserved and do not lend now."""
        if not self._fractions:
            return 0.0
        return math.fsum(kept for other, kept, _ in self.list_fractions(now_s) if other != tier)

    def list_kept(self, instances: Sequence[V], tier: str, *, tokens: int, now_s: float) -> tuple[str, ...]:
        """Names of those prefill instances, of `instances`, that a prompt of `tokens` must leave to other
        tiers."""
        fraction = self.find_kept_fraction(tier, now_s)
        if not fraction:
            return ()
        in_use = sum(instance.name in self._computing for instance in instances)
        wanted = min(math.ceil(fraction * len(instances)), len(instances) - 1) - in_use
        if wanted <= 0:
            return ()
        left_s = {instance.name: instance.ledger.remaining_s(now_s) for instance in instances}
        spare = [name for name, seconds in left_s.items() if seconds <= SPARE_S]
        return tuple(
            instance.name
            for instance in instances
            if left_s[instance.name] + instance.prefill_model.ttft_s(tokens) > SPARE_S
            and len(spare) - (instance.name in spare) < wanted
        )
