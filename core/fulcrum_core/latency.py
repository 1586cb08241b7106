"""Latency models of an engine: the duration of one step, and the two predictors that dispatch uses.

The simulated engine runs on `StepModel`. The router's dispatch predicts with `PrefillModel` (quadratic) and
`DecodeModel` (linear), the predictors of the Arrow paper. Predictors are fitted, or derived from a step
model, so that a prediction has the coefficients of the simulated engine.
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
    """TTFT of a prompt that runs alone on an instance, in seconds: T(n) = c0 + c1·n + c2·n²."""

    c0: float
    c1: float
    c2: float

    def __post_init__(self) -> None:
        _require_finite_and_not_negative(self)

    def ttft_s(self, tokens: float) -> float:
        """Seconds to compute `tokens` prompt tokens, T(n)."""
        return self.c0 + (self.c1 + self.c2 * tokens) * tokens


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """ITL of a decode batch whose KV cache has `tokens` tokens, in seconds: I = intercept + slope·tokens."""

    intercept: float
    slope: float

    def __post_init__(self) -> None:
        _require_finite_and_not_negative(self)

    def itl_s(self, tokens: float) -> float:
        """Seconds between two tokens of a batch that has `tokens` tokens of KV cache in all, I(tokens)."""
        return self.intercept + self.slope * tokens

    def max_tokens(self, slo_tpot_s: float) -> float:
        """Maximum KV cache tokens of a batch within the TPOT SLO: MT(i, S_D) = (S_D - intercept) / slope.

        0 if an empty step already takes longer than the SLO; infinite if the slope is 0.
        """
        if slo_tpot_s <= self.intercept:
            return 0.0
        return (slo_tpot_s - self.intercept) / self.slope if self.slope else math.inf


@dataclass(frozen=True, slots=True)
class StepModel:
    """Duration of one engine step, in seconds.

    step = t0 + f·(b·Σchunk + c·Σ[(done + chunk)² - done²]) + d1·B + d2·Σctx

    Each prefill chunk computes `chunk` prompt tokens after `done` computed ones; B sequences decode over
    contexts of `ctx` tokens. f is `mixed_factor` in a step with prefill *and* decode, else 1: Splitwise
    measured mixed batches at 1.1 × the time of the prompt alone. f multiplies neither t0 (reading the
    weights, launch) nor the decode terms, so a small chunk that joins a step adds little to the step.
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
        """Seconds of a step with these `(done, chunk)` prefill chunks and these decode context lengths."""
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
        """Seconds of a step, from its four sums: Σchunk, Σ[(done + chunk)² - done²], B and Σctx."""
        prefill_s = self.b * prefill_tokens + self.c * attention
        if decodes and prefill_tokens:
            prefill_s *= self.mixed_factor
        return self.t0 + prefill_s + self.d1 * decodes + self.d2 * context_tokens

    def decode_steps_s(self, *, decodes: int, context_tokens: int, steps: int) -> list[float]:
        """Seconds of consecutive steps without prefill, each of which adds a token to each context.

        `context_tokens` is Σctx of the first. Bit for bit equal to `step_from_sums_s` of each step.
        """
        fixed_s, per_token_s = self.t0 + self.d1 * decodes, self.d2
        last = context_tokens + steps * decodes
        return [fixed_s + per_token_s * tokens for tokens in range(context_tokens, last, decodes)]

    def prefill_model(self, token_budget: int) -> PrefillModel:
        """Return T(n) of a prompt that runs alone, in chunks of `token_budget` tokens.

        The exact time is ceil(n/budget)·t0 + b·n + c·n²: the attention terms of the chunks telescope. The
        ceiling is approximated by n/budget + 1, so T(n) is at least the exact time, and at most t0 more.
        """
        if token_budget <= 0:
            raise InvalidInput("token_budget", token_budget, "must be positive")
        return PrefillModel(c0=self.t0, c1=self.b + self.t0 / token_budget, c2=self.c)

    def decode_model(self, typical_tokens: float) -> DecodeModel:
        """Return I(tokens) of a batch without prefill whose requests have `typical_tokens` tokens each.

        B = tokens / typical, so slope = d2 + d1/typical and intercept = t0: exact for requests of that size,
        too low for shorter ones.
        """
        if not typical_tokens > 0:
            raise InvalidInput("typical_tokens", typical_tokens, "must be positive")
        return DecodeModel(intercept=self.t0, slope=self.d2 + self.d1 / typical_tokens)
