"""Predictions start cautious, converge to the measurements and ignore unusable samples."""

import math

import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_router.policy import (
    DecodePredictor,
    PredictionErrorMean,
    PrefillPredictor,
    TokensPerByte,
)
from fulcrum_router.policy.predictions.estimate import DEFAULT_DECODE, DEFAULT_PREFILL, TENANTS_MAX
from fulcrum_router.policy.predictions.prefill_samples import PrefillSample

UNUSABLE = [math.nan, math.inf, -1.0, 0.0]


def test_tokens_per_byte_converge_to_the_engines_count() -> None:
    ratio = TokensPerByte()
    for _ in range(200):
        ratio.learn(prompt_bytes=4000, tokens=800)
    assert [ratio.value, ratio.predict_tokens(4000) / 4000] == pytest.approx([0.2, 0.2], rel=0.01)


def test_a_short_prompt_changes_tokens_per_byte_less_than_a_long_one() -> None:
    short, long = TokensPerByte(), TokensPerByte()
    short.learn(prompt_bytes=8, tokens=16)
    long.learn(prompt_bytes=800, tokens=1600)
    assert 0.25 < short.value < long.value


def test_a_tenant_bends_the_tokens_per_byte_of_nobody_else() -> None:
    """One sends rare characters, 100 times as often as two others send text."""
    ratio = TokensPerByte()
    for _ in range(100):
        for tenant, tokens in (("a", 800), ("b", 1000), *(("rare", 4000),) * 100):
            ratio.learn(prompt_bytes=4000, tokens=tokens, tenant=tenant)
    found = [ratio.predict_tokens(4000, tenant=tenant) for tenant in ("a", "b", "rare", "new")]
    assert found == pytest.approx([800, 1000, 4000, 1000], rel=0.02)


def test_of_many_tenants_the_last_ones_are_remembered() -> None:
    ratio = TokensPerByte()
    for number in range(TENANTS_MAX + 1):
        ratio.learn(prompt_bytes=4000, tokens=4000, tenant=str(number))
    assert len(ratio._by_tenant) == TENANTS_MAX
    assert "0" not in ratio._by_tenant


@pytest.mark.parametrize("tokens", UNUSABLE, ids=str)
def test_unusable_samples_do_not_change_tokens_per_byte(tokens: float) -> None:
    ratio = TokensPerByte()
    ratio.learn(prompt_bytes=100, tokens=tokens)
    assert ratio.value == TokensPerByte().value


def test_the_prefill_model_converges_to_measured_times() -> None:
    truth = PrefillModel(c0=0.004, c1=3e-5, c2=4e-9)
    predictor = PrefillPredictor()
    for step in range(400):
        tokens = 50 + (step * 797) % 8000
        predictor.learn(PrefillSample(tokens, tokens**2, truth.ttft_s(tokens)))
    predicted = [predictor.model.ttft_s(n) for n in (100, 1000, 8000)]
    assert predicted == pytest.approx([truth.ttft_s(n) for n in (100, 1000, 8000)], rel=0.05)


def test_samples_of_one_prompt_length_keep_the_prefill_curve_increasing() -> None:
    predictor = PrefillPredictor(PrefillModel(c0=0.01, c1=1e-4, c2=0.0))
    for _ in range(256):
        predictor.learn(PrefillSample(1000, 1000**2, 0.2))
    assert predictor.model.ttft_s(1000) == pytest.approx(0.2, rel=0.1)
    assert predictor.model.ttft_s(100) < predictor.model.ttft_s(1000) < predictor.model.ttft_s(10_000) < 10


def test_an_engine_that_has_changed_is_learned_again_after_thousands_of_samples() -> None:
    """Weights that grow with each sample are scaled down in time."""
    predictor = PrefillPredictor()
    for number in range(4_000):
        tokens, per_token_s = 100 + number * 37 % 2_000, 1e-4 if number < 3_500 else 3e-4
        predictor.learn(PrefillSample(tokens, tokens**2, per_token_s * tokens))
    assert predictor.model.ttft_s(1_000) == pytest.approx(0.3, rel=0.05)


def test_an_engine_that_stalls_for_a_minute_does_not_decide_the_model() -> None:
    predictor = PrefillPredictor()
    for number in range(256):
        stalled = 60.0 if number == 200 else 0.0
        predictor.learn(PrefillSample(1000, 1000**2, 0.1 + stalled))
    assert predictor.model.ttft_s(1000) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0, 100.0])
def test_hardware_of_any_speed_is_learned_within_a_few_samples(factor: float) -> None:
    prior = PrefillModel(c0=0.02, c1=1e-4, c2=1e-9)
    prefill, decode = PrefillPredictor(prior), DecodePredictor(DecodeModel(0.01, 1e-6))
    for _ in range(4):
        prefill.learn(PrefillSample(1000, 1000**2, factor * prior.ttft_s(1000)))
        decode.learn(tokens=10_000, itl_s=factor * 0.02)
    expected = [factor * prior.ttft_s(n) for n in (100, 1000, 8000)]
    assert [prefill.model.ttft_s(n) for n in (100, 1000, 8000)] == pytest.approx(expected, rel=0.05)
    assert decode.model.itl_s(40_000) == pytest.approx(factor * 0.05, rel=0.05)


def test_the_decode_model_converges_to_measured_steps() -> None:
    truth = DecodeModel(intercept=0.015, slope=2e-6)
    predictor = DecodePredictor()
    for step in range(400):
        tokens = (step * 997) % 40_000
        predictor.learn(tokens=tokens, itl_s=truth.itl_s(tokens))
    assert predictor.model.max_tokens(0.05) == pytest.approx(truth.max_tokens(0.05), rel=0.1)


def test_the_decode_model_is_refitted_with_every_sample() -> None:
    predictor = DecodePredictor()
    models = set()
    for second in range(40):
        predictor.learn(tokens=1_000 + 500 * second, itl_s=0.02 + 1e-6 * second)
        models.add(predictor.model)
    assert len(models) == 40


@pytest.mark.parametrize("seconds", UNUSABLE, ids=str)
def test_unusable_samples_do_not_change_a_model(seconds: float) -> None:
    prefill, decode = PrefillPredictor(), DecodePredictor()
    prefill.learn(PrefillSample(100, 100**2, seconds))
    decode.learn(tokens=100, itl_s=seconds)
    assert (prefill.model, decode.model) == (DEFAULT_PREFILL, DEFAULT_DECODE)


def test_the_prediction_error_is_relative_and_signed() -> None:
    error = PredictionErrorMean()
    assert error.value is None
    error.learn(predicted_s=1.5, measured_s=1.0)
    assert error.value == pytest.approx(0.5)
    error.learn(predicted_s=math.nan, measured_s=1.0)
    error.learn(predicted_s=1.0, measured_s=0.0)
    assert error.value == pytest.approx(0.5)


@pytest.mark.parametrize("itl_s", [5e-324, 1e-200, 1e-12, 1e200])
def test_a_duration_that_cannot_be_true_is_ignored(itl_s: float) -> None:
    predictor = DecodePredictor()
    before = predictor.model
    for _ in range(40):
        predictor.learn(tokens=1_000, itl_s=itl_s)
    assert (predictor.model, predictor.samples) == (before, 0)
