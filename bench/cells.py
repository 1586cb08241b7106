"""One service against several smaller ones with the same instances, by simulation: what cells cost.

    python bench/cells.py [--instances N] [--sizes N…] [--scales X…] [--for SECONDS] [--seed N]

Each request of `phases-200s`, whose best split changes, goes to a random cell, as with a load balancer in
front of them that does not know their load. Each cell is a service with a router and an autoscaler of its
own, policy `balanced`; no instance moves from cell to cell. Prints for each rate (`--scales`: factors of the
workload's rate, per eight instances) which share of the requests after the warm-up was in time, and the
flips.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bench.compiled import ensure_compiled
from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.formatting import format_count
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import COMPOSED, WorkloadRequest

PROFILE, SLO, WORKLOAD = "l70-h100-tp4", Slo(ttft_s=3.0, tpot_s=0.1), "phases-200s"


class Outcome(NamedTuple):
    """Requests after the warm-up, those of them in time, and flips, of all cells together."""

    scored: int
    in_time: int
    flips: int


def run_cells(requests: Sequence[WorkloadRequest], *, instances: int, size: int, seed: int) -> Outcome:
    """Run `instances` in cells of `size`, each with its part of the requests."""
    rng, count = random.Random(seed), instances // size
    dealt: list[list[WorkloadRequest]] = [[] for _ in range(count)]
    for request in requests:
        dealt[rng.randrange(count)].append(request)
    scored = in_time = flips = 0
    for part in dealt:
        options = RunOptions(
            profile=load_profile(PROFILE),
            instances=size,
            policy=parse_policy("balanced", instances=size),
            slo=SLO,
            seed=seed,
        )
        result = simulate(part, options)
        scored += len(result.scored)
        in_time += sum(one.meets(SLO) for one in result.scored)
        flips += len(result.flips)
    return Outcome(scored, in_time, flips)


def main() -> int:
    """Run all sizes at all rates; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 50, 8], help="instances of a cell")
    parser.add_argument("--scales", type=float, nargs="+", default=[1.6, 1.8, 2.0])
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    uneven = [size for size in given.sizes if size < 2 or given.instances % size]
    if uneven:
        parser.error(f"--sizes must be at least 2 and divide --instances: {uneven[0]}")
    ensure_compiled()
    rows = []
    for scale in given.scales:
        whole = COMPOSED[WORKLOAD](scale * given.instances / 8, given.seed)
        requests = [request for request in whole if request.arrival_s < given.seconds]
        cells = [f"{scale:g}", f"{len(requests):,}"]
        for size in given.sizes:
            found = run_cells(requests, instances=given.instances, size=size, seed=given.seed)
            cells.append(f"{100 * found.in_time / found.scored:.1f} %, {format_count(found.flips, 'flip')}")
            print(f"scale {scale:g}, cells of {size}: {cells[-1]}", file=sys.stderr)
        rows.append(cells)
    header = ("SCALE", "REQUESTS", *(f"{given.instances // n} x {n} INSTANCES" for n in given.sizes))
    print("\n".join(format_columns(header, *rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
