"""The step model that is estimated from model and hardware is near the shipped profiles."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from fulcrum_core.hardware import UNKNOWN_GPU, resolve_hardware
from fulcrum_core.models import Layout, ModelFacts, estimate_step_model, parse_model_config
from fulcrum_core.profiles import load_profile

MODELS = Path(__file__).parents[3] / "fixtures" / "models"


def facts(model: str) -> ModelFacts:
    return parse_model_config(json.loads((MODELS / model / "config.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("model", "device", "tensor", "profile"),
    [("llama-3.1-8b", "H100-SXM", 1, "l8-h100"), ("llama-3.1-70b", "H100-SXM", 4, "l70-h100-tp4")],
)
def test_the_estimate_is_near_the_profile_of_that_hardware(
    model: str, device: str, tensor: int, profile: str
) -> None:
    estimate = estimate_step_model(facts(model), resolve_hardware(device), Layout(tensor=tensor))
    known = load_profile(profile).step_model
    assert estimate is not None
    assert astuple(replace(estimate, d1=known.d1)) == pytest.approx(astuple(known), rel=1.0)
    assert astuple(known) == pytest.approx(astuple(replace(estimate, d1=known.d1)), rel=1.0)


def test_an_unknown_device_has_no_estimate() -> None:
    assert estimate_step_model(facts("llama-3.1-8b"), UNKNOWN_GPU, Layout()) is None
