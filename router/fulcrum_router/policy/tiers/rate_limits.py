"""Rate limits: the tokens that each tenant of a tier may use in a minute, prompt and output.

Each tenant has a bucket that holds as many tokens as a minute allows, and is filled evenly. A request takes
its prompt and its expected output when it arrives, and gives back or takes more when it ends: see
`token_account`. A request that is larger than the bucket passes when the bucket is full, and the tenant then
waits for longer: otherwise no limit would let it pass.

Requests without a tenant share one bucket. A bucket that is forgotten is full again: tenants are only limited
if they cannot choose their own names (`spec.router.auth`). `JourneyContext` takes from the buckets and gives
back; a request over the limit is answered 429 by the data path.
"""

from collections import OrderedDict
from collections.abc import Mapping

MAX_TENANTS = 4_096
"""Tenants of one tier that are remembered; of more, the one whose last request is the oldest is forgotten."""


class TokenBuckets:
    """The buckets of one tier's tenants. Times are seconds of the caller's clock."""

    __slots__ = ("_buckets", "tokens_per_minute")

    def __init__(self, tokens_per_minute: int) -> None:
        self.tokens_per_minute = tokens_per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens of each tenant (below 0 after a large request) and their time; the last request is last."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, tenant: str, tokens: float, now_s: float) -> float:
        """Take tokens, and return 0.0; or take none, and return the seconds until there are enough."""
        limit = self.tokens_per_minute
        left, until_s = self._find_left(tenant, now_s)
        missing = 0.0 if tokens <= left else max(0.0, min(tokens, limit) - left)
        self._buckets[tenant] = left if missing else left - tokens, until_s
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)
        return 60.0 * missing / limit

    def give_back(self, tenant: str, tokens: float, now_s: float) -> None:
        """Give back tokens that were not used; less than 0: take more."""
        if tenant in self._buckets:
            left, until_s = self._find_left(tenant, now_s)
            self._buckets[tenant] = min(left + tokens, float(self.tokens_per_minute)), until_s

    def _find_left(self, tenant: str, now_s: float) -> tuple[float, float]:
        """The tokens that a tenant has, and the time up to which its bucket was filled for them.

        Some events have an earlier time than the one before: that of the request's arrival.
        """
        limit = float(self.tokens_per_minute)
        left, since_s = self._buckets.get(tenant, (limit, now_s))
        if now_s > since_s:
            left, since_s = left + limit / 60 * (now_s - since_s), now_s
        return left if left < limit else limit, since_s


class RateLimits:
    """The buckets of all tiers that have a limit."""

    __slots__ = ("by_tier",)

    def __init__(self) -> None:
        self.by_tier: dict[str, TokenBuckets] = {}

    def set_limits(self, tokens_per_minute: Mapping[str, int]) -> None:
        """Set the limits by tier; buckets of tiers that keep having one stay as full as they are."""
        before, self.by_tier = self.by_tier, {}
        for tier, limit in tokens_per_minute.items():
            buckets = self.by_tier[tier] = before.get(tier, TokenBuckets(limit))
            buckets.tokens_per_minute = limit
