"""The outcome of each request, and the figures over all requests of a run.

Every offered request has exactly one outcome: ok, refused (429: admission or a rate limit), failed (no byte
of a response arrived), broken (the response started and did not finish) or wrong (it finished with another
text or token count than expected).
The router judges by the same rules (docs/decisions/0016). Clients that leave and whole responses do not occur
here: the generator waits for each response, and streams them all.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from fulcrum_core.values import Slo
from fulcrum_simulator.percentile import percentile


class OutcomeKind(StrEnum):
    """The kinds of outcome."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"
    BROKEN = "broken"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The outcome of one request. Latencies count from its intended sending time.

    `tpot_s` = (last − first token time) / (tokens − 1); None with a single token. `error_reported`: a broken
    stream ended with an error event. `reason` is empty if the request is ok or refused. `retry_after_s`: what
    a refused client was told, in seconds; 0: nothing.
    """

    index: int
    kind: OutcomeKind
    sent_late_s: float
    end_s: float
    input_tokens: int = 0
    output_tokens: int = 0
    tier: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    error_reported: bool = False
    reason: str = ""
    retry_after_s: int = 0

    def meets(self, slo: Slo) -> bool:
        """Whether the request is ok and met both objectives."""
        if self.kind is not OutcomeKind.OK or self.ttft_s is None:
            return False
        return slo.is_met(ttft_s=self.ttft_s, tpot_s=self.tpot_s)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles and means over the ok requests; None if there are none."""

    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    ttft_mean_s: float | None = None
    tpot_mean_s: float | None = None


@dataclass(slots=True)
class TierCounts:
    """Requests of one tier so far. A refused request is a miss, as any other that is not `met`."""

    offered: int = 0
    ended: int = 0
    ok: int = 0
    refused: int = 0
    met: int = 0
    met_tokens: int = 0
    """Prompt and output tokens of the requests that met both objectives."""
    first_refused_s: float | None = None
    """When the first one was refused, on the clock of the outcomes."""

    @property
    def attainment(self) -> float | None:
        """Share of the offered requests that met both objectives; None without requests."""
        return self.met / self.offered if self.offered else None

    def record(self, outcome: LoadOutcome, slo: Slo) -> None:
        """Count an outcome."""
        self.ended += 1
        self.ok += outcome.kind is OutcomeKind.OK
        if outcome.kind is OutcomeKind.REFUSED:
            self.refused += 1
            self.first_refused_s = outcome.end_s if self.first_refused_s is None else self.first_refused_s
        if outcome.meets(slo):
            self.met += 1
            self.met_tokens += outcome.input_tokens + outcome.output_tokens


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The figures of a run. offered = ok + refused + failed + broken + wrong + in_flight; in_flight is 0 once
    the run has ended.
    """

    offered: int
    ok: int
    refused: int
    failed: int
    broken: int
    wrong: int
    in_flight: int
    broken_silently: int
    connection_waits: int
    output_tokens: int
    attainment: float | None
    latencies: Latencies
    sent_late_p99_s: float | None
    reasons: dict[str, int]
    tiers: dict[str, TierCounts]
    """By tier, in the order of their first requests; empty if the load names none."""


@dataclass(slots=True)
class LoadResults:
    """Counts of offered and ended requests.

    The load generator writes them, the live view and the report read them.
    """

    slo: Slo
    offered: int = 0
    connection_waits: int = 0
    by_kind: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
    slo_met: int = 0
    output_tokens: int = 0
    outcomes: list[LoadOutcome] = field(default_factory=list)
    tiers: dict[str, TierCounts] = field(default_factory=dict)
    """Requests that name a tier, by its name."""

    def record_offered(self, tier: str = "") -> int:
        """Count one offered request; returns its index."""
        self.offered += 1
        if tier:
            self.tiers.setdefault(tier, TierCounts()).offered += 1
        return self.offered - 1

    def record_outcome(self, outcome: LoadOutcome) -> None:
        """Count the outcome of a request."""
        self.outcomes.append(outcome)
        self.by_kind[outcome.kind] += 1
        self.output_tokens += outcome.output_tokens
        self.slo_met += outcome.meets(self.slo)
        if outcome.tier:
            self.tiers[outcome.tier].record(outcome, self.slo)

    @property
    def in_flight(self) -> int:
        """Requests offered without an outcome yet."""
        return self.offered - len(self.outcomes)

    def since(self, start_s: float) -> Sequence[LoadOutcome]:
        """Return the outcomes of requests that ended at `start_s` or later."""
        first = len(self.outcomes)
        while first and self.outcomes[first - 1].end_s >= start_s:
            first -= 1
        return self.outcomes[first:]

    def report(self) -> LoadReport:
        """Compute the figures so far.

        Attainment is over all offered requests; one without an outcome has missed.
        """
        return LoadReport(
            offered=self.offered,
            ok=self.by_kind[OutcomeKind.OK],
            refused=self.by_kind[OutcomeKind.REFUSED],
            failed=self.by_kind[OutcomeKind.FAILED],
            broken=self.by_kind[OutcomeKind.BROKEN],
            wrong=self.by_kind[OutcomeKind.WRONG],
            in_flight=self.in_flight,
            broken_silently=sum(o.kind is OutcomeKind.BROKEN and not o.error_reported for o in self.outcomes),
            connection_waits=self.connection_waits,
            output_tokens=self.output_tokens,
            attainment=self.slo_met / self.offered if self.offered else None,
            latencies=summarize_latencies(self.outcomes),
            sent_late_p99_s=percentile([o.sent_late_s for o in self.outcomes], 99),
            reasons=dict(sorted(Counter(o.reason for o in self.outcomes if o.reason).items())),
            tiers=self.tiers,
        )


def summarize_latencies(outcomes: Iterable[LoadOutcome]) -> Latencies:
    """Compute the median, the 99th percentile and the mean of TTFT and TPOT over the ok requests."""
    successful = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.OK]
    ttft = [outcome.ttft_s for outcome in successful if outcome.ttft_s is not None]
    tpot = [outcome.tpot_s for outcome in successful if outcome.tpot_s is not None]
    return Latencies(
        *(percentile(ttft, 50), percentile(ttft, 99), percentile(tpot, 50), percentile(tpot, 99)),
        ttft_mean_s=fmean(ttft) if ttft else None,
        tpot_mean_s=fmean(tpot) if tpot else None,
    )
