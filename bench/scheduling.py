"""Policies against bounds and one another: the highest rates that keep an SLO attainment, by simulation.

    python bench/scheduling.py --traces FOLDER [--ours POLICY] [--use development|test] [--seeds N] [--jobs N]
                               [--quick] [--json FILE]

Workloads and their use are in `scheduling_workloads.toml`. Prints the rates, then one table of figures with
their bars; exit code 1 if one misses its bar. `--quick` runs two workloads with one seed. Each figure is the
median of the ratios of single seeds, with their range.
"""

import argparse
import json
import math
import resource
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.bounds import (
    UniformFleet,
    compute_fluid_rate,
    find_fcfs_rate,
    find_prefill_burst_rate,
)
from fulcrum_simulator.fleet.load import ComposedLoad, Load, RecordedLoad, leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import RunOptions, list_splits, parse_policy
from fulcrum_simulator.fleet.policy_runs import run_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import COMPOSED, load_trace

INSTANCES, PROFILE, TPOT_S = 8, "l70-h100-tp4", 0.1
AS_PUBLISHED = "+direct+nodeflect"
"""In the published systems, requests wait in the engines, and decode computes no prompts."""
ARROW, EVEN = "arrow" + AS_PUBLISHED, "static:4P4D" + AS_PUBLISHED
BEST, CLAIRVOYANT = "static:best", "clairvoyant:30s"
"""With the default dispatch, as ours."""
OTHERS = tuple(
    name + AS_PUBLISHED for name in ("dynamo-like", "narwhal-like", "cold:60s", "cold:300s", "colocated")
)
BARS = 0.9, 0.99
STEP = 1.25
"""First step of a search that starts at a workload's `near`."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""95 % quantiles of Student's t for the mean of so many paired seeds."""


@dataclass(frozen=True)
class Workload:
    """One workload of the list."""

    name: str
    use: str
    moving: bool
    smooth: bool
    ttft: float = 3.0
    near: float = 1.0
    """Factor near which the rates of good policies lie: a run far above it costs the most time."""


@dataclass(frozen=True)
class Task:
    """One policy on one workload at one attainment, for all seeds. `precision`: of the rate that is found."""

    workload: Workload
    policy: str
    bar: float
    seeds: int
    precision: float
    traces: Path | None


@dataclass(frozen=True)
class Measured:
    """Rates and flips of a task, by seed."""

    policy: str
    rates_rps: tuple[float, ...]
    flips: tuple[int, ...]
    token_shares: tuple[float, ...]


@dataclass(frozen=True)
class Figure:
    """One line of the table. `passed` is None if nothing is required or it was not measured."""

    name: str
    bar: str
    value: str
    passed: bool | None


Rates = dict[tuple[str, str, float], Measured]
"""By workload, policy and attainment."""


def make_load(workload: Workload, traces: Path | None) -> Load:
    """Return the composed workload, or read the recording."""
    profile = load_profile(PROFILE)
    if workload.name in COMPOSED:
        return ComposedLoad(workload.name, profile)
    if traces is None:
        raise SystemExit(f"{workload.name} is a recording: name its folder by --traces")
    recorded, _ = leave_out_overlong(load_trace(traces / workload.name).requests, profile)
    return RecordedLoad(workload.name, recorded)


def make_options(workload: Workload, policy: str) -> RunOptions:
    """Return the options of a run."""
    return RunOptions(
        profile=load_profile(PROFILE),
        instances=INSTANCES,
        policy=parse_policy(policy, instances=INSTANCES),
        slo=Slo(workload.ttft, TPOT_S),
    )


def measure(task: Task) -> Measured:
    """Find the highest rate of a policy with each seed; for `static:best`, of the best split."""
    load = make_load(task.workload, task.traces)
    policy, first = task.policy, task.workload.near
    if policy == BEST:
        policy, first = find_best_split(task, load)
    runs = run_policy(
        load,
        make_options(task.workload, policy),
        range(1, task.seeds + 1),
        attainment_min=task.bar,
        precision=task.precision,
        first=first,
        step=STEP,
    ).runs
    return Measured(
        policy,
        tuple(run.rate_rps for run in runs),
        tuple(run.report["flips"]["count"] for run in runs),
        tuple(run.report["goodput"]["token_share"] or 0.0 for run in runs),
    )


def find_best_split(task: Task, load: Load) -> tuple[str, float]:
    """Return the best of all fixed splits with the first seed, and the factor that it reaches."""
    best, first = (0.0, ""), task.workload.near
    for policy in map(str, list_splits(INSTANCES)):
        options = make_options(task.workload, policy)
        if best[1] and not keeps(load, options, first * task.precision, task.bar):
            continue  # not better than the best one so far
        run = run_policy(
            load, options, [1], attainment_min=task.bar, precision=task.precision, first=first, step=STEP
        ).runs[0]
        if (run.factor or 0.0) > best[0]:
            best, first = (run.factor or 0.0, policy), run.factor or 1.0
    return best[1] or EVEN, first


def is_bursty(workload: Workload) -> bool:
    """Whether Arrow's own evaluation used the workload, against an even split."""
    return workload.name.startswith("azure")


def keeps(load: Load, options: RunOptions, factor: float, bar: float) -> bool:
    """Whether the policy keeps the attainment at this factor with the first seed."""
    arrivals = load.prepare(factor, slo=options.slo, seed=options.seed)
    return (build_report(simulate(arrivals, options, attainment_min=bar))["attainment"] or 0.0) >= bar


# --- figures ---------------------------------------------------------------------------------------------


def compare(
    rates: Rates, workloads: Sequence[Workload], ours: str, other: str, bar: float
) -> list[tuple[str, list[float]]]:
    """Return the ratios of two policies' rates, seed by seed, for each workload."""
    found = []
    for workload in workloads:
        pair = [rates.get((workload.name, policy, bar)) for policy in (ours, other)]
        if pair[0] and pair[1]:
            paired = zip(pair[0].rates_rps, pair[1].rates_rps, strict=True)
            found.append((workload.name, [a / b if b else math.inf for a, b in paired]))
    return found


def make_ratio_figures(
    name: str, ratios: Sequence[tuple[str, list[float]]], *, low: float, high: float = math.inf
) -> list[Figure]:
    """Return a line for each workload; its median must lie between `low` and `high`."""
    bar = f"{low:g} ×" if high == math.inf else f"{low:g} to {high:g} ×"
    return [
        Figure(f"{name}: {workload}", bar, format_values(values), low <= median(values) <= high)
        for workload, values in ratios
    ]


def make_interval_figures(name: str, ratios: Sequence[tuple[str, list[float]]]) -> list[Figure]:
    """Return a line for each workload: the 95 % interval of the mean must lie above 0.98."""
    figures = []
    for workload, values in ratios:
        t = STUDENT.get(len(values))
        half = t * stdev(values) / math.sqrt(len(values)) if t else 0.0
        lowest = fmean(values) - half
        value = f"{fmean(values):.2f} × ± {half:.2f}" if t else f"{fmean(values):.2f} ×, one seed"
        figures.append(Figure(f"{name}: {workload}", "1 ×, interval above 0.98", value, lowest > 0.98))
    return figures


def format_values(values: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{median(values):.2f} × [{min(values):.2f} {max(values):.2f}]"


def make_bound_figures(
    rates: Rates, workloads: Sequence[Workload], ours: str, traces: Path | None
) -> list[Figure]:
    """Compare with the fluid and the prefill burst bound, and Arrow with seven FCFS prefill instances."""
    figures = []
    profile = load_profile(PROFILE)
    for workload in workloads:
        fleet = UniformFleet(INSTANCES, profile, Slo(workload.ttft, TPOT_S))
        load = make_load(workload, traces)
        requests = (
            load.requests if isinstance(load, RecordedLoad) else load.prepare(1.0, slo=fleet.slo, seed=1)
        )
        found = rates.get((workload.name, ours, 0.9))
        if workload.smooth and found:
            limit = min(
                compute_fluid_rate(requests, fleet), find_prefill_burst_rate(requests, fleet, attainment=0.9)
            )
            shares = [rate / limit for rate in found.rates_rps]
            name = f"share of the fluid and prefill burst bounds (B1, B3): {workload.name}"
            figures.append(Figure(name, "0.85 ×", format_values(shares), median(shares) >= 0.85))
        arrow = rates.get((workload.name, ARROW, 0.9))
        if not workload.moving and not workload.smooth and workload.ttft == 3.0 and arrow:
            seven = UniformFleet(7, profile, fleet.slo)
            reference = find_fcfs_rate(requests, seven, attainment=0.9)
            shares = [rate / reference for rate in arrow.rates_rps]
            name = f"Arrow / seven FCFS prefill instances (B5): {workload.name}"
            figures.append(Figure(name, "0.9 ×", format_values(shares), median(shares) >= 0.9))
    return figures


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
    """Measure time and memory of the Azure Code hour at 1.5 times its rate."""
    if traces is None:
        return [Figure("Azure Code hour × 1.5", "10 s, 500 MB", "not measured: no --traces", None)]
    options = make_options(Workload("", "", moving=False, smooth=False), ARROW)
    recorded, _ = leave_out_overlong(load_trace(traces / "azure_code_2023.csv.gz").requests, options.profile)
    load = prepare_load(recorded, scale=1.5, speed=1.0, slo=options.slo, seed=1)
    started_s = time.process_time()
    simulate(load, options)
    cpu_s = time.process_time() - started_s
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    passed = cpu_s <= 10 and memory_mb <= 500
    return [Figure("Azure Code hour × 1.5", "10 s, 500 MB", f"{cpu_s:.1f} s, {memory_mb:.0f} MB", passed)]


def make_figures(rates: Rates, workloads: Sequence[Workload], ours: str, traces: Path | None) -> list[Figure]:
    """Return all lines of the table."""
    moving = [workload for workload in workloads if workload.moving]
    stationary = [workload for workload in workloads if workload.smooth and not workload.moving]
    bursty = [workload for workload in workloads if is_bursty(workload)]
    figures = make_ratio_figures(
        "faithful Arrow / 4P4D, 90 %", compare(rates, bursty, ARROW, EVEN, 0.9), low=2.0, high=2.6
    )
    figures += make_ratio_figures(
        f"{ours} / best static, 90 %", compare(rates, stationary, ours, BEST, 0.9), low=0.97
    )
    for bar in BARS:
        figures += make_ratio_figures(
            f"{ours} / best static, {bar:.0%}", compare(rates, moving, ours, BEST, bar), low=1.2
        )
    if ours != ARROW:
        figures += make_ratio_figures(
            f"{ours} / Arrow, 90 %", compare(rates, moving, ours, ARROW, 0.9), low=1.15
        )
        figures += make_interval_figures(f"{ours} / Arrow, 90 %", compare(rates, workloads, ours, ARROW, 0.9))
    figures += make_ratio_figures(
        f"{ours} / clairvoyant split, 90 %", compare(rates, moving, ours, CLAIRVOYANT, 0.9), low=0.95
    )
    figures += make_bound_figures(rates, workloads, ours, traces)
    return figures + make_flip_figures(rates, workloads, ours)


# --- the command -----------------------------------------------------------------------------------------


def list_tasks(workloads: Sequence[Workload], options: argparse.Namespace) -> list[Task]:
    """List what is measured, the longest first."""
    policies = [ARROW] if options.quick else [BEST, CLAIRVOYANT, ARROW]
    if options.ours not in policies:
        policies.append(options.ours)
    seeds, precision = (1, 1.1) if options.quick else (options.seeds, 1.02)
    make = partial(Task, seeds=seeds, precision=precision, traces=options.traces)
    tasks = [make(workload, policy, 0.9) for policy in policies for workload in workloads]
    tasks += [make(workload, EVEN, 0.9) for workload in workloads if is_bursty(workload)]
    if not options.quick:
        moving = [workload for workload in workloads if workload.moving]
        high = [policy for policy in policies if policy in (BEST, options.ours)]
        tasks += [make(workload, policy, 0.99) for policy in high for workload in moving]
        one = partial(Task, seeds=1, precision=1.05, traces=options.traces)
        tasks += [
            one(workload, policy, 0.9) for policy in OTHERS for workload in workloads if workload.moving
        ]
    return tasks


def read_workloads(use: str, *, quick: bool, traces: Path | None) -> list[Workload]:
    """Read the list; recordings are left out without their folder."""
    path = Path(__file__).with_name("scheduling_workloads.toml")
    listed = [Workload(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["workload"]]
    chosen = [w for w in listed if w.use == use and (w.name in COMPOSED or traces is not None)]
    return [w for w in chosen if w.name in ("azure_code_2023.csv.gz", "phases-200s")] if quick else chosen


def print_rates(rates: Rates) -> None:
    """Print the median rates with their ranges."""
    rows = [
        (
            workload,
            measured.policy if policy == BEST else policy,
            f"{bar:.0%}",
            f"{median(measured.rates_rps):.2f} [{min(measured.rates_rps):.2f} {max(measured.rates_rps):.2f}]",
            f"{100 * median(measured.token_shares):.1f}",
            f"{median(measured.flips):.0f}",
        )
        for (workload, policy, bar), measured in sorted(rates.items())
    ]
    header = ("WORKLOAD", "POLICY", "SLO", "REQUESTS/S", "TOKENS %", "FLIPS")
    print("\n".join(format_columns(header, *rows)), end="\n\n")


def dump(rates: Rates, figures: Sequence[Figure], *, wall_s: float) -> dict[str, Any]:
    """Return the results for programs."""
    return {
        "rates": [
            {"workload": workload, "compared": policy, "bar": bar, **asdict(measured)}
            for (workload, policy, bar), measured in sorted(rates.items())
        ],
        "figures": [asdict(figure) for figure in figures],
        "wall_s": wall_s,
    }


def main() -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="folder of recorded workloads")
    parser.add_argument("--ours", default="arrow", help="the policy that is judged")
    parser.add_argument("--use", choices=("development", "test"), default="development")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="two workloads, one seed, rates to 10 %%")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    started_s = time.monotonic()
    workloads = read_workloads(options.use, quick=options.quick, traces=options.traces)
    tasks = list_tasks(workloads, options)
    with ProcessPoolExecutor(options.jobs) as pool:
        measured = list(pool.map(measure, tasks))
    rates = {
        (task.workload.name, task.policy, task.bar): result
        for task, result in zip(tasks, measured, strict=True)
    }
    figures = make_figures(rates, workloads, options.ours, options.traces) + measure_speed(options.traces)
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
