"""What was learned of a pool survives instances and routers, and nobody can break a router with it."""

from dataclasses import dataclass

import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_router.policy.predictions.learned_models import (
    MAX_POOLS,
    MIN_SAMPLES,
    PoolModels,
    collect_models,
    compute_suitability,
    have_changed,
    parse_models,
    render_models,
)

PREFILL, DECODE = PrefillModel(0.01, 1e-4, 1e-9), DecodeModel(0.02, 1e-7)


@dataclass
class Measured:
    """An instance by `MeasuredInstance`."""

    pool: str
    prefill_model: PrefillModel = PREFILL
    decode_model: DecodeModel = DECODE
    samples: tuple[int, int] = (MIN_SAMPLES, 0)


@pytest.mark.parametrize(
    ("models", "suits_prefill"),
    [
        pytest.param(PoolModels(PREFILL, DECODE), 0.021 / 0.111, id="a step of 21 ms, a prompt of 111 ms"),
        pytest.param(PoolModels(PREFILL, None), None, id="no step was measured"),
        pytest.param(PoolModels(None, DECODE), None, id="no prompt was measured"),
        pytest.param(PoolModels(PrefillModel(0.0, 0.0, 0.0), DECODE), None, id="prompts that take no time"),
    ],
)
def test_a_pool_suits_prefill_by_the_time_of_a_step_over_that_of_a_prompt(
    models: PoolModels, suits_prefill: float | None
) -> None:
    found = compute_suitability(models)
    assert found == (None if suits_prefill is None else pytest.approx(suits_prefill))


def test_the_models_of_a_pool_are_the_mean_of_its_measured_instances() -> None:
    instances = [
        Measured("a"),
        Measured("a", PrefillModel(0.03, 3e-4, 3e-9)),
        Measured("a", PrefillModel(9.0, 9.0, 9.0), samples=(MIN_SAMPLES - 1, MIN_SAMPLES)),
        Measured("b", samples=(0, 0)),
        Measured(""),
    ]
    known = {"b": PoolModels(PREFILL, None), "c": PoolModels(None, DECODE)}
    found = collect_models(instances, known)
    prefill, decode = found.pop("a")
    assert prefill is not None
    assert (prefill.c0, prefill.c1, prefill.c2) == pytest.approx((0.02, 2e-4, 2e-9))
    assert (decode, found) == (DECODE, known)


@pytest.mark.parametrize(
    ("now", "changed"),
    [
        pytest.param({}, False, id="a pool that is gone"),
        pytest.param({"a": PoolModels(PrefillModel(0.01, 1.05e-4, 1e-9), DECODE)}, False, id="5 % more"),
        pytest.param({"a": PoolModels(PrefillModel(0.01, 1.3e-4, 1e-9), DECODE)}, True, id="30 % more"),
        pytest.param({"a": PoolModels(PREFILL, DecodeModel(0.01, 1e-7))}, True, id="half the step"),
        pytest.param({"b": PoolModels(PREFILL, None)}, True, id="a new pool"),
        pytest.param({"b": PoolModels()}, False, id="a new pool without measurements"),
    ],
)
def test_models_have_changed_if_a_prediction_differs_by_more_than_a_tenth(
    now: dict[str, PoolModels], changed: bool
) -> None:
    assert have_changed({"a": PoolModels(PREFILL, DECODE)}, now) is changed


def test_the_text_form_keeps_the_models() -> None:
    models = {"a": PoolModels(PREFILL, DECODE), "b": PoolModels(None, DECODE)}
    assert parse_models(render_models(models)) == models


def test_the_text_form_is_bounded() -> None:
    text = render_models({f"pool-{i:03}": PoolModels(PREFILL, DECODE) for i in range(500)})
    assert (len(parse_models(text)), len(text) < 8192) == (MAX_POOLS, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "[1]",
        "[" * 100_000,
        '{"a": 1}',
        '{"a": {"prefill": [1, 2], "decode": "x"}}',
        '{"a": {"prefill": [-1, 0, 0], "decode": [0, 0]}}',
        '{"a": {"prefill": [0, 0, 0], "decode": [NaN, 1]}}',
        '{"a": {"prefill": [true, 1, 1], "decode": [1e999, 1]}}',
        '{"a": {"prefill": [1' + "0" * 400 + ", 1, 1]}}",
    ],
    ids=lambda text: text[:40],
)
def test_text_that_is_no_model_is_left_out(text: str) -> None:
    assert [models for models in parse_models(text).values() if models != PoolModels()] == []
