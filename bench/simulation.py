"""Time and memory of one simulated hour: a recorded workload at 1.5 times its rate on 8 instances.

    python bench/simulation.py --trace FILE [--seed N]

Prints CPU seconds, peak memory and the figures of the run. Exit code 1 if the run takes more than 10 s of one
core or 500 MB.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

from fulcrum_cli.simulation.report_text import format_report
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import load_trace

INSTANCES = 8
SCALE = 1.5
CPU_MAX_S = 10.0
MEMORY_MAX_MB = 500.0


def main() -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="recorded workload")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    options = RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=INSTANCES,
        policy=parse_policy("arrow", instances=INSTANCES),
        slo=Slo(ttft_s=3.0, tpot_s=0.1),
        seed=arguments.seed,
    )
    recorded, _ = leave_out_overlong(load_trace(arguments.trace).requests, options.profile)
    load = prepare_load(recorded, scale=SCALE, speed=1.0, slo=options.slo, seed=arguments.seed)
    started_s = time.process_time()
    result = simulate(load, options)
    cpu_s = time.process_time() - started_s
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(format_report(build_report(result)))
    print(
        f"{result.end_s:,.0f} s simulated in {cpu_s:.1f} s of one core (bar {CPU_MAX_S:g} s), "
        f"{memory_mb:.0f} MB (bar {MEMORY_MAX_MB:g} MB), {1e6 * cpu_s / len(load):.0f} µs per request"
    )
    return 0 if cpu_s <= CPU_MAX_S and memory_mb <= MEMORY_MAX_MB else 1


if __name__ == "__main__":
    sys.exit(main())
