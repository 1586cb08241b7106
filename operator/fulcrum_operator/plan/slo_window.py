"""SLO attainment of the last minutes, by tier: a window of samples of the router's counters.

The counters run from the router's start. A request is in the window if it was counted between two samples of
the same active router, so requests that end around a restart are missing. Requests that their client
cancelled in time count neither as met nor as missed. SLOMet is False if a tier with at least `MIN_REQUESTS`
requests is below the objective; if no tier has as many, all requests are judged together.

`controller/reconcile` keeps the window between reconciles, and `status/slo_met` turns its report into a
condition. No metric and no flip follows from it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from fulcrum_core.api import PDService, ServiceSloSpec, TierStatus, conditions
from fulcrum_core.api.meta import ConditionStatus, format_duration
from fulcrum_core.formatting import format_count
from fulcrum_core.router_state import RouterState, TierState

SAMPLE_INTERVAL_S = 5.0
"""Minimum seconds between two samples and between two evaluations: reconciles can run many times a second."""
REPORT_INTERVAL_S = 30.0
"""Minimum seconds between two changes of the report's figures."""
REASON_INTERVAL_S = 10.0
"""Minimum seconds between two changes of the reason. With `SAMPLE_INTERVAL_S`, it takes at most 15 s."""
RECENT_S = 15.0
"""Only misses of this many last seconds decide which latency part is named."""
_KEEPS_FROM = 0.5
"""The part named before stays named while it has at least this share of the leading part's misses."""
_REASONS = {
    "admission": conditions.MISSED_BY_ADMISSION,
    "waiting": conditions.MISSED_BY_WAITING,
    "retries": conditions.MISSED_BY_RETRIES,
    "prefill_queue": conditions.MISSED_BY_PREFILL_QUEUE,
    "prefill": conditions.MISSED_BY_PREFILL,
    "transfer": conditions.MISSED_BY_TRANSFER,
    "decode_queue": conditions.MISSED_BY_DECODE_QUEUE,
    "decode": conditions.MISSED_BY_DECODE,
}
"""Reason of the condition by the router's name of the latency part."""
MIN_REQUESTS = 20
"""Fewest requests for which an attainment is reported: of fewer, one miss would be more than 5 %."""


class SloCounts(NamedTuple):
    """Ended requests, and those of them that met TTFT and TPOT."""

    ended: int
    met: int

    @property
    def attainment(self) -> str | None:
        """Share of requests that met, in per cent, rounded down; None with fewer than `MIN_REQUESTS`."""
        return f"{1000 * self.met // self.ended / 10:.1f}" if self.ended >= MIN_REQUESTS else None


@dataclass(frozen=True, slots=True)
class SloSample:
    """The router's counts at one time."""

    at_s: float
    router_since_s: float
    """When the router became the active one, in unix seconds; it identifies the router process."""
    tiers: Mapping[str, SloCounts]
    misses: Mapping[str, int] = field(default_factory=dict)
    """Requests of all tiers that missed, by the latency part that took the most time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloReport:
    """What the status of the service reports about its SLO."""

    status: ConditionStatus
    reason: str
    message: str
    attainment: str | None = None
    tiers: tuple[TierStatus, ...] = ()

    def same_as(self, other: "SloReport | None") -> bool:
        """Whether the other report has the same values; messages and counts may differ."""
        return other is not None and _reported_values(self) == _reported_values(other)


def _reported_values(report: SloReport) -> tuple[object, ...]:
    return (
        report.status,
        report.reason,
        report.attainment,
        *((tier.name, tier.attainment) for tier in report.tiers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloWindow:
    """Samples of the last minutes and the last report. In memory only: lost with the process."""

    sampling_since_s: float = math.inf
    """Time of the first reconcile, in unix seconds."""
    samples: tuple[SloSample, ...] = ()
    report: SloReport | None = None
    """Last report; None before the first one: the status stays as it is."""
    reported_s: float = -math.inf
    evaluated_s: float = -math.inf
    """Time of the last evaluation of the samples, in unix seconds."""
    slo: ServiceSloSpec = field(default_factory=ServiceSloSpec)
    """Objective of the last evaluation."""


def update_window(
    before: SloWindow, router: RouterState | None, service: PDService, *, now_s: float
) -> SloWindow:
    """The window after one reconcile. `router` is None if the router was not queried or did not respond.

    The report changes only when its values do, at most once in `REPORT_INTERVAL_S`, its reason in
    `REASON_INTERVAL_S`; a new objective is evaluated at once.
    """
    slo = service.spec.slo
    window = replace(
        before,
        samples=_recent_samples(before, router, now_s, slo.window),
        sampling_since_s=min(before.sampling_since_s, now_s),
        slo=slo,
    )
    due_s = max(before.reported_s + REASON_INTERVAL_S, before.evaluated_s + SAMPLE_INTERVAL_S)
    if now_s < due_s and slo == before.slo:
        return window
    window = replace(window, evaluated_s=now_s)
    report = _judge_window(window, service, now_s)
    if report is None or (report.same_as(before.report) and slo == before.slo):
        return window
    same_reason = before.report is not None and before.report.reason == report.reason
    if same_reason and now_s < before.reported_s + REPORT_INTERVAL_S and slo == before.slo:
        return window
    changed = (
        before.report is not None or report.reason != conditions.NO_TRAFFIC
    )  # a new service already has the condition NoTraffic
    return replace(window, report=report, reported_s=now_s if changed else before.reported_s)


def _recent_samples(
    before: SloWindow, router: RouterState | None, now_s: float, window_s: float
) -> tuple[SloSample, ...]:
    samples = tuple(sample for sample in before.samples if sample.at_s >= now_s - window_s)
    if router is None or (samples and now_s < samples[-1].at_s + SAMPLE_INTERVAL_S):
        return samples
    counts = {tier.name: _count_ended(tier) for tier in router.tiers}
    misses = sum((Counter(tier.misses) for tier in router.tiers), Counter[str]())
    return (*samples, SloSample(now_s, router.ledger_since_s, counts, misses))


def _count_ended(tier: TierState) -> SloCounts:
    return SloCounts(tier.ended, tier.slo_met)


def count_added(samples: Iterable[SloSample]) -> dict[str, SloCounts]:
    """Requests by tier that were added between samples of one router process.

    A count that decreased belongs to a restarted router: that interval is skipped.
    """
    ended: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for before, after in pairwise(samples):
        known = {name: before.tiers.get(name, SloCounts(0, 0)) for name in after.tiers}
        fell = any(after.tiers[name].ended < counts.ended for name, counts in known.items())
        if fell or after.router_since_s != before.router_since_s:
            continue
        for name, counts in known.items():
            ended[name] += after.tiers[name].ended - counts.ended
            met[name] += after.tiers[name].met - counts.met
    return {name: SloCounts(count, met[name]) for name, count in sorted(ended.items()) if count}


def count_misses(samples: Iterable[SloSample]) -> Counter[str]:
    """Requests that missed their objectives between samples of one router process, by latency part."""
    misses: Counter[str] = Counter()
    for before, after in pairwise(samples):
        if after.router_since_s == before.router_since_s:
            misses += Counter(after.misses) - Counter(before.misses)
    return misses


def find_part_of_misses(
    samples: tuple[SloSample, ...], named_before: str | None, *, now_s: float
) -> tuple[str, int, int] | None:
    """Return the latency part with the most misses now, its misses and those of all parts; None: no miss.

    The misses of the last `RECENT_S` count; without any, those of the whole window. `named_before` stays
    while it has half as many misses as the leading part, so that two equal parts do not alternate.
    """
    recent = [sample for sample in samples if sample.at_s >= now_s - RECENT_S]
    misses = count_misses(recent) or count_misses(samples)
    if not misses:
        return None
    part = min(misses, key=lambda name: (-misses[name], name))
    if named_before is not None and misses[named_before] >= _KEEPS_FROM * misses[part]:
        part = named_before
    return part, misses[part], misses.total()


def _find_part_of(report: SloReport | None) -> str | None:
    """The part that the report names."""
    return next((part for part, reason in _REASONS.items() if report and report.reason == reason), None)


def _judge_window(window: SloWindow, service: PDService, now_s: float) -> SloReport | None:
    """The report of the window; None while the window is too short to replace an earlier verdict."""
    slo, tiers = window.slo, count_added(window.samples)
    total = SloCounts(
        sum(tier_counts.ended for tier_counts in tiers.values()),
        sum(tier_counts.met for tier_counts in tiers.values()),
    )
    if total.ended < MIN_REQUESTS:
        short, first = now_s < window.sampling_since_s + slo.window, window.report is None
        has_verdict = _has_earlier_verdict(service)
        if window.samples:
            return None if short and first and has_verdict else _too_few_requests(slo, tiers, total.ended)
        return _router_silent(slo) if has_verdict and not short else None
    judged_tiers = {name: counts for name, counts in tiers.items() if counts.ended >= MIN_REQUESTS} or {
        "": total
    }
    missed = any(
        100 * tier_counts.met < slo.attainment * tier_counts.ended for tier_counts in judged_tiers.values()
    )
    figures = ", ".join(
        _format_attainment(name, tier_counts, alone=len(judged_tiers) == 1)
        for name, tier_counts in judged_tiers.items()
    )
    message = f"{figures} in {_format_window(slo)} met TTFT and TPOT; {slo.attainment:g} % are required"
    reason, found = (
        conditions.ATTAINED,
        find_part_of_misses(window.samples, _find_part_of(window.report), now_s=now_s),
    )
    if found is not None:
        part, misses, all_misses = found
        message += f"; {misses} of {all_misses} recent misses are caused by {part.replace('_', ' ')}"
    if missed:
        reason = conditions.MISSED if found is None else _REASONS.get(found[0], conditions.MISSED)
    return SloReport(
        status="False" if missed else "True",
        reason=reason,
        message=message,
        attainment=total.attainment,
        tiers=_tier_statuses(tiers),
    )


def _has_earlier_verdict(service: PDService) -> bool:
    """Whether the status has a verdict of an earlier process, which a short window must not replace."""
    return any(c.type == conditions.SLO_MET and c.status != "Unknown" for c in service.status.conditions)


def _too_few_requests(slo: ServiceSloSpec, tiers: Mapping[str, SloCounts], ended: int) -> SloReport:
    if not ended:
        return SloReport(status="Unknown", reason=conditions.NO_TRAFFIC, message=no_request_ended(slo))
    requests = format_count(ended, "request")
    message = (
        f"{requests} ended in {_format_window(slo)}, too few for a figure: at least {MIN_REQUESTS} are needed"
    )
    return SloReport(
        status="Unknown", reason=conditions.TOO_FEW_REQUESTS, message=message, tiers=_tier_statuses(tiers)
    )


def _router_silent(slo: ServiceSloSpec) -> SloReport:
    message = f"the router has not reported for {_format_window(slo)}"
    return SloReport(status="Unknown", reason=conditions.ROUTER_NOT_REPORTING, message=message)


def no_request_ended(slo: ServiceSloSpec) -> str:
    return f"no request ended in {_format_window(slo)}"


def _tier_statuses(tiers: Mapping[str, SloCounts]) -> tuple[TierStatus, ...]:
    return tuple(
        TierStatus(name=name, attainment=tier_counts.attainment, ended=tier_counts.ended)
        for name, tier_counts in tiers.items()
    )


def _format_attainment(name: str, counts: SloCounts, *, alone: bool) -> str:
    figure = f"{counts.attainment} % of {counts.ended} requests"
    return figure if alone else f"tier {name}: {figure}"


def _format_window(slo: ServiceSloSpec) -> str:
    return format_duration(slo.window)
