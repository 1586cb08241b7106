"""Policies against bounds and one another: the highest rates that keep an SLO attainment, by simulation.

    python bench/scheduling.py --traces FOLDER [--ours POLICY] [--use development|seen|test] [--seeds N]
                               [--jobs N] [--only WORKLOAD…] [--quick] [--runs FILE] [--json FILE]

Workloads and their use are in `scheduling_workloads.toml`. Prints the rates, then one table of figures with
their bars; exit code 1 if one misses its bar. `--quick` runs two workloads with one seed. Ratios are those of
single seeds: their median and range, or their mean and its 95 % interval.

With `--runs FILE` every simulated run is appended to the file, and those in it are not repeated: what was
stopped goes on. Runs of other code stay in the file and do not count; a trace that has changed needs another
name.

The simulator is compiled first, which takes a minute once, and gives the same figures in half the time.
Without mypyc (`.venv/.dev`) or a C compiler it runs as Python; the first line tells which.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from bench.compiled import ensure_compiled
from bench.scheduling_runs import (
    BEST_STATIC,
    INSTANCES,
    PROFILE,
    SLO,
    Measured,
    Task,
    Workload,
    format_range,
    make_load,
    make_options,
    measure,
    read_workloads,
)
from bench.simulation import measure_recorded
from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.bounds import (
    UniformFleet,
    compute_fluid_rate,
    compute_metric_rate,
    find_fcfs_rate,
    find_prefill_burst_rate,
)
from fulcrum_simulator.fleet.load import RecordedLoad
from fulcrum_simulator.fleet.options import RunOptions
from fulcrum_simulator.workload import WorkloadRequest

AS_PUBLISHED = "+direct+nodeflect"
"""In the published systems, requests wait in the engines, and decode computes no prompts."""
SHIPPED_ARROW = "arrow"
ARROW, EVEN = SHIPPED_ARROW + AS_PUBLISHED, "static:4P4D" + AS_PUBLISHED
BEST, CLAIRVOYANT = BEST_STATIC, "clairvoyant:30s"
"""With the default dispatch, as ours."""
PUBLISHED_BEST = BEST_STATIC + AS_PUBLISHED
SHIPPED_COLOCATED = "colocated"
COLOCATED = SHIPPED_COLOCATED + AS_PUBLISHED
INTERVAL_BAR = "interval above 0.98"
OTHERS = (
    *(name + AS_PUBLISHED for name in ("dynamo-like", "narwhal-like", "cold:60s", "cold:300s")),
    "xllm",
    "round-robin:4P4D",
)
ATTAINMENTS = USUAL, STRICT = 0.9, 0.99
QUICK = "azure_code_2023.csv.gz", "phases-200s"
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""95 % quantiles of Student's t for the mean of so many paired seeds; for more, the last one is safe."""


@dataclass(frozen=True)
class Figure:
    """One line of the table. `passed` is None if nothing is required or it was not measured."""

    name: str
    bar: str
    value: str
    passed: bool | None


Rates = dict[tuple[str, str, float], Measured]
"""By workload, policy and attainment."""


def is_of_arrows_evaluation(workload: Workload) -> bool:
    """Whether Arrow's own evaluation used the workload, against an even split."""
    return workload.name.startswith("azure")


# --- figures ---------------------------------------------------------------------------------------------


def compare(
    rates: Rates, workloads: Sequence[Workload], ours: str, other: str, attainment: float
) -> list[tuple[str, list[float]]]:
    """Return the ratios of two policies' rates, seed by seed, for each workload."""
    return _compare(rates, workloads, (ours, other), attainment, lambda measured: measured.rates_rps)


def compare_tokens(
    rates: Rates, workloads: Sequence[Workload], ours: str, other: str, attainment: float
) -> list[tuple[str, list[float]]]:
    """Return the ratios of the tokens in time each second at these rates: long requests count for more."""

    def compute_in_time_rps(measured: Measured) -> list[float]:
        # The mean length is that of the workload, so that ratios of these are ratios of tokens.
        return [a * b for a, b in zip(measured.rates_rps, measured.token_shares, strict=True)]

    return _compare(rates, workloads, (ours, other), attainment, compute_in_time_rps)


def _compare(
    rates: Rates,
    workloads: Sequence[Workload],
    policies: tuple[str, str],
    attainment: float,
    get: Callable[[Measured], Sequence[float]],
) -> list[tuple[str, list[float]]]:
    found = []
    for workload in workloads:
        mine, theirs = (rates.get((workload.name, policy, attainment)) for policy in policies)
        if mine and theirs:
            paired = zip(get(mine), get(theirs), strict=True)
            found.append((workload.name, [a / b if b else math.inf for a, b in paired]))
    return found


def make_ratio_figures(
    name: str,
    ratios: Sequence[tuple[str, list[float]]],
    *,
    low: float | None = None,
    high: float = math.inf,
    wanted: float = 0.0,
) -> list[Figure]:
    """Return a line for each workload; its median must lie between `low` and `high`. No `low`: no bar.

    `wanted`: a goal above `low`, of which the line says whether it is reached.
    """
    bar = "–" if low is None else f"{low:g} ×" if high == math.inf else f"{low:g} to {high:g} ×"
    if wanted:
        bar += f" (wanted: {wanted:g} ×)"
    return [
        Figure(
            f"{name}: {workload}",
            bar,
            format_values(values) + (", short of what is wanted" if median(values) < wanted else ""),
            None if low is None or math.inf in values else low <= median(values) <= high,
        )
        for workload, values in ratios
    ]


def make_interval_figures(name: str, ratios: Sequence[tuple[str, list[float]]]) -> list[Figure]:
    """Return a line for each workload: the 95 % interval of the mean must lie above 0.98."""
    figures = []
    for workload, values in ratios:
        if math.inf in values:
            figures.append(
                Figure(f"{name}: {workload}", INTERVAL_BAR, "not measured: no rate of the other", None)
            )
            continue
        passed, value = None, f"{fmean(values):.3f} ×, one seed"
        if len(values) > 1:
            t = STUDENT[min(len(values), max(STUDENT))]
            half = t * stdev(values) / math.sqrt(len(values))
            passed, value = fmean(values) - half > 0.98, f"{fmean(values):.3f} × ± {half:.3f}"
        figures.append(Figure(f"{name}: {workload}", INTERVAL_BAR, value, passed))
    return figures


def format_values(values: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{median(values):.2f} × {format_range(values)}"


def make_bound_figures(
    rates: Rates, workloads: Sequence[Workload], ours: str, traces: Path | None
) -> list[Figure]:
    """Compare with the bounds of the work and of prefill bursts, and Arrow with seven FCFS prefill instances.

    B1 limits a policy that serves every request. B2 limits every policy with this attainment: it leaves out
    the work of the heaviest requests, as many as may be late. As the rates, the bounds are those of the
    requests that are scored.
    """
    figures = []
    profile = load_profile(PROFILE)
    fleet, seven = UniformFleet(INSTANCES, profile, SLO), UniformFleet(7, profile, SLO)
    for workload in workloads:
        if not (workload.smooth or is_of_arrows_evaluation(workload)):
            continue
        load = make_load(workload, traces)
        requests = leave_out_warm_up(
            load.requests if isinstance(load, RecordedLoad) else load.prepare(1.0, slo=fleet.slo, seed=1),
            make_options(ours),
        )
        fluid = compute_fluid_rate(requests, fleet)
        for attainment in ATTAINMENTS if workload.smooth else ():
            found = rates.get((workload.name, ours, attainment))
            if not found:
                continue
            burst = find_prefill_burst_rate(requests, fleet, attainment=attainment)
            for name, work, low in (
                ("B1", fluid, 0.85 if attainment == USUAL else None),
                ("B2", compute_metric_rate(requests, fleet, attainment=attainment), None),
            ):
                ratios = [(workload.name, [rate / min(work, burst) for rate in found.rates_rps])]
                title = f"share of bounds {name} ({work:.1f} requests/s) and B3, {100 * attainment:.0f} %"
                figures += make_ratio_figures(title, ratios, low=low)
        arrow = rates.get((workload.name, ARROW, 0.9))
        if is_of_arrows_evaluation(workload) and arrow:
            reference = find_fcfs_rate(requests, seven, attainment=0.9)
            shares = [rate / reference for rate in arrow.rates_rps]
            name = f"Arrow as published / seven FCFS prefill instances (B5): {workload.name}"
            figures.append(Figure(name, "0.9 ×", format_values(shares), median(shares) >= 0.9))
    return figures


def leave_out_warm_up(requests: Sequence[WorkloadRequest], options: RunOptions) -> list[WorkloadRequest]:
    """Return the requests that a run scores."""
    first_scored_s = options.compute_first_scored_s(requests[0].arrival_s, requests[-1].arrival_s)
    return [request for request in requests if request.arrival_s >= first_scored_s]


def make_flip_figures(rates: Rates, workloads: Sequence[Workload], ours: str) -> list[Figure]:
    """Compare the flips at the highest rates with those of the clairvoyant split."""
    figures = []
    for workload in workloads:
        mine, known = (rates.get((workload.name, policy, 0.9)) for policy in (ours, CLAIRVOYANT))
        if mine and known:
            most = 3 * max(1, round(median(known.flips)))
            value = f"{median(mine.flips):.0f} flips, clairvoyant {median(known.flips):.0f}"
            figures.append(
                Figure(f"no thrash: {workload.name}", f"{most} flips", value, median(mine.flips) <= most)
            )
    return figures


def measure_speed(traces: Path | None) -> list[Figure]:
    """Measure time and memory of the Azure Code hour at 1.5 times its rate, before other traces are read."""
    if traces is None:
        return [Figure("Azure Code hour × 1.5", "10 s, 500 MB", "not measured: no --traces", None)]
    measured = measure_recorded(traces / "azure_code_2023.csv.gz", seed=1)
    value = f"{measured.cpu_s:.1f} s, {measured.memory_mb:.0f} MB"
    return [Figure("Azure Code hour × 1.5", "10 s, 500 MB", value, measured.meets_bars)]


def make_figures(rates: Rates, workloads: Sequence[Workload], ours: str, traces: Path | None) -> list[Figure]:
    """Return all lines of the table."""
    moving = [workload for workload in workloads if workload.moving]
    stationary = [workload for workload in workloads if workload.smooth and not workload.moving]
    evaluated = [workload for workload in workloads if is_of_arrows_evaluation(workload)]
    figures = make_ratio_figures(
        "Arrow as published / 4P4D, 90 %", compare(rates, evaluated, ARROW, EVEN, 0.9), low=2.0, high=2.6
    )
    figures += make_ratio_figures(
        f"{ours} / best static, 90 %", compare(rates, stationary, ours, BEST, 0.9), low=0.97
    )
    for name, one in (("Arrow as published", ARROW), (ours, ours)):
        title = f"{name} / best static as published, 90 %"
        figures += make_ratio_figures(title, compare(rates, evaluated, one, PUBLISHED_BEST, 0.9))
    for attainment in ATTAINMENTS:
        figures += make_ratio_figures(
            f"{ours} / best static as published, {100 * attainment:.0f} %",
            compare(rates, moving, ours, PUBLISHED_BEST, attainment),
            low=1.2,
        )
        figures += make_ratio_figures(
            f"{ours} / best static with our dispatch, {100 * attainment:.0f} %",
            compare(rates, moving, ours, BEST, attainment),
            low=0.97,
            wanted=1.2,
        )
    for arrow, name in ((ARROW, "Arrow as published"), (SHIPPED_ARROW, "Arrow with our dispatch")):
        if ours != arrow:
            title = f"{ours} / {name}, 90 %"
            figures += make_ratio_figures(title, compare(rates, moving, ours, arrow, 0.9), low=1.15)
            figures += make_interval_figures(title, compare(rates, workloads, ours, arrow, 0.9))
    if ours != SHIPPED_ARROW:
        title = f"{ours} / Arrow with our dispatch, 99 %"
        figures += make_ratio_figures(title, compare(rates, moving, ours, SHIPPED_ARROW, 0.99), low=1.0)
    figures += make_ratio_figures(
        f"{ours} / clairvoyant split, 90 %", compare(rates, moving, ours, CLAIRVOYANT, 0.9), low=0.95
    )
    for name, other, attainment in (
        ("as published", COLOCATED, 0.9),
        ("with our dispatch", SHIPPED_COLOCATED, 0.99),
    ):
        title = f"{ours} / colocated {name}, {100 * attainment:.0f} %"
        figures += make_ratio_figures(title, compare(rates, moving, ours, other, attainment))
    for other in (PUBLISHED_BEST, ARROW, CLAIRVOYANT, COLOCATED):
        title = f"{ours} / {other}, tokens in time, 90 %"
        figures += make_ratio_figures(title, compare_tokens(rates, workloads, ours, other, 0.9))
    figures += make_bound_figures(rates, workloads, ours, traces)
    return figures + make_flip_figures(rates, workloads, ours)


# --- the command -----------------------------------------------------------------------------------------


def choose_workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the workloads of this use, or a part of them; without a folder of traces, the composed ones.

    Raises:
        ValueError: for the name of a workload that is not among them, or if none is left.
    """
    listed = read_workloads(options.use)
    only = set(QUICK if options.quick else options.only or (workload.name for workload in listed))
    chosen = [w for w in listed if w.name in only and not (w.recorded and options.traces is None)]
    missing = set(options.only or ()).difference(workload.name for workload in chosen)
    recorded = missing.intersection(workload.name for workload in listed)
    if recorded:
        raise ValueError(f"recorded, and needs --traces: {', '.join(sorted(recorded))}")
    if missing or not chosen:
        raise ValueError(f"no {options.use} workload of this name: {', '.join(sorted(missing)) or 'any'}")
    return chosen


def list_tasks(workloads: Sequence[Workload], options: argparse.Namespace) -> list[Task]:
    """List what is measured, what has a bar first."""
    seeds, ratio = (1, 1.1) if options.quick else (options.seeds, 1.02)

    def make(workload: Workload, policy: str, attainments: tuple[float, ...] = (USUAL,)) -> Task:
        return Task(workload, policy, attainments, seeds, ratio, options.traces, options.runs)

    def make_both(workload: Workload, policy: str) -> Task:
        return make(workload, policy, ATTAINMENTS if workload.moving and not options.quick else (USUAL,))

    def make_coarse(workload: Workload, policy: str) -> Task:
        return Task(workload, policy, (USUAL,), 1, 1.05, options.traces, options.runs)

    moving = [workload for workload in workloads if workload.moving]
    ours = [make_both(workload, options.ours) for workload in workloads]
    published = [make(workload, ARROW) for workload in workloads if options.ours != ARROW]
    if options.ours != SHIPPED_ARROW:
        published += [make_both(workload, SHIPPED_ARROW) for workload in workloads]
    published += [make(workload, EVEN) for workload in workloads if is_of_arrows_evaluation(workload)]
    if options.quick:
        return ours + published
    best = [make_both(workload, BEST) for workload in workloads]
    known = [make(workload, CLAIRVOYANT) for workload in workloads]
    published_best = [make(workload, PUBLISHED_BEST, ATTAINMENTS) for workload in moving]
    published_best += [
        make(workload, PUBLISHED_BEST) for workload in workloads if is_of_arrows_evaluation(workload)
    ]
    others = [make(workload, COLOCATED) for workload in moving]
    others += [make(workload, SHIPPED_COLOCATED, (STRICT,)) for workload in moving]
    others += [make_coarse(workload, policy) for policy in OTHERS for workload in moving]
    return ours + best + published + known + published_best + others


def print_rates(rates: Rates) -> None:
    """Print the median rates with their ranges."""
    rows = [
        (
            workload,
            measured.policy,
            f"{attainment:.0%}",
            f"{median(measured.rates_rps):.2f} {format_range(measured.rates_rps)}",
            f"{100 * median(measured.token_shares):.1f}",
            f"{median(measured.flips):.0f}",
        )
        for (workload, policy, attainment), measured in sorted(rates.items())
    ]
    header = ("WORKLOAD", "POLICY", "ATTAINMENT", "REQUESTS/S", "TOKENS %", "FLIPS")
    print("\n".join(format_columns(header, *rows)), end="\n\n")


def dump(rates: Rates, figures: Sequence[Figure], *, wall_s: float) -> dict[str, Any]:
    """Return the results for programs."""
    return {
        "rates": [
            {"workload": workload, "compared": policy, "attainment": attainment, **asdict(measured)}
            for (workload, policy, attainment), measured in sorted(rates.items())
        ],
        "figures": [asdict(figure) for figure in figures],
        "wall_s": wall_s,
    }


def main() -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="folder of recorded workloads")
    parser.add_argument("--ours", default="balanced", help="the policy that is judged")
    parser.add_argument("--use", choices=("development", "seen", "test"), default="development")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--only", nargs="+", metavar="WORKLOAD", help="a part of the list")
    parts.add_argument("--quick", action="store_true", help="two workloads, one seed, rates to 10 %%")
    parser.add_argument("--runs", type=Path, help="append all runs to this file, and repeat none in it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    try:
        workloads = choose_workloads(options)
    except ValueError as error:
        parser.error(str(error))
    ensure_compiled()
    started_s = time.monotonic()
    speed = measure_speed(options.traces)
    tasks = list_tasks(workloads, options)
    with ProcessPoolExecutor(options.jobs) as pool:
        measured = []
        for task, found in zip(tasks, pool.map(measure, tasks), strict=True):
            print(f"{task.workload.name}: {task.policy}", file=sys.stderr)
            measured.append(found)
    rates = {
        (task.workload.name, task.policy, attainment): result
        for task, results in zip(tasks, measured, strict=True)
        for attainment, result in results.items()
    }
    figures = make_figures(rates, workloads, options.ours, options.traces) + speed
    print_rates(rates)
    verdicts = {True: "ok", False: "MISSED", None: "–"}
    rows = [(figure.name, figure.bar, figure.value, verdicts[figure.passed]) for figure in figures]
    print("\n".join(format_columns(("FIGURE", "BAR", "MEASURED", ""), *rows)))
    wall_s = time.monotonic() - started_s
    print(f"{len(tasks)} searches in {wall_s / 60:.0f} min; {options.use} workloads")
    if options.json is not None:
        document = dump(rates, figures, wall_s=wall_s)
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if any(figure.passed is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
