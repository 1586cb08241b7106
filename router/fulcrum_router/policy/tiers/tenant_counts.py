"""Requests by tenant and result: the tenants with the most requests by name, and all others together.

Anybody may send requests in the name of many tenants, so series of all of them would have no bound. A tenant
is named as long as there is a place. Each minute a tenant without a place that sent more than twice as many
requests as a named one takes the place of that one, and begins at 0. The counts of the others only grow: what
was counted under a name is never added to them. `Counters` has one, and `tier_metrics` shows it. No rate
limit and no order reads it.
"""

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

DEFAULT_NAMED_TENANTS = 6
"""Tenants that are counted by name, unless a service sets another number."""
OTHERS = "(others)"
"""Stands for all tenants without a name, and for a tenant that a trusted proxy calls so."""
WINDOW_S = 60.0
"""How often the tenants that are named are chosen anew."""
FORGOTTEN_AFTER_S = 3_600.0
"""Time after which a tenant without requests is no longer named."""
_SENDERS_MAX = 1_000
"""Tenants whose requests are compared in one window; further ones wait for the next."""


class TenantResult(StrEnum):
    """What a tenant got for a request: metric label."""

    MET = "met"
    """It met its objectives."""
    MISSED = "missed"
    REFUSED = "refused"
    """It was not admitted."""
    LIMITED = "limited"
    """It was over the tenant's rate limit."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class _Row:
    __slots__ = ("counts", "last_s")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(TenantResult, 0)
        self.last_s = 0.0


class TenantCounts:
    """The counts of one router. Times are seconds of one clock, the caller's."""

    __slots__ = ("_chosen_at_s", "_named", "_named_max", "_others", "_recent")

    def __init__(self) -> None:
        self._named: dict[str, _Row] = {}
        self._named_max = DEFAULT_NAMED_TENANTS
        self._others = _Row()
        self._recent: Counter[str] = Counter()
        """Requests of this window by tenant."""
        self._chosen_at_s = 0.0

    def name_at_most(self, count: int) -> None:
        """Count no more tenants than these by name; those with the fewest requests lose theirs."""
        self._named_max = count
        named = self._named
        for tenant in sorted(named, key=lambda tenant: (-sum(named[tenant].counts.values()), tenant))[count:]:
            del named[tenant]

    def record(self, tenant: str, result: TenantResult, now_s: float) -> None:
        """Count a request that ended."""
        if now_s >= self._chosen_at_s + WINDOW_S:
            self._choose(now_s)
        recent = self._recent
        if tenant in recent or len(recent) < _SENDERS_MAX:
            recent[tenant] += 1
        row = self._named.get(tenant)
        if row is None:
            row = self._others
            if len(self._named) < self._named_max and tenant != OTHERS:
                row = self._named[tenant] = _Row()
        row.counts[result] += 1
        row.last_s = now_s

    def list_counts(self, now_s: float) -> Iterator[tuple[str, TenantResult, int]]:
        """Yield tenant, result and count; `OTHERS` only if a tenant without a name was counted."""
        self._forget_idle(now_s)
        rows = {
            **dict(sorted(self._named.items())),
            **({OTHERS: self._others} if self._others.last_s else {}),
        }
        for tenant, row in rows.items():
            for result, count in row.counts.items():
                yield tenant, result, count

    def _choose(self, now_s: float) -> None:
        """Give places to tenants that sent more than twice as many requests, and begin a window."""
        self._forget_idle(now_s)
        recent, named = self._recent, self._named
        del recent[OTHERS]
        least = sorted(named, key=lambda tenant: (recent[tenant], tenant))
        most = sorted(recent.keys() - named.keys(), key=lambda tenant: (-recent[tenant], tenant))
        for less, more in zip(least, most, strict=False):
            if recent[more] <= 2 * recent[less]:
                break
            del named[less]
            row = named[more] = _Row()
            row.last_s = now_s
        recent.clear()
        self._chosen_at_s = now_s

    def _forget_idle(self, now_s: float) -> None:
        named = self._named
        for tenant in [name for name, row in named.items() if now_s - row.last_s > FORGOTTEN_AFTER_S]:
            del named[tenant]
