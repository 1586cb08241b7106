"""Time and memory of one simulated run, small or large.

    python bench/simulation.py --trace FILE [--seed N] [--compiled]
    python bench/simulation.py --large [--for SECONDS] [--seed N] [--compiled]

The small one is a recorded workload at 1.5 times its rate on 8 instances: exit code 1 if it takes more than
10 s of one core or 500 MB. The large one is ten minutes of the workload `stationary` on 1,000 instances, at
60 % of what they can do: exit code 1 if it takes longer than it lasts. Prints CPU seconds, peak memory and
the figures of the run. With `--compiled` the simulator is compiled first, which takes a minute once.
"""

import argparse
import math
import resource
import sys
import time
from pathlib import Path

from bench.compiled_simulator import ensure_compiled
from fulcrum_cli.simulation.report_text import format_report
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
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
    options = make_options(LARGE if arguments.large else INSTANCES, arguments.seed)
    if arguments.large:
        load = make_large_load(LARGE, arguments.seconds, arguments.seed)
        cpu_max_s, memory_max_mb = arguments.seconds, math.inf
    else:
        load = make_recorded_load(arguments.trace, options, arguments.seed)
        cpu_max_s, memory_max_mb = CPU_MAX_S, MEMORY_MAX_MB
    started_s = time.process_time()
    result = simulate(load, options)
    cpu_s = time.process_time() - started_s
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(format_report(build_report(result)))
    print(
        f"{result.end_s:,.0f} s simulated in {cpu_s:.1f} s of one core (bar {cpu_max_s:g} s), "
        f"{memory_mb:.0f} MB (bar {memory_max_mb:g} MB), {1e6 * cpu_s / len(load):.0f} µs per request"
    )
    return 0 if cpu_s <= cpu_max_s and memory_mb <= memory_max_mb else 1


def make_options(instances: int, seed: int) -> RunOptions:
    """Return the options of a run with policy `arrow`."""
    return RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=instances,
        policy=parse_policy("arrow", instances=instances),
        slo=Slo(ttft_s=3.0, tpot_s=0.1),
        seed=seed,
    )


def make_recorded_load(trace: Path, options: RunOptions, seed: int) -> list[WorkloadRequest]:
    """Return the requests of a recorded workload at `SCALE` times its rate."""
    recorded, _ = leave_out_overlong(load_trace(trace).requests, options.profile)
    return prepare_load(recorded, scale=SCALE, speed=1.0, slo=options.slo, seed=seed)


def make_large_load(instances: int, seconds: float, seed: int) -> list[WorkloadRequest]:
    """Return the first seconds of `stationary` at 60 % of what so many instances can do."""
    requests = [r for r in COMPOSED["stationary"](LOAD_OF_8, seed) if r.arrival_s < seconds]
    return scale_rate(requests, instances / 8, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
