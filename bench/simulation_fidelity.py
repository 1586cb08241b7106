"""Compares a simulated run with the same load in real time, through sockets, a router and engine processes.

    python bench/simulation_fidelity.py --trace FILE [--speed X] [--for SECONDS] [--seeds N]

`fulcrum play` replays the recording against eight engine servers in mode Off; the simulated fleet gets the
same requests at the same times, and the same fixed split. Prints mean TTFT, mean TPOT and SLO attainment.

A few milliseconds in an arrival change which instance a request gets, and so change the means of a run by
several percent. So the load is played once with each of N seeds, and simulated 20 times with each, with
arrivals up to 3 ms later; the means of both are compared. Exit code 1 if one differs by more than 5 %, if a
request failed, or if the machine was too slow.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import ControlOptions, RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import (
    WorkloadRequest,
    jitter_arrivals,
    load_trace,
    speed_up_arrivals,
)

DIFFERENCE_MAX = 0.05
SIMULATED_RUNS, LATE_MAX_S = 20, 0.003
"""Simulated runs of one load. In each one, requests arrive late by up to so much, as in real time."""
SLO, PROFILE, SPLIT = Slo(ttft_s=3.0, tpot_s=0.1), "l70-h100-tp4-warm", "static:4P4D"
"""Those of examples/replay.yaml, which `play` runs a recording with."""
LOCAL = ControlOptions(hop_s=0.001, model_error=0.0, step_noise=0.0)

Figures = dict[str, float]


def play(trace: Path, *, speed: float, seconds: float, seed: int) -> dict[str, Any]:
    """Run `fulcrum play` in mode Off; return its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {"--trace": trace, "--speed": speed, "--for": f"{seconds:g}s", "--seed": seed}
        arguments = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "fulcrum_cli", "play", "--headless", "--mode", "Off", *arguments]
        subprocess.run([*command, "--json", str(report)], check=True, stdout=subprocess.DEVNULL)
        document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return document


def list_requests(trace: Path, *, speed: float, seconds: float, seed: int) -> list[WorkloadRequest]:
    """List the requests that `play` sends."""
    requests = speed_up_arrivals(jitter_arrivals(load_trace(trace).requests, seed=seed), speed)
    return [request for request in requests if request.arrival_s < seconds]


def delay_arrivals(load: Sequence[WorkloadRequest], *, seed: int) -> list[WorkloadRequest]:
    """Return the requests a little later, each by its own time."""
    rng = random.Random(seed)
    late = [replace(one, arrival_s=one.arrival_s + rng.uniform(0.0, LATE_MAX_S)) for one in load]
    return sorted(late, key=lambda one: one.arrival_s)


def simulate_load(load: Sequence[WorkloadRequest]) -> Figures:
    """Simulate the load once; return the figures over all of its requests, as `play` counts them."""
    options = RunOptions(
        profile=load_profile(PROFILE),
        instances=8,
        policy=parse_policy(SPLIT, instances=8),
        slo=SLO,
        control=LOCAL,
    )
    records = simulate(load, options).records
    ended = [r for r in records if r.outcome is Outcome.OK]
    return {
        "mean TTFT, s": _mean(r.ttft_s for r in ended),
        "mean TPOT, s": _mean(r.tpot_s for r in ended),
        "SLO attainment": sum(r.meets(SLO) for r in ended) / len(records),
    }


def _mean(values: Iterable[float | None]) -> float:
    return fmean(value for value in values if value is not None)


def average(figures: Sequence[Figures]) -> Figures:
    """Return the mean of each figure."""
    return {name: fmean(figure[name] for figure in figures) for name in figures[0]}


class Compared(NamedTuple):
    """The figures of one run of `play`, the means of the simulated ones, and whether the run counts."""

    live: Figures
    simulated: Figures
    is_valid: bool
    """All requests were served, by a machine that was fast enough."""


def compare(trace: Path, *, speed: float, seconds: float, seed: int) -> Compared:
    """Play and simulate the load with this seed; print both."""
    report = play(trace, speed=speed, seconds=seconds, seed=seed)
    live = {
        "mean TTFT, s": report["latencies"]["ttft_mean_s"],
        "mean TPOT, s": report["latencies"]["tpot_mean_s"],
        "SLO attainment": report["attainment"],
    }
    load = list_requests(trace, speed=speed, seconds=seconds, seed=seed)
    runs = [simulate_load(delay_arrivals(load, seed=number)) for number in range(SIMULATED_RUNS)]
    simulated = {name: fmean(run[name] for run in runs) for name in live}
    offered, failed = report["requests"]["offered"], report["requests"]["failed"]
    print(f"seed {seed}: {offered} requests live, {len(load)} simulated; {failed} failed")
    for name, value in live.items():
        low, high = min(run[name] for run in runs), max(run[name] for run in runs)
        print(f"  {name:16} live {value:.4f}, simulated {low:.4f} to {high:.4f}, mean {simulated[name]:.4f}")
    if report["machine_too_slow"]:
        print(f"machine too slow: engine steps were {report['engine_lateness_p99_ms']} ms late (p99)")
    sys.stdout.flush()
    return Compared(live, simulated, not failed and not report["machine_too_slow"])


def main() -> int:
    """Run both and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="recorded workload")
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--for", dest="seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=5, help="runs of play, each with its own seed")
    given = parser.parse_args()
    found = [
        compare(given.trace, speed=given.speed, seconds=given.seconds, seed=seed)
        for seed in range(1, given.seeds + 1)
    ]
    agrees = all(one.is_valid for one in found)
    print(f"means of {given.seeds} seeds; differences with their standard error:")
    for name in found[0].live:
        live, simulated = fmean(one.live[name] for one in found), fmean(one.simulated[name] for one in found)
        each = [one.simulated[name] / one.live[name] - 1 for one in found]
        error = f" +- {stdev(each) / math.sqrt(len(each)):.1%}" if len(each) > 1 else ""
        print(f"  {name:16} live {live:.4f}, simulated {simulated:.4f}, {fmean(each):+.1%}{error}")
        agrees = agrees and abs(fmean(each)) <= DIFFERENCE_MAX
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
