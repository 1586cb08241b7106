"""Coefficients are recovered from curves that they made, with and without noise."""

import random
from dataclasses import replace

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.latency import StepModel
from fulcrum_simulator.profiling import FittedProfile, fit_link, fit_profile, plan_measurement
from fulcrum_simulator.profiling.least_squares import fit_not_negative
from fulcrum_simulator.profiling.points import spread
from fulcrum_simulator.profiling.samples import (
    DecodeMeasurement,
    FetchMeasurement,
    MixedMeasurement,
    PrefillMeasurement,
    TransferMeasurement,
)

TRUTH = StepModel(t0=0.018, b=2.8e-4, c=1e-8, d1=8e-4, d2=4e-6, mixed_factor=1.2)
BUDGET = 512
OVERHEAD_S = 0.003


def fit_curves(rng: random.Random, *, noise: float) -> FittedProfile:
    """Fit curves of the true model whose points are off by up to `noise`."""

    def off(seconds: float) -> float:
        return seconds * rng.uniform(1 - noise, 1 + noise)

    def prompt_s(tokens: int) -> float:
        return TRUTH.b * tokens + TRUTH.c * tokens**2

    plan = plan_measurement(
        max_model_tokens=32768, kv_tokens=65536, block_size=16, token_budget=BUDGET, max_batch=16
    )
    return fit_profile(
        prefill=[
            PrefillMeasurement(n, off(OVERHEAD_S + -(-n // BUDGET) * TRUTH.t0 + prompt_s(n)))
            for n in plan.prefill
        ],
        decode=[DecodeMeasurement(b, b * n, off(TRUTH.step_s((), [n] * b))) for b, n in plan.decode],
        mixed=[
            MixedMeasurement(n, off(TRUTH.step_s([(0, n)], [64] * 8)), batch=8, context_tokens=512)
            for n in plan.mixed
        ],
        token_budget=BUDGET,
    )


def test_exact_curves_give_the_coefficients_back() -> None:
    fitted = fit_curves(random.Random(1), noise=0.0)
    found = fitted.steps
    assert [found.t0, found.b, found.c, found.d1, found.d2, found.mixed_factor] == pytest.approx(
        [TRUTH.t0, TRUTH.b, TRUTH.c, TRUTH.d1, TRUTH.d2, TRUTH.mixed_factor], rel=1e-6
    )
    assert fitted.overhead_s == pytest.approx(OVERHEAD_S)
    assert [len(curve.points) for curve in fitted.curves] == [8, 25, 5]
    names = [[point.name for point in curve.points[:2]] for curve in fitted.curves[:2]]
    assert names == [
        ["64 tokens", "156 tokens"],
        ["1 request, 64 tokens of KV", "1 request, 144 tokens of KV"],
    ]
    assert max(curve.mape for curve in fitted.curves) < 1e-6


def test_noise_shows_as_error_of_its_size_and_moves_the_fit_by_less(seed: int) -> None:
    fitted = fit_curves(random.Random(seed), noise=0.03)
    assert [fitted.steps.t0, fitted.steps.b] == pytest.approx([TRUTH.t0, TRUTH.b], rel=0.1)
    assert all(0.001 < curve.mape < 0.03 for curve in fitted.curves), fitted.curves


def test_without_prompts_beside_decodes_the_published_factor_stands() -> None:
    decode = [DecodeMeasurement(b, b * n, TRUTH.step_s((), [n] * b)) for b in (1, 4) for n in (64, 512)]
    fitted = fit_profile(
        prefill=[PrefillMeasurement(n, 0.02 + 1e-4 * n) for n in (64, 128, 256)],
        decode=decode,
        mixed=[],
        token_budget=BUDGET,
    )
    assert (fitted.steps.mixed_factor, fitted.curves[2].points) == (1.1, ())


def test_coefficients_are_never_negative(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        rows = [(1.0, rng.uniform(0, 5), rng.uniform(0, 5)) for _ in range(6)]
        targets = [rng.uniform(-0.5, 2) for _ in rows]
        assert min(fit_not_negative(rows, targets, [1.0] * len(rows))) >= 0


def test_points_that_noise_puts_below_their_steps_do_not_rule_the_fit() -> None:
    decode = [DecodeMeasurement(b, b * n, TRUTH.step_s((), [n] * b)) for b in (1, 4) for n in (64, 512)]
    lengths = (4, 128, 256, 512, 1024, 2048, 4096, 8192)
    prefill = [
        PrefillMeasurement(n, -(-n // BUDGET) * TRUTH.t0 + TRUTH.b * n + TRUTH.c * n**2) for n in lengths
    ]
    prefill[0] = PrefillMeasurement(4, TRUTH.t0 * 0.9)  # faster than its one step
    steps = replace(TRUTH, mixed_factor=1.3)
    below = MixedMeasurement(4, 0.95 * steps.step_s([], [64]), batch=1, context_tokens=64)
    mixed = [below, MixedMeasurement(512, steps.step_s([(0, 512)], [64]), batch=1, context_tokens=64)]
    fitted = fit_profile(prefill=prefill, decode=decode, mixed=mixed, token_budget=BUDGET)
    assert [fitted.steps.b, fitted.steps.mixed_factor] == pytest.approx([TRUTH.b, 1.3], rel=0.1)
    assert [(len(curve.points), curve.mape < 0.1) for curve in fitted.curves] == [
        (8, True),
        (4, True),
        (2, True),
    ]


def test_columns_that_cannot_be_told_apart_are_fitted_by_one() -> None:
    found = fit_not_negative([(1.0, 2.0), (2.0, 4.0)], [3.0, 6.0], [3.0, 6.0])
    assert found in ((3.0, 0.0), (0.0, 1.5))


def test_the_link_is_fitted_without_the_step_and_the_time_outside_it() -> None:
    fitted = FittedProfile(TRUTH, OVERHEAD_S, ())

    def transfer(tokens: int, handshake_s: float = 0.0) -> TransferMeasurement:
        step_s = TRUTH.step_s((), [tokens])
        return TransferMeasurement(tokens, handshake_s + 0.002 + 1e-5 * tokens + step_s + OVERHEAD_S)

    def fetch(tokens: int) -> FetchMeasurement:
        noise_s = {64: -0.02, 512: 0.01, 4096: 0.01}[tokens]
        return FetchMeasurement(tokens, 0.05 + noise_s + TRUTH.d1 + TRUTH.d2 * tokens)

    lengths = (64, 512, 4096)
    link = fit_link(
        transfer(64, 0.1),
        [transfer(tokens) for tokens in lengths],
        [fetch(tokens) for tokens in lengths],
        fitted,
    )
    assert [link.setup_s, link.s_per_token, link.handshake_s, link.fetch_start_s] == pytest.approx(
        [0.002, 1e-5, 0.1, 0.05], abs=1e-9
    )
    assert link.fetch_starts_s == pytest.approx((0.03, 0.06, 0.06))
    assert (len(link.curve.points), link.curve.mape < 1e-6) == (3, True)


def test_without_fetches_beside_decodes_none_are_assumed() -> None:
    first = TransferMeasurement(64, 0.1)
    link = fit_link(first, [first], [], FittedProfile(TRUTH, OVERHEAD_S, ()))
    assert (link.fetch_start_s, link.fetch_starts_s) == (0.0, ())


def test_points_spread_evenly_over_what_the_engine_holds() -> None:
    plan = plan_measurement(
        max_model_tokens=8192, kv_tokens=100_000, block_size=16, token_budget=2048, max_batch=64
    )
    assert (len(plan.prefill), len(plan.decode), len(plan.mixed), len(plan.transfer)) == (8, 25, 5, 5)
    assert max(batch * context for batch, context in plan.decode) <= 50_000
    assert (plan.prefill[0], plan.prefill[-1], spread(1, 16, 5)) == (64, 8191, (1, 2, 4, 8, 16))


def test_an_engine_too_small_for_the_batch_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lower --max-batch"):
        plan_measurement(max_model_tokens=8192, kv_tokens=1024, block_size=16, token_budget=512, max_batch=64)
