"""Runs one policy under a load with several seeds, or finds with each the highest rate that keeps the SLO.

To keep it means that the required share of the requests meets it.

`fulcrum simulate` and `fulcrum regret` compare the results of several policies (`pick_best`). What is run is
one `run.simulate` each; the search is `rate_search`'s.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from fulcrum_simulator.fleet.load import Load
from fulcrum_simulator.fleet.options import Policy, RunOptions
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import RunResult, simulate
from fulcrum_simulator.rate_search import RUN_PRECISION, find_highest_factor, list_factors_around

Report = dict[str, Any]
NOISE = 0.005
"""Differences of attainment below it say nothing about a policy."""
OnRun = Callable[[RunOptions, float], Callable[[float], None]]
"""Called before each run with its options and factor; returns what takes its progress, 0 to 1."""


def ignore_progress(_options: RunOptions, _factor: float) -> Callable[[float], None]:
    """Show nothing."""
    return lambda _share: None


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One policy with one seed, at `factor` times the rate of the load.

    A search finds the highest factor with the required attainment; None if none has it, and the result is
    then that of factor 1. Without a search it is the factor that was asked for.
    """

    factor: float | None
    report: Report
    result: RunResult
    trials: int
    around: tuple[tuple[float, float], ...] = ()
    """Factors around the found one and their attainments, if they were checked."""

    @property
    def attainment(self) -> float:
        """SLO attainment of the run, 0 to 1."""
        return self.report["attainment"] or 0.0

    @property
    def ttft_p90_s(self) -> float:
        """90th percentile of the TTFT; infinite without a first token."""
        found = self.report["ttft_s"]["p90"]
        return math.inf if found is None else found

    @property
    def rate_rps(self) -> float:
        """Requests per second that were offered; 0 if no rate has the required attainment."""
        return 0.0 if self.factor is None else self.report["goodput"]["offered_requests_per_s"] or 0.0

    @property
    def is_monotone(self) -> bool:
        """Whether the attainments around the found factor fall, but for `NOISE`."""
        return all(after <= before + NOISE for (_, before), (_, after) in pairwise(self.around))


@dataclass(frozen=True, slots=True)
class PolicyRuns:
    """One policy with all seeds."""

    policy: Policy
    runs: tuple[SeedRun, ...]

    @property
    def rank(self) -> tuple[float, ...]:
        """Order of policies: mean factor of the rate, then mean attainment, then a short TTFT."""
        columns = [(run.factor or 0.0, run.attainment, -run.ttft_p90_s) for run in self.runs]
        return tuple(fmean(column) for column in zip(*columns, strict=True))


def run_policy(
    load: Load,
    options: RunOptions,
    seeds: Iterable[int],
    *,
    attainment_min: float | None = None,
    check_around: bool = False,
    precision: float = RUN_PRECISION,
    first: float = 1.0,
    step: float = 2.0,
    on_run: OnRun = ignore_progress,
) -> PolicyRuns:
    """Run the policy of `options` with each seed; with `attainment_min`, at the highest rate that reaches it.

    Without a search all seeds run at the factor `first`. The first search starts there with steps of `step`,
    that of each further seed where the one before ended, with short steps.
    """
    runs: list[SeedRun] = []
    search = _Search(attainment_min, precision, check_around)
    for seed in seeds:
        near = _NEAR if runs and runs[-1].factor else step
        runs.append(_run_seed(load, replace(options, seed=seed), search, first, near, on_run))
        first = runs[-1].factor or first
    return PolicyRuns(options.policy, tuple(runs))


_NEAR = 1.05
"""First step of a search that starts where another seed's ended."""


class _Search(NamedTuple):
    attainment_min: float | None
    precision: float
    check_around: bool


def pick_best(candidates: Sequence[PolicyRuns]) -> PolicyRuns:
    """Return the policy that is best on average over the seeds."""
    return max(candidates, key=lambda runs: runs.rank)


def _run_seed(
    load: Load, options: RunOptions, search: _Search, first: float, step: float, on_run: OnRun
) -> SeedRun:
    def run_at(factor: float, attainment_min: float = 0.0) -> tuple[Report, RunResult]:
        arrivals = load.prepare(factor, slo=options.slo, seed=options.seed)
        result = simulate(
            arrivals, options, on_progress=on_run(options, factor), attainment_min=attainment_min
        )
        return build_report(result), result

    def measure(factor: float) -> float:
        return run_at(factor)[0]["attainment"] or 0.0

    attainment_min = search.attainment_min
    if attainment_min is None:
        return SeedRun(first, *run_at(first), trials=1)
    found = find_highest_factor(
        lambda factor: run_at(factor, attainment_min),
        lambda run: (run[0]["attainment"] or 0.0) >= attainment_min,
        precision=search.precision,
        first=first,
        step=step,
    )
    report, result = found.result or run_at(1.0)
    around: tuple[tuple[float, float], ...] = ()
    if search.check_around and found.factor is not None:
        around = tuple((factor, measure(factor)) for factor in list_factors_around(found.factor))
    return SeedRun(found.factor, report, result, found.trials, around)
