"""Latency models against numbers that were computed by hand."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.errors import InvalidInput
from fulcrum_core.latency import DecodeModel, PrefillModel, StepModel

STEP = StepModel(t0=0.5, b=0.125, c=0.25, d1=0.0625, d2=0.03125, mixed_factor=2.0)


@pytest.mark.parametrize(
    ("chunks", "contexts", "expected_s"),
    [
        pytest.param([], [], 0.5, id="an empty step costs t0"),
        pytest.param([(0, 4)], [], 0.5 + 4 * 0.125 + 16 * 0.25, id="a first chunk attends to itself"),
        pytest.param(
            [(4, 2)], [], 0.5 + 2 * 0.125 + 20 * 0.25, id="a later chunk attends to the computed tokens"
        ),
        pytest.param(
            [], [8, 24], 0.5 + 2 * 0.0625 + 32 * 0.03125, id="decodes cost by request and by context"
        ),
        pytest.param(
            [(0, 4)], [8], 0.5 + 2 * (0.5 + 4.0) + 0.0625 + 0.25, id="prefill alone is slowed in a mixed step"
        ),
    ],
)
def test_step_duration_follows_the_formula(
    chunks: list[tuple[int, int]], contexts: list[int], expected_s: float
) -> None:
    assert STEP.step_s(chunks, contexts) == expected_s


@pytest.mark.parametrize(
    ("model", "slo_tpot_s", "expected_tokens"),
    [
        pytest.param(DecodeModel(0.5, 0.25), 1.0, 2.0, id="slack divided by the slope"),
        pytest.param(DecodeModel(0.5, 0.25), 0.5, 0.0, id="no slack"),
        pytest.param(DecodeModel(0.5, 0.25), 0.1, 0.0, id="an SLO below the duration of an empty step"),
        pytest.param(DecodeModel(0.5, 0.0), 1.0, math.inf, id="no bound if the slope is 0"),
    ],
)
def test_max_tokens_fit_the_tpot_slo(model: DecodeModel, slo_tpot_s: float, expected_tokens: float) -> None:
    assert model.max_tokens(slo_tpot_s) == expected_tokens


def test_prefill_time_is_quadratic_in_the_prompt() -> None:
    assert [PrefillModel(1.0, 0.5, 0.25).ttft_s(n) for n in (0, 2, 4)] == [1.0, 3.0, 7.0]


@given(tokens=st.integers(1, 20_000), budget=st.integers(1, 8192))
def test_derived_prefill_model_lies_within_one_t0_above_the_chunked_steps(tokens: int, budget: int) -> None:
    exact_s = sum(STEP.step_s([(done, min(budget, tokens - done))], []) for done in range(0, tokens, budget))
    error_s = STEP.prefill_model(budget).ttft_s(tokens) - exact_s
    assert -1e-6 * exact_s <= error_s <= STEP.t0 + 1e-6 * exact_s


@given(batch=st.integers(1, 256), tokens_each=st.integers(1, 10_000))
def test_derived_decode_model_is_exact_for_requests_of_the_typical_size(batch: int, tokens_each: int) -> None:
    exact_s = STEP.step_s([], [tokens_each] * batch)
    assert STEP.decode_model(tokens_each).itl_s(batch * tokens_each) == pytest.approx(exact_s)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_negative_or_infinite_coefficient_is_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match=r"^PrefillModel\.c1 \(.*\) must be finite and not negative$"):
        PrefillModel(1.0, value, 1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StepModel(1, 1, 1, 1, 1, 0.9), "StepModel.mixed_factor (0.9) must be at least 1"),
        (lambda: STEP.prefill_model(0), "token_budget (0) must be positive"),
        (lambda: STEP.decode_model(math.nan), "typical_tokens (nan) must be positive"),
    ],
)
def test_invalid_model_parameter_is_refused_in_one_line(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        build()
    assert str(refusal.value) == message
