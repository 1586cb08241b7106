"""Estimates start cautious, converge to what is measured, and are not thrown by nonsense."""

import math
from typing import Any

import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_router.policy import DecodePredictor, PredictionError, PrefillPredictor, TokenRatio, prompt_size
from fulcrum_router.policy.estimate import DEFAULT_DECODE, DEFAULT_PREFILL

NONSENSE = [math.nan, math.inf, -1.0, 0.0]


@pytest.mark.parametrize(
    ("request_fields", "size"),
    [
        pytest.param({"prompt": "abcd"}, (4, 0), id="a text counts its bytes"),
        pytest.param({"prompt": "äöü"}, (6, 0), id="in UTF-8"),
        pytest.param({"prompt": [1, 2, 3]}, (0, 3), id="ids count themselves"),
        pytest.param({"prompt": ["ab", "c"]}, (3, 0), id="several prompts add up"),
        pytest.param({"prompt": [[1, 2], [3]]}, (0, 3), id="also as ids"),
        pytest.param({"messages": [{"content": "ab"}, {"content": "c"}]}, (3, 0), id="messages add up"),
        pytest.param(
            {"messages": [{"content": [{"type": "text", "text": "ab"}, {"type": "image_url"}]}]},
            (2, 0),
            id="of parts the text counts",
        ),
        pytest.param({"messages": [{"content": None}, "x"]}, (0, 0), id="a message without content is empty"),
        pytest.param({}, (0, 0), id="nothing is nothing"),
        pytest.param({"prompt": 5}, (0, 0), id="a prompt that is none is for the engine to refuse"),
    ],
)
def test_prompt_size(request_fields: dict[str, Any], size: tuple[int, int]) -> None:
    assert prompt_size(request_fields) == size


def test_the_ratio_converges_to_what_engines_count() -> None:
    ratio = TokenRatio()
    for _ in range(200):
        ratio.learn(size=4000, tokens=800)
    assert [ratio.value, ratio.tokens(4000) / 4000] == pytest.approx([0.2, 0.2], rel=0.01)


def test_a_short_prompt_moves_the_ratio_less_than_a_long_one() -> None:
    short, long = TokenRatio(), TokenRatio()
    short.learn(size=8, tokens=16)
    long.learn(size=800, tokens=1600)
    assert 0.25 < short.value < long.value


@pytest.mark.parametrize("tokens", NONSENSE, ids=str)
def test_nonsense_does_not_move_the_ratio(tokens: float) -> None:
    ratio = TokenRatio()
    ratio.learn(size=100, tokens=tokens)
    assert ratio.value == TokenRatio().value


def test_prefill_times_converge_to_what_is_measured() -> None:
    truth = PrefillModel(c0=0.004, c1=3e-5, c2=4e-9)
    predictor = PrefillPredictor()
    for step in range(400):
        tokens = 50 + (step * 797) % 8000
        predictor.learn(tokens=tokens, seconds=truth.ttft_s(tokens))
    predicted = [predictor.model.ttft_s(n) for n in (100, 1000, 8000)]
    assert predicted == pytest.approx([truth.ttft_s(n) for n in (100, 1000, 8000)], rel=0.05)


def test_a_single_prompt_length_corrects_the_level_and_keeps_a_sane_curve() -> None:
    predictor = PrefillPredictor(PrefillModel(c0=0.01, c1=1e-4, c2=0.0))
    for _ in range(256):
        predictor.learn(tokens=1000, seconds=0.2)
    assert predictor.model.ttft_s(1000) == pytest.approx(0.2, rel=0.1)
    assert predictor.model.ttft_s(100) < predictor.model.ttft_s(1000) < predictor.model.ttft_s(10_000) < 10


def test_decode_steps_converge_to_what_is_measured() -> None:
    truth = DecodeModel(intercept=0.015, slope=2e-6)
    predictor = DecodePredictor()
    for step in range(400):
        tokens = (step * 997) % 40_000
        predictor.learn(tokens=tokens, itl_s=truth.itl_s(tokens))
    assert predictor.model.max_tokens(0.05) == pytest.approx(truth.max_tokens(0.05), rel=0.1)


def test_each_second_of_decoding_is_learned_from_at_once() -> None:
    predictor = DecodePredictor()
    models = set()
    for second in range(40):
        predictor.learn(tokens=1_000 + 500 * second, itl_s=0.02 + 1e-6 * second)
        models.add(predictor.model)
    assert len(models) == 40


@pytest.mark.parametrize("seconds", NONSENSE, ids=str)
def test_nonsense_does_not_move_a_model(seconds: float) -> None:
    prefill, decode = PrefillPredictor(), DecodePredictor()
    prefill.learn(tokens=100, seconds=seconds)
    decode.learn(tokens=100, itl_s=seconds)
    assert (prefill.model, decode.model) == (DEFAULT_PREFILL, DEFAULT_DECODE)


def test_the_prediction_error_is_relative_and_signed() -> None:
    error = PredictionError()
    assert error.value is None
    error.learn(predicted_s=1.5, measured_s=1.0)
    assert error.value == pytest.approx(0.5)
    error.learn(predicted_s=math.nan, measured_s=1.0)
    error.learn(predicted_s=1.0, measured_s=0.0)
    assert error.value == pytest.approx(0.5)
