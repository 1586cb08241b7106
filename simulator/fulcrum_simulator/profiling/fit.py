"""Fits the coefficients of an engine profile to measured curves, and says how far each curve is from the fit.

    step = t0 + f·(b·Σchunk + c·Σ[(done + chunk)² - done²]) + d1·B + d2·Σctx      (`core.latency.StepModel`)
           + fetch_start·fetches

Decode steps give t0, d1 and d2. With t0 known, prefill gives b and c, and the time that a request spends
outside steps (HTTP, tokenising, queueing), which is no part of a profile. Prompts among decodes give f,
KV fetches among decodes the time that each adds to the step in which it starts.
`fulcrum profile` calls it with what `measure` has measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from fulcrum_core.latency import StepModel
from fulcrum_simulator.profiling.least_squares import fit_not_negative
from fulcrum_simulator.profiling.samples import (
    DecodeMeasurement,
    FetchMeasurement,
    MixedMeasurement,
    PrefillMeasurement,
    TransferMeasurement,
)

S = TypeVar("S", PrefillMeasurement, DecodeMeasurement, MixedMeasurement, TransferMeasurement)

ASSUMED_FACTOR = 1.1
"""Factor of an engine that took up no prompt in a step with decodes (Splitwise's measured tables)."""
LEAST_COEFFICIENT = 1e-12
"""Stands for a coefficient too small to be measured, since a profile needs a positive one."""


@dataclass(frozen=True, slots=True)
class FittedPoint:
    """One point of a curve, in seconds as measured and as fitted."""

    name: str
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """By how much the fit is above the measured value (0.1 is 10 %)."""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class CurveFit:
    """How far each point of a curve is from the fit."""

    name: str
    points: tuple[FittedPoint, ...]

    @property
    def mape(self) -> float:
        """Mean absolute percentage error (0.1 is 10 %); 0 without points."""
        return fmean(abs(point.error) for point in self.points) if self.points else 0.0


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """Coefficients of the steps; `overhead_s` is the time that a request spends outside of them."""

    steps: StepModel
    overhead_s: float
    curves: tuple[CurveFit, ...]


@dataclass(frozen=True, slots=True)
class FittedLink:
    """A KV transfer takes setup_s + s_per_token·n, and the first one between two engines handshake_s more.

    `fetch_starts_s` has for each measured length what a fetch adds to the step of the decode engine in which
    it starts, if anything runs there. Single ones differ too much to be a curve: their mean counts.
    """

    setup_s: float
    s_per_token: float
    handshake_s: float
    fetch_starts_s: tuple[float, ...]
    curve: CurveFit

    @property
    def fetch_start_s(self) -> float:
        """The mean of `fetch_starts_s`; 0 without any."""
        return max(0.0, fmean(self.fetch_starts_s)) if self.fetch_starts_s else 0.0


def fit_profile(
    *,
    prefill: Sequence[PrefillMeasurement],
    decode: Sequence[DecodeMeasurement],
    mixed: Sequence[MixedMeasurement],
    token_budget: int,
) -> FittedProfile:
    """Fit the coefficients of a step; `token_budget` is the engine's largest step, in tokens."""
    decode_s = [sample.seconds for sample in decode]
    t0, d1, d2 = fit_not_negative(
        [(1.0, sample.batch, sample.context_tokens) for sample in decode], decode_s, decode_s
    )
    overhead_s, b, c = fit_not_negative(
        [(1.0, sample.tokens, sample.tokens**2) for sample in prefill],
        [sample.seconds - _steps(sample.tokens, token_budget) * t0 for sample in prefill],
        [sample.seconds for sample in prefill],
    )
    b = max(b, LEAST_COEFFICIENT)
    steps = StepModel(max(t0, LEAST_COEFFICIENT), b, c, d1, max(d2, LEAST_COEFFICIENT), ASSUMED_FACTOR)
    steps = replace(steps, mixed_factor=_fit_factor(steps, mixed))
    return FittedProfile(
        steps, overhead_s, _compare_curves(steps, overhead_s, prefill, decode, mixed, token_budget)
    )


def fit_link(
    first: TransferMeasurement,
    later: Sequence[TransferMeasurement],
    fetches: Sequence[FetchMeasurement],
    fitted: FittedProfile,
) -> FittedLink:
    """Fit the KV transfer between two engines; `first` was measured before any other contact of the two.

    From each transfer, the decode step that follows it and the time outside of steps are subtracted first.
    From each of `fetches`, what the fetched request adds to its own first step is.
    """

    def after_s(sample: TransferMeasurement) -> float:
        return fitted.steps.step_s((), (sample.tokens,)) + fitted.overhead_s

    setup_s, s_per_token = fit_not_negative(
        [(1.0, sample.tokens) for sample in later],
        [sample.seconds - after_s(sample) for sample in later],
        [sample.seconds for sample in later],
    )
    s_per_token = max(s_per_token, LEAST_COEFFICIENT)

    def predict_s(sample: TransferMeasurement) -> float:
        return setup_s + s_per_token * sample.tokens + after_s(sample)

    steps = fitted.steps
    return FittedLink(
        setup_s,
        s_per_token,
        max(0.0, first.seconds - predict_s(first)),
        tuple(sample.seconds - steps.d1 - steps.d2 * sample.tokens for sample in fetches),
        _compare("transfer", later, predict_s),
    )


def _steps(tokens: int, token_budget: int) -> int:
    return -(-tokens // token_budget)


def _fit_factor(steps: StepModel, mixed: Sequence[MixedMeasurement]) -> float:
    """Return f ≥ 1 that minimises Σ(1 - (decodes + f·prompt)/step)²; `steps` has all other coefficients."""
    if not mixed:
        return ASSUMED_FACTOR
    prompts = [_prompt_s(steps, sample.tokens) / sample.seconds for sample in mixed]
    rests = [1 - _decodes_s(steps, sample) / sample.seconds for sample in mixed]
    products = sum(prompt * rest for prompt, rest in zip(prompts, rests, strict=True))
    return max(1.0, products / sum(prompt**2 for prompt in prompts))


def _prompt_s(steps: StepModel, tokens: int) -> float:
    """Return what a prompt adds to steps in which no request decodes."""
    return steps.b * tokens + steps.c * tokens**2


def _decodes_s(steps: StepModel, sample: DecodeMeasurement | MixedMeasurement) -> float:
    """Return the duration of a step that decodes these requests."""
    return steps.t0 + steps.d1 * sample.batch + steps.d2 * sample.context_tokens


def _compare_curves(
    steps: StepModel,
    overhead_s: float,
    prefill: Sequence[PrefillMeasurement],
    decode: Sequence[DecodeMeasurement],
    mixed: Sequence[MixedMeasurement],
    token_budget: int,
) -> tuple[CurveFit, ...]:
    def prefill_s(sample: PrefillMeasurement) -> float:
        return overhead_s + _steps(sample.tokens, token_budget) * steps.t0 + _prompt_s(steps, sample.tokens)

    def mixed_s(sample: MixedMeasurement) -> float:
        return _decodes_s(steps, sample) + steps.mixed_factor * _prompt_s(steps, sample.tokens)

    return (
        _compare("prefill", prefill, prefill_s),
        _compare("decode", decode, lambda sample: _decodes_s(steps, sample)),
        _compare("mixed", mixed, mixed_s),
    )


def _compare(curve: str, samples: Sequence[S], fitted_s: Callable[[S], float]) -> CurveFit:
    points = (FittedPoint(sample.name, sample.seconds, fitted_s(sample)) for sample in samples)
    return CurveFit(curve, tuple(points))
