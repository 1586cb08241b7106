"""Latency models of an engine: the duration of a step, and the two predictors that dispatch uses.

`StepModel` is what the simulated engine runs on: the duration of one step from what the step holds.
`PrefillModel` and `DecodeModel` are what a dispatcher predicts with (Arrow's predictors, quadratic and
linear); they are fitted, or derived here from a step model so that prediction and simulated truth share
their coefficients.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from fulcrum_core.errors import InvalidInput


def _require_finite_and_not_negative(model: object) -> None:
    for field in fields(model):  # type: ignore[arg-type]  # every caller is a dataclass
        value = getattr(model, field.name)
        if not math.isfinite(value) or value < 0:
            raise InvalidInput(
                f"{type(model).__name__}.{field.name}", value, "must be finite and not negative"
            )


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Time to first token of a prompt that is alone on an instance: T(n) = c0 + c1·n + c2·n², in seconds."""

    c0: float
    c1: float
    c2: float

    def __post_init__(self) -> None:
        _require_finite_and_not_negative(self)

    def ttft_s(self, tokens: float) -> float:
        """T(n) for `tokens` prompt tokens to be computed."""
        return self.c0 + (self.c1 + self.c2 * tokens) * tokens


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """Time between tokens of a batch with `tokens` tokens of KV: I = intercept + slope·tokens, in seconds."""

    intercept: float
    slope: float

    def __post_init__(self) -> None:
        _require_finite_and_not_negative(self)

    def itl_s(self, tokens: float) -> float:
        """I(tokens): the step time of a batch that holds `tokens` tokens of KV cache in all."""
        return self.intercept + self.slope * tokens

    def max_tokens(self, slo_tpot_s: float) -> float:
        """MT(i, S_D) = (S_D - intercept) / slope: the most tokens that decode together within the TPOT SLO.

        0 where an empty step is already too slow; infinite where tokens cost nothing.
        """
        if slo_tpot_s <= self.intercept:
            return 0.0
        return (slo_tpot_s - self.intercept) / self.slope if self.slope else math.inf


@dataclass(frozen=True, slots=True)
class StepModel:
    """Duration of one engine step, in seconds.

    step = t0 + f·(b·Σchunk + c·Σ[(done + chunk)² - done²]) + d1·B + d2·Σctx

    where `chunk` prompt tokens follow `done` computed ones, B sequences decode over contexts `ctx`. f is 1,
    and `mixed_factor` in a step that holds prefill *and* decode: a prompt that shares its batch runs that
    much slower (Splitwise measured mixed batches at 1.1 × the prompt's time alone). t0 (weights read,
    launch) and the decode terms stay as they are, so a step grows without a jump when a small chunk joins
    it.
    """

    t0: float
    b: float
    c: float
    d1: float
    d2: float
    mixed_factor: float = 1.1

    def __post_init__(self) -> None:
        _require_finite_and_not_negative(self)
        if self.mixed_factor < 1:
            raise InvalidInput("StepModel.mixed_factor", self.mixed_factor, "must be at least 1")

    def step_s(self, prefill_chunks: Iterable[tuple[int, int]], decode_contexts: Sequence[int]) -> float:
        """Duration of a step with these `(done, chunk)` prompt pieces and these decode contexts."""
        chunks = list(prefill_chunks)
        return self.step_from_sums_s(
            prefill_tokens=sum(chunk for _, chunk in chunks),
            attention=sum((done + chunk) ** 2 - done**2 for done, chunk in chunks),
            decodes=len(decode_contexts),
            context_tokens=sum(decode_contexts),
        )

    def step_from_sums_s(
        self, *, prefill_tokens: int, attention: int, decodes: int, context_tokens: int
    ) -> float:
        """The same from its four sums: Σchunk, Σ[(done + chunk)² - done²], B and Σctx."""
        prefill_s = self.b * prefill_tokens + self.c * attention
        if decodes and prefill_tokens:
            prefill_s *= self.mixed_factor
        return self.t0 + prefill_s + self.d1 * decodes + self.d2 * context_tokens

    def prefill_model(self, token_budget: int) -> PrefillModel:
        """T(n) of a prompt that runs alone in chunks of `token_budget` tokens.

        The exact time is ceil(n/budget)·t0 + b·n + c·n² (the attention terms of the chunks telescope); the
        ceiling is taken as n/budget + 1, so the model is never below the exact time and less than one t0
        above it.
        """
        if token_budget <= 0:
            raise InvalidInput("token_budget", token_budget, "must be positive")
        return PrefillModel(c0=self.t0, c1=self.b + self.t0 / token_budget, c2=self.c)

    def decode_model(self, typical_tokens: float) -> DecodeModel:
        """I(tokens) of a pure decode batch whose requests hold `typical_tokens` tokens each.

        B = tokens / typical, so slope = d2 + d1/typical and intercept = t0; exact for requests of that
        size, too optimistic for shorter ones.
        """
        if not typical_tokens > 0:
            raise InvalidInput("typical_tokens", typical_tokens, "must be positive")
        return DecodeModel(intercept=self.t0, slope=self.d2 + self.d1 / typical_tokens)
