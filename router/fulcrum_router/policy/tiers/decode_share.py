"""How much of decode the lower tiers may use, so that the highest one usually finds room.

The order of the waiting room decides who is prefilled next. Decode has no such order: an engine takes what it
gets, and each request that it decodes slows down the others and keeps its KV for as long as its answer takes.
So new requests of lower tiers wait in the router, until `level.MAX_HOLD_S` lets one pass, while each decode
instance would, with the request, have more in use than `TOKEN_SHARE` of the tokens that the tightest TPOT
objective of any tier allows, or `KV_SHARE` of its KV cache. An idle instance always has room, and an
objective that even an empty step misses limits nothing. Without tiers of different priorities nothing is
held, nor in mode Direct. `JourneyContext` has one, and `journey.eligible` asks `must_wait` for each request
that is about to be sent.

While a higher tier sends requests, the others are limited further. Their prompts get nothing of the spare
time of decode (`policy.deflection`), since each stalls all answers of its instance. They do not queue in
engines. And they ask for a flip to prefill only if `can_spare_one`.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from fulcrum_router.policy.instance_record import InstanceRecord

KV_SHARE = 0.8
"""Share of the KV cache that lower tiers may fill with prompts and predicted answers."""
TOKEN_SHARE = 0.75
"""A lower tier gets nothing of decode beyond this share of the tokens that meet the TPOT objective."""
SENDS_FOR_S = 30.0
"""Time after its last request for which a tier counts as one that sends requests. A request after a longer
pause may wait behind lower tiers: of random arrivals, 20 a minute, one in 22,000."""
MAX_REQUEST_SHARE = 0.5
"""Share of a limit that one request counts as at most: else a long prompt would need an empty instance."""


class DecodeShare:
    """The limits of the lower tiers of one service."""

    __slots__ = ("_last_arrival_s", "highest", "tpot_s")

    def __init__(self) -> None:
        self._last_arrival_s: dict[int, float] = {}
        """Time of the last request by priority, while there is more than one."""
        self.highest: int | None = None
        """Priority of the highest tier; None: all have the same."""
        self.tpot_s = math.inf
        """The tightest TPOT objective of all tiers."""

    def set_tiers(self, priorities: Collection[int], *, tpot_s: float) -> None:
        """Set the priorities of all tiers, and the tightest of their TPOT objectives.

        A higher number is a higher tier.
        """
        self.highest = max(priorities) if len(set(priorities)) > 1 else None
        self.tpot_s = tpot_s
        self._last_arrival_s = {p: at_s for p, at_s in self._last_arrival_s.items() if p in priorities}

    def record_arrival(self, priority: int, now_s: float) -> None:
        """A request of this priority arrived."""
        if self.highest is not None:
            self._last_arrival_s[priority] = now_s

    def is_used_by_higher(self, priority: int, now_s: float) -> bool:
        """Whether a higher tier than one of this priority sends requests."""
        return any(
            other > priority and at_s >= now_s - SENDS_FOR_S for other, at_s in self._last_arrival_s.items()
        )

    def must_wait(
        self, decode: Iterable[InstanceRecord], *, priority: int, tokens: float, kept: float = 0.0
    ) -> bool:
        """Whether a request of this priority has to wait.

        It has to if it is not of the highest tier, and none of these instances has room for its tokens.
        False without instances.

        Args:
            decode: The decode instances.
            priority: Of the request's tier.
            tokens: Of its prompt and its predicted answer.
            kept: Share of the KV cache that other tiers have reserved.
        """
        if self.highest is None or priority >= self.highest:
            return False
        known = False
        for instance in decode:
            if self._has_room(instance, tokens, find_kv_share(kept)):
                return False
            known = True
        return known

    def can_spare_one(self, decode: Sequence[InstanceRecord], others: Iterable[InstanceRecord]) -> bool:
        """Whether one decode instance fewer would still leave the highest tier its share.

        The tokens in use are taken as those that will be in use, wherever they are now: also answers on
        `others`, instances that have flipped to prefill.
        """
        limits = sorted(map(self._find_limit, decode))
        ledgers = [instance.ledger for instance in chain(decode, others)]
        in_use = sum(ledger.decode_tokens + ledger.reserved_tokens for ledger in ledgers)
        return in_use <= math.fsum(limits[:-1])

    def _find_limit(self, instance: InstanceRecord) -> float:
        """Tokens up to which lower tiers may use the instance."""
        capacity = instance.kv_capacity_tokens or math.inf
        return min(TOKEN_SHARE * self._find_max_tokens(instance), KV_SHARE * capacity)

    def _find_max_tokens(self, instance: InstanceRecord) -> float:
        return instance.decode_model.max_tokens(self.tpot_s) or math.inf

    def _has_room(self, instance: InstanceRecord, tokens: float, kv_share: float) -> bool:
        ledger = instance.ledger
        in_use = ledger.decode_tokens + ledger.reserved_tokens
        if not in_use:
            return True
        capacity = instance.kv_capacity_tokens
        if capacity and not _fits(in_use, tokens, kv_share * capacity):
            return False
        return _fits(in_use, tokens, TOKEN_SHARE * self._find_max_tokens(instance))


def find_kv_share(kept: float) -> float:
    """Share of the KV cache that lower tiers may fill while other tiers keep a share for themselves."""
    return min(KV_SHARE, 1.0 - kept)


def _fits(in_use: float, tokens: float, limit: float) -> bool:
    return in_use + min(tokens, MAX_REQUEST_SHARE * limit) <= limit
