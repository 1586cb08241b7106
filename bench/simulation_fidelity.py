"""Compares a simulated run with the same load in real time, through sockets, a router and engine processes.

    python bench/simulation_fidelity.py --trace FILE [--speed X] [--for SECONDS] [--seed N]

`fulcrum play` replays the recording against eight engine servers in mode Off; the simulated fleet gets the
same requests at the same times, and the same fixed split. Prints mean TTFT, mean TPOT and SLO attainment.
Exit code 1 if one differs by more than 5 %, if a request failed, or if the machine was too slow.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

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
SLO, PROFILE, SPLIT = Slo(ttft_s=3.0, tpot_s=0.1), "l70-h100-tp4-warm", "static:4P4D"
"""Those of examples/replay.yaml, which `play` runs a recording with."""
LOCAL = ControlOptions(hop_s=0.001, model_error=0.0)

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


def simulate_load(load: Sequence[WorkloadRequest], *, seed: int) -> Figures:
    """Simulate the load; return the figures over all of its requests, as `play` counts them."""
    options = RunOptions(
        profile=load_profile(PROFILE),
        instances=8,
        policy=parse_policy(SPLIT, instances=8),
        slo=SLO,
        seed=seed,
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


def main() -> int:
    """Run both and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="recorded workload")
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--for", dest="seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    trace, seconds, seed = options["trace"], options["seconds"], options["seed"]
    report = play(**options)
    latencies, requests = report["latencies"], report["requests"]
    live = {
        "mean TTFT, s": latencies["ttft_mean_s"],
        "mean TPOT, s": latencies["tpot_mean_s"],
        "SLO attainment": report["attainment"],
    }
    load = list_requests(trace, speed=options["speed"], seconds=seconds, seed=seed)
    simulated = simulate_load(load, seed=seed)
    differences = {name: simulated[name] / live[name] - 1 for name in live}
    for name, difference in differences.items():
        print(f"{name:16} live {live[name]:.4f}, simulated {simulated[name]:.4f}, {difference:+.1%}")
    print(f"{requests['offered']} requests live, {len(load)} simulated; {requests['failed']} failed")
    if report["machine_too_slow"]:
        print(f"machine too slow: engine steps were {report['engine_lateness_p99_ms']} ms late (p99)")
    agrees = max(map(abs, differences.values())) <= DIFFERENCE_MAX
    return 0 if agrees and not requests["failed"] and not report["machine_too_slow"] else 1


if __name__ == "__main__":
    sys.exit(main())
