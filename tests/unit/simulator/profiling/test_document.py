"""A fitted profile becomes a file that the loader accepts, and that names what was not measured."""

from dataclasses import replace

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import HardwareFacts, find_hardware
from fulcrum_core.latency import StepModel
from fulcrum_core.models import kv_bytes_per_token
from fulcrum_core.profiles import parse_profile
from fulcrum_simulator.profiling import (
    CurveFit,
    EngineLimits,
    FittedLink,
    FittedPoint,
    FittedProfile,
    ProfiledEngine,
    render_profile,
)
from tests.unit.operator.engine_cases import fixture_facts

STEPS = StepModel(t0=0.0169, b=7.64e-5, c=6.6e-10, d1=2e-5, d2=4.8e-8, mixed_factor=1.1)
FITTED = FittedProfile(STEPS, 0.004, (CurveFit("prefill", (FittedPoint("64 tokens", 1.0, 1.0123),) * 8),))
LINK = FittedLink(
    0.001,
    327680 / 4e10,
    0.1,
    (0.04, 0.06),
    CurveFit("transfer", (FittedPoint("64 tokens", 1.0, 0.98),) * 5),
)


def engine(device: HardwareFacts | None, *, tensor_parallel: int = 4) -> ProfiledEngine:
    return ProfiledEngine(
        name="mine",
        limits=EngineLimits("llama", 131072, 430_000, 16),
        model=fixture_facts("llama-3.1-70b"),
        device=device,
        tensor_parallel=tensor_parallel,
        token_budget=8192,
        max_seqs=256,
    )


def test_the_file_holds_what_was_measured() -> None:
    profile = parse_profile(render_profile(engine(find_hardware("H100-SXM")), FITTED, LINK), source="mine")
    assert (profile.step_model, profile.link_bytes_per_s) == (STEPS, 4e10)
    assert (profile.link_setup_s, profile.handshake_s, profile.kv_capacity_tokens) == (0.001, 0.1, 430_000)
    assert profile.fetch_start_s == 0.05
    assert profile.description == (
        "llama, measured: mean error of prefill 1.2% over 8 points, "
        "mean error of transfer 2.0% over 5 points."
    )


def test_without_a_device_the_peaks_are_the_lowest_that_permit_the_fit() -> None:
    text = render_profile(engine(None), FITTED, LINK)
    profile = parse_profile(text, source="mine")
    model = fixture_facts("llama-3.1-70b")
    assert "# No device was given" in text
    assert profile.peak_flops == pytest.approx(2 * model.active_params / (4 * STEPS.b), rel=0.01)
    assert profile.hbm_bytes_per_s >= kv_bytes_per_token(model) / (4 * STEPS.d2)


def test_a_link_that_was_not_measured_is_named_in_the_file() -> None:
    text = render_profile(engine(None), FITTED, None)
    assert "# Assumed, not measured: link, handshake and fetch values (one engine was given)." in text
    assert parse_profile(text, source="mine").link_bytes_per_s == 1e10


def test_fetches_that_were_not_measured_are_named_in_the_file() -> None:
    text = render_profile(engine(None), FITTED, replace(LINK, fetch_starts_s=()))
    assert "# Assumed, not measured: fetch_start_s" in text
    assert parse_profile(text, source="mine").fetch_start_s == 0.0


def test_a_factor_that_was_not_measured_is_named_in_the_file() -> None:
    unmixed = replace(FITTED, curves=(*FITTED.curves, CurveFit("mixed", ())))
    text = render_profile(engine(None), unmixed, LINK)
    assert "# Assumed, not measured: mixed_factor" in text
    assert "error of mixed" not in text


def test_a_fit_faster_than_the_device_is_refused() -> None:
    text = render_profile(engine(find_hardware("H100-SXM"), tensor_parallel=1), FITTED, LINK)
    with pytest.raises(InvalidInput, match=r"mine\.b \(7\.64e-05\) is below its physical limit"):
        parse_profile(text, source="mine")
