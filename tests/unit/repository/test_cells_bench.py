"""The bench of cells: instances that move between services serve in one at a time, and lose no request."""

from collections.abc import Callable, Sequence

from bench.cells import LOOK_INTERVAL_S, Mover
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import Policy, PolicyName, RunOptions
from fulcrum_simulator.fleet.routed_instance import RoutedInstance
from fulcrum_simulator.fleet.router import SimulatedRouter
from fulcrum_simulator.fleet.run import simulate_cells
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest

INSTANCES, SPARES = 6, 3
COUNTS = 20
"""Instances that work are counted so many times between two looks of the mover."""


def draw_even(rate_rps: float, seconds: float = 12.0) -> list[WorkloadRequest]:
    """Equal requests at equal times."""
    return [WorkloadRequest((n + 0.1) / rate_rps, 3_000, 300) for n in range(int(seconds * rate_rps))]


def works(one: RoutedInstance) -> bool:
    """Whether an instance serves or drains."""
    return one.record.serving or one.record.ledger.legs > 0


def test_instances_move_to_the_cell_with_more_work_and_no_request_is_lost() -> None:
    engines = INSTANCES + 2 * SPARES
    options = RunOptions(
        profile=load_profile("laptop"),
        instances=engines,
        policy=Policy(PolicyName.BALANCED, prefill=engines // 2, decode=engines // 2),
        slo=Slo(1.0, 0.05),
        seed=5,
    )
    working: list[tuple[int, ...]] = []
    movers: list[Mover] = []

    def build_manager(cells: Sequence[SimulatedRouter]) -> Callable[[], None]:
        mover = Mover(cells, spares=SPARES)
        movers.append(mover)

        def look() -> None:
            if len(working) % COUNTS == COUNTS // 2:  # halfway between those of the autoscalers
                mover.look()
            working.append(tuple(sum(map(works, cell.fleet.instances)) for cell in cells))

        return look

    cells = (draw_even(6.0), options), (draw_even(24.0), options)
    results = simulate_cells(cells, build_manager=build_manager, manage_interval_s=LOOK_INTERVAL_S / COUNTS)
    assert working[0] == (INSTANCES, INSTANCES)
    assert max(second for _, second in working) > INSTANCES
    assert min(first for first, _ in working) < INSTANCES
    assert all(first + second <= 2 * INSTANCES for first, second in working)
    assert movers[0].moves > 1
    assert all(record.outcome is Outcome.OK for result in results for record in result.records)
