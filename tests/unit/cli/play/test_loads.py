"""The built-in loads ask for what their descriptions claim, of instances of the `laptop` profile."""

import pytest

from fulcrum_cli.play.loads import CAPACITY_RPS, LOAD_SHAPES, TIERS, TIERS_FLOOD, list_shapes, make_load
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.workload import WorkloadPhase

LAPTOP = load_profile("laptop")


def prefill_instances(phase: WorkloadPhase) -> float:
    """Return the instances busy with the phase's prompts: rate · mean T(n), by the profile's step model."""
    requests = make_load("moving", duration_s=3600.0, seed=1)
    lengths = [
        r.input_tokens for r in requests if (p := requests.phase_at(r.arrival_s)) and p.name == phase.name
    ]
    model = LAPTOP.step_model.prefill_model(LAPTOP.token_budget)
    return phase.rate_rps * sum(map(model.ttft_s, lengths)) / len(lengths)


def test_the_moving_load_needs_more_prefill_than_half_and_then_much_less() -> None:
    heavy, light = (
        prefill_instances(phase) for phase in make_load("moving", duration_s=60.0, seed=1).phases[:2]
    )
    assert 4.2 < heavy < 6.0
    assert light < 2.0


@pytest.mark.parametrize("shape", list(LOAD_SHAPES))
def test_every_load_shape_fits_the_laptop_profile(shape: str) -> None:
    requests = list(make_load(shape, duration_s=300.0, seed=3))
    assert requests
    assert max(r.input_tokens + r.output_tokens for r in requests) <= LAPTOP.kv_capacity_tokens
    assert list(make_load(shape, duration_s=300.0, seed=3)) == requests


def test_a_flood_adds_five_times_the_capacity_and_changes_no_request_of_the_others() -> None:
    calm, flooded = (list(make_load(shape, duration_s=100.0, seed=2)) for shape in (TIERS, TIERS_FLOOD))
    assert [request for request in flooded if request.tenant != "flood"] == calm
    assert len(flooded) - len(calm) == pytest.approx(5 * 100 * CAPACITY_RPS, rel=0.1)
    assert {request.tier for request in flooded if request.tenant == "flood"} == {"free"}
    assert sum(request.tier == "premium" for request in calm) == pytest.approx(10 * CAPACITY_RPS, rel=0.3)
    assert [request.arrival_s for request in flooded] == sorted(request.arrival_s for request in flooded)


def test_a_flood_may_begin_later_than_the_rest() -> None:
    requests = list(make_load(TIERS_FLOOD, duration_s=40.0, seed=2, flood_after_s=20.0))
    assert 20.0 <= min(request.arrival_s for request in requests if request.tenant == "flood") < 21.0
    assert [request for request in requests if request.tenant != "flood"] == list(
        make_load(TIERS, duration_s=40.0, seed=2)
    )


def test_a_service_without_the_tiers_gets_no_load_that_names_them() -> None:
    assert list_shapes(["premium", "standard", "free"]) == list(LOAD_SHAPES)
    assert list_shapes(["premium"]) == ["moving", "steady", "bursty"]
