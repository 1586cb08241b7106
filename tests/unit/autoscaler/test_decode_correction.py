"""The factor by which arrivals bring more decode work than predicted."""

import math
from dataclasses import replace

import pytest

from fulcrum_autoscaler.policy.decode_correction import FACTOR_MAX, NO_CORRECTION
from fulcrum_autoscaler.policy.forecast import Rates

RATES = Rates(requests=10, prefill=1, output_tokens=1_000, token_steps=1_000_000)
"""Answers of 100 tokens, on a context of 1,000."""
ITL_S = 0.02
STEADY_TOKENS = RATES.token_steps * ITL_S
"""KV tokens in decode in the long run."""


def follow(tokens: list[float], *, rates: Rates = RATES, room_tokens: float = STEADY_TOKENS) -> float:
    """The factor after ticks that are half a second apart, with so many tokens in decode."""
    correction = NO_CORRECTION
    for now in tokens:
        correction = correction.follow(now, rates, itl_s=ITL_S, seconds=0.5, room_tokens=room_tokens)
    return correction.factor


def grow(times: float) -> list[float]:
    """Tokens in decode over 5 s, from none on, of answers that last `times` as long as predicted."""
    answer_s = times * ITL_S * RATES.output_tokens / RATES.requests
    return [times * STEADY_TOKENS * -math.expm1(-n * 0.5 / answer_s) for n in range(11)]


@pytest.mark.parametrize(
    ("times", "low", "high"),
    [
        pytest.param(1.0, 1.0, 1.0 + 1e-9, id="as predicted"),
        pytest.param(0.5, 1.0, 1.0 + 1e-9, id="shorter: it only gives decode more room"),
        pytest.param(3.0, 1.5, 3.0, id="longer: shown within 5 s"),
        pytest.param(100.0, 1.5, FACTOR_MAX, id="much longer"),
    ],
)
def test_tokens_in_decode_show_that_answers_are_longer_than_predicted(
    times: float, low: float, high: float
) -> None:
    assert low <= follow(grow(times)) <= high


def test_tokens_that_are_there_at_the_start_are_expected() -> None:
    assert follow([5 * STEADY_TOKENS] * 2) < 1.5


@pytest.mark.parametrize(
    ("rates", "room_tokens"),
    [
        pytest.param(RATES, 100 * STEADY_TOKENS, id="light load"),
        pytest.param(RATES, math.inf, id="decode has no limit"),
        pytest.param(RATES, 0.0, id="no decode"),
        pytest.param(replace(RATES, requests=0), STEADY_TOKENS, id="no arrivals"),
        pytest.param(replace(RATES, token_steps=math.inf), STEADY_TOKENS, id="no finite forecast"),
    ],
)
def test_nothing_is_corrected_where_tokens_show_nothing(rates: Rates, room_tokens: float) -> None:
    assert follow(grow(3.0), rates=rates, room_tokens=room_tokens) == 1.0


def test_only_decode_work_is_corrected() -> None:
    correction = replace(NO_CORRECTION, factor=2.0)
    assert correction.correct(RATES) == replace(RATES, output_tokens=2_000, token_steps=2_000_000)
