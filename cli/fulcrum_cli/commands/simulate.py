"""`fulcrum simulate`: runs a service under a recorded workload in virtual time, and reports the figures."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fulcrum_cli.simulation.options import Contender, SimulateOptions
from fulcrum_cli.simulation.plot import write_plot
from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.fleet.load import prepare_load
from fulcrum_simulator.fleet.options import Policy, RunOptions
from fulcrum_simulator.fleet.rate_search import find_highest_speed
from fulcrum_simulator.fleet.report import build_report, format_report
from fulcrum_simulator.fleet.run import RunResult, simulate

Report = dict[str, Any]
Run = tuple[Report, RunResult]


def run(options: SimulateOptions) -> None:
    """Run the simulations, print the figures and write the files that were asked for."""
    started_s = time.monotonic()
    if options.overlong:
        print(f"{options.trace_name}: {options.overlong}", file=sys.stderr)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        runs = [_run_contender(contender, options, progress) for contender in options.contenders]
    reports = [report for report, _ in runs]
    for report in reports:
        print(_describe(report, options))
    if len(reports) > 1:
        print("\n".join(("", *_compare(reports))))
    if options.json is not None:
        _write(options.json, {"runs": reports, "wall_s": time.monotonic() - started_s})
    if options.plot is not None:
        title = f"{options.trace_name} on {options.run.instances} x {options.run.profile.name}"
        write_plot(options.plot, title, [result for _, result in runs])


def _run_contender(contender: Contender, options: SimulateOptions, progress: Progress) -> Run:
    """Return the first seed's run of the policy that is best on average; its report lists every seed."""
    found: list[tuple[tuple[float, float], Run]] = []
    for policy in contender.policies:
        runs = [_run_policy(policy, seed, options, progress) for seed in options.seeds]
        reports = [report for report, _ in runs]
        seeds = [
            {"seed": report["seed"], "attainment": report["attainment"], "requests_per_s": _get_rate(report)}
            for report in reports
        ]
        found.append((_rank(reports), ({**reports[0], "seeds": seeds}, runs[0][1])))
    report, result = max(found, key=lambda ranked: ranked[0])[1]
    return {"contender": contender.name, "trace": options.trace_name, **report}, result


def _rank(reports: list[Report]) -> tuple[float, float]:
    """Return the means over all seeds: the speed of a rate search, then attainment."""
    return (
        fmean(report.get("speed") or 0.0 for report in reports),
        fmean(report["attainment"] or 0.0 for report in reports),
    )


def _get_rate(report: Report) -> float:
    return float(report["goodput"]["offered_requests_per_s"] or 0.0)


def _run_policy(policy: Policy, seed: int, options: SimulateOptions, progress: Progress) -> Run:
    def run_at(speed: float) -> Run:
        return _run_once(replace(options.run, policy=policy, seed=seed), speed, options, progress)

    if options.find_rate_share is None:
        return run_at(1.0)
    bar = options.find_rate_share
    found = find_highest_speed(run_at, lambda run: (run[0]["attainment"] or 0.0) >= bar)
    report, result = found.result or run_at(1.0)
    return {**report, "speed": found.speed, "trials": found.trials}, result


def _run_once(run: RunOptions, speed: float, options: SimulateOptions, progress: Progress) -> Run:
    at_speed = "" if speed == 1.0 else f" at {speed:.3g} x speed"
    task = progress.add_task(f"{run.policy}, seed {run.seed}{at_speed}", total=1.0)
    load = prepare_load(
        options.recorded,
        scale=options.scale,
        speed=options.speed * speed,
        slo=run.slo,
        seed=run.seed,
    )
    update: Callable[[float], None] = lambda share: progress.update(task, completed=share)  # noqa: E731
    result = simulate(load, run, on_progress=update)
    progress.remove_task(task)
    return build_report(result), result


def _describe(report: Report, options: SimulateOptions) -> str:
    return "\n".join((_describe_run(report, options), *_describe_spread(report["seeds"])))


def _describe_spread(seeds: list[dict[str, float]]) -> list[str]:
    """Return the smallest and the largest figure of all seeds; nothing for one seed."""
    if len(seeds) == 1:
        return []
    attainment = [100 * (each["attainment"] or 0.0) for each in seeds]
    rates = [each["requests_per_s"] for each in seeds]
    return [
        f"  {len(seeds)} seeds          SLO attainment {min(attainment):.1f} to {max(attainment):.1f} %, "
        f"mean {fmean(attainment):.1f} %; offered {min(rates):.2f} to {max(rates):.2f} requests/s, "
        f"mean {fmean(rates):.2f}"
    ]


def _describe_run(report: Report, options: SimulateOptions) -> str:
    if options.find_rate_share is None:
        return format_report(report)
    bar = f"{100 * options.find_rate_share:g} %"
    if report["speed"] is None:
        return f"{report['policy']}: no rate reaches an SLO attainment of {bar}; at the recorded rate:\n" + (
            format_report(report)
        )
    rate = report["goodput"]["offered_requests_per_s"]
    title = f"{report['policy']}: {rate:.2f} requests/s at an SLO attainment of {bar} or more"
    return f"{title} (speed {options.speed * report['speed']:.3g}, {report['trials']} runs)\n" + (
        format_report(report)
    )


def _compare(reports: list[Report]) -> list[str]:
    rows = [
        (
            str(report["policy"]),
            f"{report['goodput']['offered_requests_per_s']:.2f}",
            f"{100 * report['attainment']:.1f} %",
            f"{100 * report['goodput']['token_share']:.1f} %",
            f"{report['goodput']['requests_per_s']:.2f}",
            str(report["flips"]["count"]),
            f"{report['ttft_s']['p90'] or 0:.2f} s",
            f"{1000 * (report['tpot_s']['p90'] or 0):.0f} ms",
        )
        for report in reports
    ]
    header = ("POLICY", "OFFERED/S", "SLO", "TOKENS", "GOODPUT/S", "FLIPS", "TTFT P90", "TPOT P90")
    return format_columns(header, *rows)


def _write(path: Path, document: Report) -> None:
    """Write the figures.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput("--json", path, f"cannot be written: {error.strerror}") from error
