"""The built-in loads ask for what their descriptions claim, of instances of the `laptop` profile."""

import pytest

from fulcrum_cli.play.loads import LOAD_SHAPES, make_load
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
