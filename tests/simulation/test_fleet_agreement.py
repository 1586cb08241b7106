"""The fleet simulator and the control loop on virtual time give the same latencies for the same load.

Both run the same dispatch; roles stay as they are. The control loop has an operator, a store and watches; the
fleet simulator has an event queue and skips steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import ControlOptions, RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate as simulate_fleet
from fulcrum_simulator.workload import WorkloadRequest
from tests.simulation.control_loop import simulate
from tests.simulation.scenarios import moving_scenario, service_spec, steady_scenario

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
NO_HOPS = ControlOptions(hop_s=0.0, model_error=0.0, step_noise=0.05)


def mean_of_known(values: Iterable[float | None]) -> float:
    return fmean(value for value in values if value is not None)


def run_control_loop(load: Sequence[WorkloadRequest]) -> tuple[float, float, float]:
    """Return mean TTFT, mean TPOT and SLO attainment."""
    end_s = load[-1].arrival_s + 1.0
    scenario = replace(steady_scenario(1), load=tuple(load), end_s=end_s, spec=service_spec("Off"))
    records = [r for r in simulate(scenario).requests if r.outcome == "ok"]
    times = [(r.first_token_s or 0.0, r.last_token_s or 0.0, r.request.output_tokens - 1) for r in records]
    ttft_s = [first_s - r.arrival_s for r, (first_s, _, _) in zip(records, times, strict=True)]
    tpot_s = [(last_s - first_s) / gaps if gaps else None for first_s, last_s, gaps in times]
    met = sum(SLO.is_met(ttft_s=a, tpot_s=b) for a, b in zip(ttft_s, tpot_s, strict=True))
    return fmean(ttft_s), mean_of_known(tpot_s), met / len(load)


def run_fleet(load: Sequence[WorkloadRequest]) -> tuple[float, float, float]:
    """Return the same figures of the fleet, with the split that the operator starts with."""
    options = RunOptions(
        profile=load_profile("laptop"),
        instances=8,
        policy=parse_policy("static:4P4D", instances=8),
        slo=SLO,
        control=NO_HOPS,
    )
    records = simulate_fleet(load, options).records
    met = sum(record.meets(SLO) for record in records)
    return mean_of_known(r.ttft_s for r in records), mean_of_known(r.tpot_s for r in records), met / len(load)


@pytest.mark.parametrize(
    "load", [tuple(steady_scenario(1).load)[:150], tuple(moving_scenario(2, "Off").load)[:300]]
)
def test_latencies_agree_within_5_per_cent_and_attainment_within_5_points(
    load: Sequence[WorkloadRequest],
) -> None:
    *times, attainment = run_fleet(load)
    *expected_times, expected_attainment = run_control_loop(load)
    assert times == pytest.approx(expected_times, rel=0.05)
    assert attainment == pytest.approx(expected_attainment, abs=0.05)
