"""Composed workloads: another rate keeps the phases, and the work hardly moves while the best split does."""

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.bounds import UniformFleet, compute_mean_work
from fulcrum_simulator.workload import COMPOSED, WorkloadRequest

FLEET = UniformFleet(8, load_profile("l70-h100-tp4"), Slo(3.0, 0.1))


def between(requests: list[WorkloadRequest], start_s: float, end_s: float) -> list[WorkloadRequest]:
    return [request for request in requests if start_s <= request.arrival_s < end_s]


@pytest.mark.parametrize("name", COMPOSED)
def test_a_factor_multiplies_the_rate_and_keeps_the_duration(name: str) -> None:
    once, twice = (COMPOSED[name](factor, 1) for factor in (0.2, 0.4))
    assert len(twice) == pytest.approx(2 * len(once), rel=0.1)
    assert twice[-1].arrival_s == pytest.approx(once[-1].arrival_s, rel=0.01)
    assert COMPOSED[name](0.2, 1) == once
    assert COMPOSED[name](0.2, 2) != once


def test_phases_need_the_same_instances_in_another_split() -> None:
    requests = COMPOSED["phases-200s"](1.0, 1)
    prompts, answers = (compute_mean_work(between(requests, *span), FLEET) for span in ((0, 200), (200, 400)))
    busy = [
        work.total_s * len(between(requests, *span)) / 200
        for work, span in ((prompts, (0, 200)), (answers, (200, 400)))
    ]
    assert busy == pytest.approx([4.0, 4.0], rel=0.1)
    assert (prompts.prefill_share > 0.75, answers.prefill_share < 0.25) == (True, True)
