"""Predict token counts and durations from past requests.

There is no tokeniser: the token count is the prompt's bytes times a ratio that the engines' `usage` corrects.
Durations follow Arrow's two models, fitted to measured legs by least squares of the *relative* error. A prior
keeps a small constant weight, so that samples of one prompt length cannot bend the curve elsewhere. Only its
shape counts: it is scaled to the samples, since hardware may be many times faster or slower than assumed.
NaN, infinite and negative samples are ignored.

`learning` feeds the models of each instance, `measure_prompt` the bytes; dispatch and admission predict with
them.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from statistics import median

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_router.policy.predictions.least_squares import solve_not_negative
from fulcrum_router.policy.predictions.prefill_samples import PrefillSample

DEFAULT_TOKENS_PER_BYTE = 0.25
DEFAULT_PREFILL = PrefillModel(c0=0.02, c1=1e-4, c2=1e-9)
"""Prior without a profile: 10,000 tokens a second, slow for any accelerator."""
DEFAULT_DECODE = DecodeModel(intercept=0.01, slope=5e-7)
"""Prior without a profile: 10 ms a step, and 20 ms more with 40,000 tokens in the batch."""
TYPICAL_REQUEST_TOKENS = 1_000
"""Tokens per request for which a profile's step model is converted to a decode model."""


TENANTS_MAX = 1_024
"""Tenants whose ratio of tokens to bytes is remembered; the ones not seen for longest are dropped."""
_MEDIAN_EVERY = 32
"""Prompts after which the median over many tenants is computed anew."""


class TokensPerByte:
    """Learned tokens per byte of prompt, by the token counts of one service's engines.

    Each tenant has a value of its own. Other tenants get the median over all: else one that sends spaces, or
    rare characters, would bend what is predicted of everybody's prompts.
    """

    __slots__ = ("_by_tenant", "_learned", "_weight", "value")

    def __init__(self, value: float = DEFAULT_TOKENS_PER_BYTE, *, weight: float = 0.05) -> None:
        self.value = value
        """For tenants without a value of their own."""
        self._weight = weight
        self._by_tenant: OrderedDict[str, float] = OrderedDict()
        self._learned = 0

    def predict_tokens(self, prompt_bytes: int, *, tenant: str = "") -> int:
        """Predict the tokens of `prompt_bytes` bytes; at least 1."""
        return math.ceil(prompt_bytes * self._by_tenant.get(tenant, self.value)) or 1

    def learn(self, *, prompt_bytes: int, tokens: float, tenant: str = "") -> None:
        """Learn from a token count. Prompts under 256 bytes count less: they are mostly template."""
        if prompt_bytes <= 0 or not 0 < tokens < math.inf:
            return
        ratio = tokens / prompt_bytes
        if not 0.01 <= ratio <= 4.0:
            ratio = 0.01 if ratio < 0.01 else 4.0
        weight = self._weight if prompt_bytes >= 256 else self._weight * prompt_bytes / 256
        before = self._by_tenant.pop(tenant, self.value)
        self._by_tenant[tenant] = before + weight * (ratio - before)
        if len(self._by_tenant) > TENANTS_MAX:
            self._by_tenant.popitem(last=False)
        self._learned += 1
        if len(self._by_tenant) <= _MEDIAN_EVERY or self._learned % _MEDIAN_EVERY == 0:
            self.value = median(self._by_tenant.values())


_PRIOR_WEIGHT = 0.05
"""Constant weight of a prior's sample; a measured sample starts with weight 1 and decays."""


_OUTLIER = 10.0
"""A sample counts as at most so many times the usual duration of its work: an engine that stalled for a
minute must not decide the model."""
_MAX_WEIGHT = 1e6
"""Weight of a sample from which all weights are scaled down to 1."""
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""Bounds of a duration that can be true; beyond them the squares of `solve` could be 0 or infinite."""


class NonNegativeLeastSquares:
    """Coefficients θ ≥ 0 of y = Σ θ_k·x_k that minimise Σ w·((y − θ·x)/p)²; w decays with a sample's age.

    p is what the prior predicts of the sample, and not y: errors relative to y would give the most weight to
    the samples that came out too short. The normal equations are stored as sums. So that not all sums change
    with each sample, older ones keep their weight, and each new one weighs more than the one before.
    """

    __slots__ = (
        "_decay",
        "_log_scale",
        "_log_weight",
        "_prior_xtx",
        "_prior_xty",
        "_weight",
        "_xtx",
        "_xty",
        "count",
    )

    def __init__(self, prior: Sequence[tuple[Sequence[float], float]], *, decay: float = 0.99) -> None:
        size = len(prior[0][0])
        self._decay = decay
        self._xtx = [[0.0] * size for _ in range(size)]
        self._xty = [0.0] * size
        for features, value in prior:
            self._accumulate(features, value, value, _PRIOR_WEIGHT)
        self._prior_xtx, self._prior_xty = self._xtx, self._xty
        self._xtx = [[0.0] * size for _ in range(size)]
        self._xty = [0.0] * size
        self._weight = 1.0
        """Of the latest sample in the sums."""
        self._log_scale = self._log_weight = 0.0
        """Decayed sums: logarithm of a sample divided by what the prior predicts, and weight."""
        self.count = 0

    def learn(self, features: Sequence[float], value: float, *, prior_value: float) -> bool:
        """Add one sample, of which the prior predicts `prior_value`.

        Returns False, and changes nothing, if the sample is unusable.
        """
        if not _SHORTEST_S <= value <= _LONGEST_S:
            return False
        for x in features:
            if not 0 <= x <= _LONGEST_S:
                return False
        expected = max(prior_value, 1e-6)
        self._log_scale = self._decay * self._log_scale + math.log(value / expected)
        self._log_weight = self._decay * self._log_weight + 1.0
        usual = expected * math.exp(self._log_scale / self._log_weight)
        self._weight /= self._decay
        self._accumulate(features, min(value, _OUTLIER * usual), expected, self._weight)
        if self._weight > _MAX_WEIGHT:
            (self._xtx, self._xty), self._weight = self._read_sums(), 1.0
        self.count += 1
        return True

    def _read_sums(self) -> tuple[list[list[float]], list[float]]:
        """Return the sums in which the latest sample has the weight 1."""
        scale = 1.0 / self._weight
        return [[scale * cell for cell in row] for row in self._xtx], [scale * cell for cell in self._xty]

    def solve(self) -> tuple[float, ...]:
        """Compute the best coefficients for the samples so far."""
        scale = math.exp(self._log_scale / self._log_weight) if self._log_weight else 1.0
        sums, products = self._read_sums()
        xtx = [[a + b for a, b in zip(r, p, strict=True)] for r, p in zip(sums, self._prior_xtx, strict=True)]
        xty = [a + b * scale for a, b in zip(products, self._prior_xty, strict=True)]
        return solve_not_negative(xtx, xty)

    def _accumulate(self, features: Sequence[float], value: float, expected: float, weight: float) -> None:
        scaled = [x / expected for x in features]
        for i, left in enumerate(scaled):
            row, weighted = self._xtx[i], weight * left
            for j, right in enumerate(scaled):
                row[j] += weighted * right
            self._xty[i] += weighted * value / expected


_REFIT_EVERY = 32
_PRIOR_PROMPT_TOKENS = (64, 512, 4096)
_PRIOR_BATCH_TOKENS = (1_000, 20_000, 200_000)
_PROMPT_UNIT = 1_000.0
_BATCH_UNIT = 10_000.0


class PrefillPredictor:
    """Learned T(n) of one instance: `model` predicts the prefill time of n tokens."""

    __slots__ = ("_fit", "_prior", "drift", "model")

    def __init__(self, prior: PrefillModel = DEFAULT_PREFILL) -> None:
        self.model = self._prior = prior
        self.drift = PredictionErrorMean()
        """How far `model` is from the last samples, before they are learned."""
        self._fit = NonNegativeLeastSquares(
            [(_prefill_features(1, n, n * n), max(prior.ttft_s(n), 1e-6)) for n in _PRIOR_PROMPT_TOKENS]
        )

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return self._fit.count

    def learn(self, sample: PrefillSample) -> None:
        """Learn from computed prompts; `model` changes when a refit is due."""
        predicted_s = _predict_prefill_s(self.model, sample)
        self.drift.learn(predicted_s=predicted_s, measured_s=sample.duration_s)
        features = _prefill_features(sample.responses, sample.tokens, sample.squares)
        usable = self._fit.learn(
            features, sample.duration_s, prior_value=_predict_prefill_s(self._prior, sample)
        )
        if usable and _is_refit_due(self._fit.count):
            c0, c1, c2 = self._fit.solve()
            self.model = PrefillModel(c0=c0, c1=c1 / _PROMPT_UNIT, c2=c2 / _PROMPT_UNIT**2)


def _predict_prefill_s(model: PrefillModel, sample: PrefillSample) -> float:
    return model.c0 * sample.responses + model.c1 * sample.tokens + model.c2 * sample.squares


def _prefill_features(responses: int, tokens: float, squares: float) -> tuple[float, float, float]:
    return (float(responses), tokens / _PROMPT_UNIT, squares / _PROMPT_UNIT**2)


class DecodePredictor:
    """Learned I(n) of one instance: `model` predicts the inter-token latency with n tokens in the batch."""

    __slots__ = ("_fit", "_prior", "drift", "model")

    def __init__(self, prior: DecodeModel = DEFAULT_DECODE) -> None:
        self.model = self._prior = prior
        self.drift = PredictionErrorMean()
        """How far `model` is from the last samples, before they are learned."""
        self._fit = NonNegativeLeastSquares(
            [((1.0, n / _BATCH_UNIT), max(prior.itl_s(n), 1e-6)) for n in _PRIOR_BATCH_TOKENS]
        )

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return self._fit.count

    def learn(self, *, tokens: int, itl_s: float) -> None:
        """Learn from the mean inter-token latency of one second, with `tokens` KV tokens in the batch.

        Every sample refits the model: there is one a second, and an instance whose model is too optimistic
        gets all requests until the model is corrected.
        """
        self.drift.learn(predicted_s=self.model.itl_s(tokens), measured_s=itl_s)
        if self._fit.learn((1.0, tokens / _BATCH_UNIT), itl_s, prior_value=self._prior.itl_s(tokens)):
            intercept, slope = self._fit.solve()
            self.model = DecodeModel(intercept=intercept, slope=slope / _BATCH_UNIT)


def _is_refit_due(count: int) -> bool:
    """Whether to refit after `count` samples: at 1, 2, 4, 8, 16, then after every 32."""
    return count % _REFIT_EVERY == 0 or (count < _REFIT_EVERY and count & (count - 1) == 0)


class PredictionErrorMean:
    """Mean of (predicted − measured)/measured of recent predictions; None before the first."""

    __slots__ = ("_weight", "value")

    def __init__(self, *, weight: float = 0.05) -> None:
        self.value: float | None = None
        self._weight = weight

    def learn(self, *, predicted_s: float, measured_s: float) -> None:
        """Learn from one predicted and measured time."""
        if not 0 < measured_s < math.inf or not 0 <= predicted_s < math.inf:
            return
        error = predicted_s / measured_s - 1.0
        if error > 10.0:
            error = 10.0  # one stalled engine must not dominate the mean
        self.value = error if self.value is None else self.value + self._weight * (error - self.value)
