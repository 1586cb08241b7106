"""Several services in one simulation: apart from what is managed, each runs as it would alone."""

from dataclasses import replace

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import RunResult, simulate, simulate_cells
from fulcrum_simulator.workload import WorkloadRequest

PROFILE, SLO = load_profile("laptop"), Slo(1.0, 0.05)


def draw_even(rate_rps: float, seconds: float = 20.0) -> list[WorkloadRequest]:
    """Equal requests at equal times."""
    return [WorkloadRequest((n + 0.1) / rate_rps, 900, 30) for n in range(int(seconds * rate_rps))]


def list_times(result: RunResult) -> list[tuple[str, str, float | None, float | None]]:
    return [(one.prefill, one.decode, one.first_token_s, one.last_token_s) for one in result.records]


def test_services_that_exchange_nothing_run_as_they_would_alone() -> None:
    options = RunOptions(
        profile=PROFILE, instances=4, policy=parse_policy("balanced", instances=4), slo=SLO, seed=5
    )
    cells = (draw_even(7.0), options), (draw_even(19.0), replace(options, seed=6))
    together = simulate_cells(cells, build_manager=lambda _routers: lambda: None, manage_interval_s=0.7)
    alone = [simulate(load, cell_options) for load, cell_options in cells]
    assert [list_times(result) for result in together] == [list_times(result) for result in alone]
    assert [result.flips for result in together] == [result.flips for result in alone]
