"""Time and memory of one simulated run, small or large.

    python bench/simulation.py --trace FILE [--seed N] [--compiled]
    python bench/simulation.py --large [--for SECONDS] [--seed N] [--compiled]

The small one is a recorded workload at 1.5 times its rate on 8 instances: exit code 1 if it takes more than
10 s of one core or 500 MB. The large one is ten minutes of the workload `stationary` on 1,000 instances, at
60 % of what they can do: exit code 1 if it takes longer than it lasts. Prints CPU seconds, peak memory and
the figures of the run. With `--compiled` the simulator is compiled first, which takes a minute once.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compiled import ensure_compiled
from fulcrum_cli.simulation.report_text import format_report
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import RunResult, simulate
from fulcrum_simulator.workload import COMPOSED, WorkloadRequest, load_trace, scale_rate

INSTANCES, LARGE = 8, 1_000
SCALE = 1.5
CPU_MAX_S = 10.0
MEMORY_MAX_MB = 500.0
LARGE_MAX_S = 900.0
"""Length of `stationary`."""
LOAD_OF_8 = 1.2
"""Factor of `stationary` at which 8 instances have 60 % of the work that they can do."""


def main() -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--trace", type=Path, help="recorded workload")
    kind.add_argument("--large", action="store_true", help=f"{LARGE:,} instances")
    parser.add_argument("--for", type=float, default=600.0, dest="seconds", help="of the large run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="compile the simulator first")
    arguments = parser.parse_args()
    if not 0 < arguments.seconds <= LARGE_MAX_S:
        parser.error(f"--for must be above 0 and at most {LARGE_MAX_S:g}, the length of the workload")
    if arguments.compiled:
        ensure_compiled()
    if arguments.large:
        load = make_large_load(LARGE, arguments.seconds, arguments.seed)
        measured = measure(load, make_options(LARGE, arguments.seed))
        print(f"{measured} (bar {arguments.seconds:g} s)")
        return 0 if measured.cpu_s <= arguments.seconds else 1
    measured = measure_recorded(arguments.trace, arguments.seed)
    print(f"{measured} (bars {CPU_MAX_S:g} s, {MEMORY_MAX_MB:g} MB)")
    return 0 if measured.meets_bars else 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: seconds of one core, and the largest memory of the process so far."""

    result: RunResult
    cpu_s: float
    memory_mb: float

    @property
    def meets_bars(self) -> bool:
        """Whether the run meets the bars of the recorded workload."""
        return self.cpu_s <= CPU_MAX_S and self.memory_mb <= MEMORY_MAX_MB

    def __str__(self) -> str:
        taken = f"{self.result.end_s:,.0f} s simulated in {self.cpu_s:.1f} s of one core"
        each = f"{1e6 * self.cpu_s / len(self.result.records):.0f} µs per request"
        return f"{format_report(build_report(self.result))}\n{taken}, {self.memory_mb:.0f} MB, {each}"


def measure(load: Sequence[WorkloadRequest], options: RunOptions) -> Measured:
    """Run a load."""
    started_s = time.process_time()
    result = simulate(load, options)
    cpu_s = time.process_time() - started_s
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(result, cpu_s, memory_mb)


def measure_recorded(trace: Path, seed: int) -> Measured:
    """Run a recorded workload at `SCALE` times its rate."""
    options = make_options(INSTANCES, seed)
    recorded, _ = leave_out_overlong(load_trace(trace).requests, options.profile)
    load = prepare_load(recorded, scale=SCALE, speed=1.0, slo=options.slo, seed=seed)
    return measure(load, options)


def make_options(instances: int, seed: int) -> RunOptions:
    """Return the options of a run with policy `arrow`."""
    return RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=instances,
        policy=parse_policy("arrow", instances=instances),
        slo=Slo(ttft_s=3.0, tpot_s=0.1),
        seed=seed,
    )


def make_large_load(instances: int, seconds: float, seed: int) -> list[WorkloadRequest]:
    """Return the first seconds of `stationary` at 60 % of what so many instances can do."""
    requests = [r for r in COMPOSED["stationary"](LOAD_OF_8, seed) if r.arrival_s < seconds]
    return scale_rate(requests, instances / 8, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
