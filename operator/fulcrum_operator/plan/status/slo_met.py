"""How many requests meet their objectives, by what the router counts: the condition SLOMet and its figures.

A router counts from its start. Here its counts, looked at now and then, become a window of the last minutes:
only what was added between two looks at one ledger is known to lie in it. As every live figure this one
speaks of requests that have ended; those that their client cancelled count as neither.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from fulcrum_core.api import Condition, PDService, ServiceSloSpec, TierStatus
from fulcrum_core.api import conditions as words
from fulcrum_core.api.meta import format_duration
from fulcrum_core.spelling import format_count
from fulcrum_core.state import RouterState, TierState
from fulcrum_operator.plan.status.condition import Standing, condition

SAMPLE_S = 5.0
"""Least time between two samples, and between two looks at all of them: passes may come many a second."""
TELL_S = 30.0
"""Figures change at most once in so long."""
FEWEST = 20
"""Of fewer requests nothing is said: one that missed would be more than 5 %."""


class Counts(NamedTuple):
    """Requests that have ended, and those of them that met TTFT and TPOT."""

    ended: int
    met: int

    @property
    def shown(self) -> str | None:
        """The share that met, in per cent, rounded down: what shows as 99.0 is no less. None: too few."""
        return f"{1000 * self.met // self.ended / 10:.1f}" if self.ended >= FEWEST else None


@dataclass(frozen=True, slots=True)
class Sample:
    """What a router had counted."""

    at_s: float
    ledger_s: float
    """When the ledger begins: another router has another one."""
    tiers: Mapping[str, Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the status says."""

    status: Standing
    reason: str
    message: str
    attainment: str | None = None
    tiers: tuple[TierStatus, ...] = ()

    def says(self, other: "Told | None") -> bool:
        """Whether the other one says the same, whatever its counts."""
        return other is not None and _shown(self) == _shown(other)


def _shown(told: Told) -> tuple[object, ...]:
    return (told.status, told.reason, told.attainment, *((tier.name, tier.attainment) for tier in told.tiers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The samples of the last minutes, and what was told of them. Lost with the process."""

    began_s: float = math.inf
    """When samples were first taken."""
    samples: tuple[Sample, ...] = ()
    told: Told | None = None
    """None: nothing yet; what the status says stands."""
    told_s: float = -math.inf
    judged_s: float = -math.inf
    """When it was last worked out what the samples come to."""
    slo: ServiceSloSpec = field(default_factory=ServiceSloSpec)
    """What that was held against."""


def seen_again(before: Window, router: RouterState | None, service: PDService, *, now_s: float) -> Window:
    """The window after a look at the router, or after none: None is that it was not asked or is silent.

    What is told changes with what is shown, and at most once in `TELL_S`; another objective is told at once.
    """
    slo = service.spec.slo
    window = replace(
        before, samples=_kept(before, router, now_s, slo.window), began_s=min(before.began_s, now_s), slo=slo
    )
    due_s = max(before.told_s + TELL_S, before.judged_s + SAMPLE_S)
    if now_s < due_s and slo == before.slo:
        return window
    window = replace(window, judged_s=now_s)
    told = _judged(window, service, now_s)
    if told is None or (told.says(before.told) and slo == before.slo):
        return window
    news = before.told is not None or told.reason != words.NO_TRAFFIC  # of a new service that is known
    return replace(window, told=told, told_s=now_s if news else before.told_s)


def _kept(before: Window, router: RouterState | None, now_s: float, window_s: float) -> tuple[Sample, ...]:
    samples = tuple(sample for sample in before.samples if sample.at_s >= now_s - window_s)
    if router is None or (samples and now_s < samples[-1].at_s + SAMPLE_S):
        return samples
    counted = {tier.name: _ended(tier) for tier in router.tiers}
    return (*samples, Sample(now_s, router.since_s, counted))


def _ended(tier: TierState) -> Counts:
    return Counts(tier.ok + tier.failed + tier.broken, tier.slo_met)


def counted(samples: Iterable[Sample]) -> dict[str, Counts]:
    """By tier, what was added between two samples of one ledger. Counts that fall are another one's."""
    ended: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for before, after in pairwise(samples):
        known = {name: before.tiers.get(name, Counts(0, 0)) for name in after.tiers}
        fell = any(after.tiers[name].ended < counts.ended for name, counts in known.items())
        if fell or after.ledger_s != before.ledger_s:
            continue
        for name, counts in known.items():
            ended[name] += after.tiers[name].ended - counts.ended
            met[name] += after.tiers[name].met - counts.met
    return {name: Counts(count, met[name]) for name, count in sorted(ended.items()) if count}


def _judged(window: Window, service: PDService, now_s: float) -> Told | None:
    """What the window comes to; None while it is too short to say other than what stands."""
    slo, tiers = window.slo, counted(window.samples)
    every = Counts(sum(one.ended for one in tiers.values()), sum(one.met for one in tiers.values()))
    if every.ended < FEWEST:
        short, first = now_s < window.began_s + slo.window, window.told is None
        stands = _stands(service)
        if window.samples:
            return None if short and first and stands else _few(slo, tiers, every.ended)
        return _silent(slo) if stands and not short else None
    judged = {name: counts for name, counts in tiers.items() if counts.ended >= FEWEST} or {"": every}
    missed = any(100 * one.met < slo.attainment * one.ended for one in judged.values())
    figures = ", ".join(_figure(name, one, alone=len(judged) == 1) for name, one in judged.items())
    return Told(
        status="False" if missed else "True",
        reason=words.MISSED if missed else words.ATTAINED,
        message=f"{figures} in {_told(slo)} met TTFT and TPOT; {slo.attainment:g} % are asked for",
        attainment=every.shown,
        tiers=_tiers(tiers),
    )


def _stands(service: PDService) -> bool:
    """Whether an earlier process came to a verdict that a short window says nothing against."""
    return any(c.type == words.SLO_MET and c.status != "Unknown" for c in service.status.conditions)


def _few(slo: ServiceSloSpec, tiers: Mapping[str, Counts], ended: int) -> Told:
    if not ended:
        return Told(status="Unknown", reason=words.NO_TRAFFIC, message=_none_ended(slo))
    message = (
        f"{format_count(ended, 'request')} ended in {_told(slo)}, of fewer than {FEWEST} nothing is said"
    )
    return Told(status="Unknown", reason=words.TOO_FEW, message=message, tiers=_tiers(tiers))


def _silent(slo: ServiceSloSpec) -> Told:
    message = f"no word of the router in {_told(slo)}"
    return Told(status="Unknown", reason=words.ROUTER_SILENT, message=message)


def _none_ended(slo: ServiceSloSpec) -> str:
    return f"no request ended in {_told(slo)}"


def _tiers(tiers: Mapping[str, Counts]) -> tuple[TierStatus, ...]:
    return tuple(
        TierStatus(name=name, attainment=one.shown, offered=one.ended) for name, one in tiers.items()
    )


def _figure(name: str, counts: Counts, *, alone: bool) -> str:
    figure = f"{counts.shown} % of {counts.ended} requests"
    return figure if alone else f"tier {name}: {figure}"


def _told(slo: ServiceSloSpec) -> str:
    return format_duration(slo.window)


def slo_met(service: PDService, told: Told | None) -> Condition:
    """The condition SLOMet. Where nothing new is told, what was known stands."""
    if told is not None:
        return condition(service, words.SLO_MET, told.status, told.reason, told.message)
    for before in service.status.conditions:
        if before.type == words.SLO_MET:
            return condition(service, words.SLO_MET, before.status, before.reason, before.message)
    return condition(service, words.SLO_MET, "Unknown", words.NO_TRAFFIC, _none_ended(service.spec.slo))
