"""What became of the requests: plain counters, cheap enough for the data path.

They become Prometheus families only when somebody scrapes (`metrics`).
"""

from bisect import bisect_left
from collections import defaultdict
from enum import StrEnum

from fulcrum_core.values import Role
from fulcrum_router.settings import Tier

TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

BY_DESIGN = frozenset({"several_prompts", "several_answers"})
"""Reasons for a local prefill that are the request's, not a fault's."""


PREFILL, DECODE = "prefill", "decode"
"""The phases, as labels."""


class Outcome(StrEnum):
    """How a request ended. Invalid ones are the client's fault and no load that was offered."""

    OK = "ok"
    INVALID = "invalid"
    FAILED = "failed"
    BROKEN = "broken"
    CANCELLED = "cancelled"

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


_OK, _INVALID = Outcome.OK, Outcome.INVALID  # an attribute of an enum is slow to read


class Histogram:
    """Counts per bucket; the last bucket is what lies above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class TierBooks:
    """The requests of one tier."""

    __slots__ = ("ended", "offered", "slo_met", "tpot", "ttft")

    def __init__(self) -> None:
        self.offered = 0
        self.slo_met = 0
        self.ended = dict.fromkeys(Outcome, 0)
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.tpot = Histogram(TPOT_BOUNDS_S)


class Books:
    """Everything the router counts."""

    def __init__(self) -> None:
        self.tiers: dict[str, TierBooks] = {}
        self.legs: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Legs by phase and outcome (`ok`, or the failure)."""
        self.retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Attempts after a failure, by phase and reason of the failure."""
        self.local: defaultdict[str, int] = defaultdict(int)
        """Requests decoded without a hand-off, by reason."""
        self.dispatched: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Choices by phase and reason."""
        self.flips_wanted: defaultdict[Role, int] = defaultdict(int)
        self.ejections: defaultdict[str, int] = defaultdict(int)
        """Ejections by reason."""
        self.refused_assignments = 0
        self.caches_left = 0
        """Prefix caches not used any more, because a hand-off may have been fetched too late."""
        self.takeovers = 0
        """Times that this router became the active one."""
        self.output_tokens = 0

    def tier(self, name: str) -> TierBooks:
        """The books of a tier, opened at its first request."""
        books = self.tiers.get(name)
        if books is None:
            books = self.tiers[name] = TierBooks()
        return books

    def finish(self, tier: Tier, outcome: Outcome, *, ttft_s: float | None, tpot_s: float | None) -> None:
        """A request ended. Objectives are judged for whole answers only."""
        books = self.tier(tier.name)
        books.ended[outcome] += 1
        if outcome is _INVALID:
            books.offered -= 1
            return
        if ttft_s is not None:
            books.ttft.observe(ttft_s)
        if tpot_s is not None:
            books.tpot.observe(tpot_s)
        if outcome is _OK and ttft_s is not None and tier.slo.met(ttft_s=ttft_s, tpot_s=tpot_s):
            books.slo_met += 1

    @property
    def local_prefills(self) -> int:
        """Requests decoded without a hand-off because something was wrong."""
        return sum(count for reason, count in self.local.items() if reason not in BY_DESIGN)
