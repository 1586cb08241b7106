"""One service against several smaller ones with the same instances, by simulation: what cells cost.

    python bench/cells.py [--instances N] [--sizes N…] [--scales X…] [--for SECONDS] [--seeds N]

Each request of `phases-200s`, whose best split changes, goes to a random cell, as with a load balancer in
front of them that does not know their load. Each cell is a service with a router and an autoscaler of its
own, policy `balanced`. Several cells are run twice: without moves, and with a `Mover` that moves instances to
cells with more work for each instance. Fulcrum has no such mover. Prints for each rate (`--scales`: factors
of the workload's rate, per eight instances) which share of the requests after the warm-up was in time, the
flips, and the moves between cells; means of the seeds, and for shares their range.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from bench.compiled import ensure_compiled
from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role, Slo
from fulcrum_simulator.fleet.options import Policy, PolicyName, RunOptions
from fulcrum_simulator.fleet.routed_instance import RoutedInstance
from fulcrum_simulator.fleet.router import SimulatedRouter
from fulcrum_simulator.fleet.run import simulate_cells
from fulcrum_simulator.workload import COMPOSED, WorkloadRequest

PROFILE, SLO, WORKLOAD = "l70-h100-tp4", Slo(ttft_s=3.0, tpot_s=0.1), "phases-200s"
LOOK_INTERVAL_S = 1.0
"""Between two looks of the mover, which are halfway between those of the autoscalers."""
MOVE_GAIN_MIN = 1.2
"""An instance moves if the cell that gets it has so many times the load of the other one even after that."""
SPARE_SHARE = 0.25
"""Engines of each role that a cell has besides its own instances, as a share of these: so many can join.
A single service has none, since there is nowhere to move from."""


class Outcome(NamedTuple):
    """Share of the requests after the warm-up that were in time, flips, and moves, of all cells together."""

    in_time: float
    flips: int
    moves: int


class Move(NamedTuple):
    """An instance that drains in one cell, and the cell that gets one more when the drain ends."""

    leaves: SimulatedRouter
    instance: RoutedInstance
    joins: SimulatedRouter


class Mover:
    """Moves instances between cells, each of which takes part in one move at a time.

    At each look, the cell with the least load is paired with the cell with the most, the second least with
    the second most, and so on. In the former the instance with the fewest requests drains, if it is not the
    last one of its role. Then a spare engine of the latter with the same role begins to serve. Caches and
    learned models do not move.
    """

    def __init__(self, cells: Sequence[SimulatedRouter], *, spares: int) -> None:
        """Take so many spare instances of each role out of service in each cell."""
        self._cells = cells
        self._moving: list[Move] = []
        self.moves = 0
        for cell in cells:
            for role in (Role.PREFILL, Role.DECODE):
                of_role = [one for one in cell.fleet.instances if one.record.role is role]
                for spare in of_role[len(of_role) - spares :]:
                    cell.set_serving(spare, False)

    def look(self) -> None:
        """End the moves that have drained, and begin new ones.

        Raises:
            RuntimeError: if a cell has no serving instance of a role: what it serves would tell nothing.
        """
        for cell in self._cells:
            if len({one.record.role for one in list_serving(cell)}) < 2:
                raise RuntimeError("a cell has lost its last instance of a role")
        self._end_moves()
        busy = {id(cell) for move in self._moving for cell in (move.leaves, move.joins)}
        loads = {id(cell): compute_load(cell) for cell in self._cells if id(cell) not in busy}
        free = sorted((cell for cell in self._cells if id(cell) in loads), key=lambda cell: loads[id(cell)])
        for leaves, joins in zip(free[: len(free) // 2], reversed(free), strict=False):
            left, joined = len(list_serving(leaves)) - 1, len(list_serving(joins)) + 1
            before, after = loads[id(leaves)] * (left + 1) / left, loads[id(joins)] * (joined - 1) / joined
            if after > MOVE_GAIN_MIN * before:
                self._begin_move(leaves, joins)

    def _begin_move(self, leaves: SimulatedRouter, joins: SimulatedRouter) -> None:
        serving = list_serving(leaves)
        roles = [one.record.role for one in serving]
        spare_roles = {one.record.role for one in joins.fleet.instances if not one.record.serving}
        leaving = [
            one for one in serving if roles.count(one.record.role) > 1 and one.record.role in spare_roles
        ]
        if leaving:
            # A prefill instance has a few requests, and drains within seconds.
            instance = min(leaving, key=lambda one: one.record.ledger.legs)
            leaves.set_serving(instance, False)
            self._moving.append(Move(leaves, instance, joins))

    def _end_moves(self) -> None:
        for move in [move for move in self._moving if is_drained(move.instance)]:
            self._moving.remove(move)
            role = move.instance.record.role
            spares = [one for one in move.joins.fleet.instances if not one.record.serving]
            # The autoscaler may have flipped the instance while it drained: then any spare joins.
            spare = next((one for one in spares if one.record.role is role), spares[0])
            move.joins.set_serving(spare, True)
            self.moves += 1


def list_serving(cell: SimulatedRouter) -> list[RoutedInstance]:
    """The instances of a cell that get requests."""
    return [one for one in cell.fleet.instances if one.record.serving]


def is_drained(one: RoutedInstance) -> bool:
    """Whether all requests of an instance have ended, and all KV that it computed has been fetched."""
    return not one.record.ledger.legs and not one.record.ledger.pending_transfers


def compute_load(cell: SimulatedRouter) -> float:
    """The load of a cell for each of its instances, as its router knows it.

    Work of prefill counts in TTFT objectives, that of decode in the tokens with which a step takes the TPOT
    objective, or with which the KV cache is full: each is about what one instance can do in time.
    """
    load = 0.0
    for state, routed in zip(cell.report().instances, cell.fleet.instances, strict=True):
        model, full_tokens = routed.record.decode_model, routed.instance.kv_capacity_tokens
        for_tokens_s = SLO.tpot_s - model.intercept
        if 0.0 < for_tokens_s < model.slope * full_tokens:
            full_tokens = int(for_tokens_s / model.slope)
        load += state.prefill_queued_s / SLO.ttft_s + state.decode_tokens / max(1, full_tokens)
    return load / len(list_serving(cell))


def run_cells(
    requests: Sequence[WorkloadRequest], *, instances: int, size: int, moves: bool, seed: int
) -> Outcome:
    """Run `instances` in cells of `size`, each with its part of the requests."""
    rng, count = random.Random(seed), instances // size
    dealt: list[list[WorkloadRequest]] = [[] for _ in range(count)]
    for request in requests:
        dealt[rng.randrange(count)].append(request)
    spares = max(1, round(SPARE_SHARE * size)) if count > 1 else 0
    prefill = size // 2 + spares
    options = [
        RunOptions(
            profile=load_profile(PROFILE),
            instances=size + 2 * spares,
            policy=Policy(PolicyName.BALANCED, prefill, size + 2 * spares - prefill),
            slo=SLO,
            seed=1000 * seed + number,
        )
        for number in range(count)
    ]
    movers: list[Mover] = []

    def build_manager(cells: Sequence[SimulatedRouter]) -> Callable[[], None]:
        movers.append(Mover(cells, spares=spares))
        return movers[0].look if moves else lambda: None

    results = simulate_cells(
        list(zip(dealt, options, strict=True)), build_manager=build_manager, manage_interval_s=LOOK_INTERVAL_S
    )
    scored = [record.meets(SLO) for result in results for record in result.scored]
    return Outcome(fmean(scored), sum(len(result.flips) for result in results), movers[0].moves)


def run_seeds(scale: float, *, size: int, moves: bool, given: argparse.Namespace) -> str:
    """Run one rate with all seeds; return what the table shows."""
    outcomes = []
    for seed in range(1, given.seeds + 1):
        whole = COMPOSED[WORKLOAD](scale * given.instances / 8, seed)
        requests = [request for request in whole if request.arrival_s < given.seconds]
        outcomes.append(run_cells(requests, instances=given.instances, size=size, moves=moves, seed=seed))
        print(
            f"scale {scale:g}, seed {seed}, {len(requests):,} requests, cells of {size}"
            f"{' with moves' if moves else ''}: {outcomes[-1]}",
            file=sys.stderr,
        )
    shares = [100 * outcome.in_time for outcome in outcomes]
    flips, moved = fmean(one.flips for one in outcomes), fmean(one.moves for one in outcomes)
    text = f"{fmean(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f}), {flips:.0f} flips"
    return f"{text}, {moved:.0f} moves" if moves else text


def main() -> int:
    """Run all sizes at all rates; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 50, 8], help="instances of a cell")
    parser.add_argument("--scales", type=float, nargs="+", default=[2.0])
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    uneven = [size for size in given.sizes if size < 2 or given.instances % size]
    if uneven:
        parser.error(f"--sizes must be at least 2 and divide --instances: {uneven[0]}")
    ensure_compiled()
    ways = [
        (size, moves)
        for size in given.sizes
        for moves in (False, True)
        if size < given.instances or not moves  # a single service has nowhere to move to
    ]
    rows = [
        (f"{scale:g}", *(run_seeds(scale, size=size, moves=moves, given=given) for size, moves in ways))
        for scale in given.scales
    ]
    names = (
        f"{given.instances // size} x {size} INSTANCES{' WITH MOVES' if moves else ''}"
        for size, moves in ways
    )
    print("\n".join(format_columns(("SCALE", *names), *rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
