"""`fulcrum simulate`: run a simulated fleet with each policy and each seed, and compare the policies.

With `--find-rate` it searches the highest request rate at which a policy keeps the SLO attainment. The
figures go to the terminal and, if asked for, to a JSON file and a plot. `simulation.options` parses the
options.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fulcrum_cli.output_files import write_text_file
from fulcrum_cli.simulation.options import ComparedPolicy, SimulateOptions
from fulcrum_cli.simulation.page_states import build_states
from fulcrum_cli.simulation.plot import render_plot
from fulcrum_cli.simulation.progress import show_progress
from fulcrum_cli.simulation.report_text import format_comparison, format_report, format_spread
from fulcrum_cli.terminal.printable import print_lines
from fulcrum_cli.web.recording import write_states
from fulcrum_simulator.fleet.load import RecordedLoad
from fulcrum_simulator.fleet.policy_runs import OnRun, PolicyRuns, SeedRun, pick_best, run_policy


def run(options: SimulateOptions) -> None:
    """Run the simulations, write the files that were asked for, and print the figures.

    The files come first: whoever reads the output may close it after its first line.
    """
    started_s = time.monotonic()
    if options.overlong:
        print(f"{options.load.name}: {options.overlong}", file=sys.stderr)
    policies = sum(len(compared.policies) for compared in options.compared)
    with show_progress(policies * len(options.seeds)) as on_run:
        runs = [_run_compared(compared, options, on_run) for compared in options.compared]
    try:
        _write_files(runs, options, started_s)
    finally:  # also if a file cannot be written
        print_lines("\n".join(_describe(runs, options)).split("\n"))


def _describe(runs: Sequence[PolicyRuns], options: SimulateOptions) -> Iterator[str]:
    if options.trace_text is not None:
        yield f"{options.load.name}: {options.trace_text}"
    for each in runs:
        yield _describe_run(each.runs[0], options)
        yield from format_spread(each.runs)
    if len(runs) > 1:
        yield ""
        yield from format_comparison([compared.name for compared in options.compared], runs)


def _write_files(runs: Sequence[PolicyRuns], options: SimulateOptions, started_s: float) -> None:
    if options.json is not None:
        reports = [_dump(*named, options) for named in zip(options.compared, runs, strict=True)]
        document = {"runs": reports, "wall_s": time.monotonic() - started_s}
        write_text_file("--json", options.json, json.dumps(document, indent=2) + "\n")
    if options.plot is not None:
        title = f"{options.load.name} on {options.run.instances} x {options.run.profile.name}"
        page = render_plot(title, [each.runs[0].result for each in runs])
        write_text_file("--plot", options.plot, page)
    if options.record is not None:
        write_states(build_states(runs[0].runs[0].result, load=options.load.name), options.record)


def _run_compared(compared: ComparedPolicy, options: SimulateOptions, on_run: OnRun) -> PolicyRuns:
    """Run every policy that counts for a compared one with every seed; return the best one."""
    return pick_best(
        [
            run_policy(
                options.load,
                replace(options.run, policy=policy),
                options.seeds,
                attainment_min=options.find_rate_share,
                check_around=options.check_rates,
                on_run=on_run,
            )
            for policy in compared.policies
        ]
    )


def _describe_run(run: SeedRun, options: SimulateOptions) -> str:
    text = format_report(run.report)
    if options.find_rate_share is None:
        return text
    policy, share = run.report["policy"], f"{100 * options.find_rate_share:g} %"
    if run.factor is None:
        return f"{policy}: no rate reaches an SLO attainment of {share}; at the first rate:\n{text}"
    title = f"{policy}: {run.rate_rps:.2f} requests/s at an SLO attainment of {share} or more"
    lines = [f"{title} ({run.factor:.3g} x the rate, {run.trials} runs)", text]
    if run.around:
        falls = "falls" if run.is_monotone else "DOES NOT FALL steadily"
        shares = ", ".join(f"{100 * attainment:.1f} % at {factor:.3g} x" for factor, attainment in run.around)
        lines.append(f"  around it        attainment {falls}: {shares}")
    return "\n".join(lines)


def _dump(compared: ComparedPolicy, runs: PolicyRuns, options: SimulateOptions) -> dict[str, Any]:
    """Return the report of the first seed with the figures of all seeds."""
    first = runs.runs[0]
    speed = options.load.speed if isinstance(options.load, RecordedLoad) else 1.0
    load = {"load": options.load.name, "scale": options.load.scale, "speed": speed}
    report = {"compared": compared.name, **load, **first.report}
    if options.find_rate_share is not None:
        report |= {"factor": first.factor, "trials": first.trials, "around": first.around}
    seeds = [
        {"seed": run.report["seed"], "attainment": run.attainment, "requests_per_s": _offered(run)}
        for run in runs.runs
    ]
    return report | {"seeds": seeds}


def _offered(run: SeedRun) -> float | None:
    rate: float | None = run.report["goodput"]["offered_requests_per_s"]
    return rate
