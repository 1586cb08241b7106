"""What the router has learned of the speed of each pool, kept while routers and instances come and go.

Instances of one pool have the same model, engine and hardware, so a new one starts from the mean of those
that were measured. The models are T(n), the prefill time of n prompt tokens, and I(n), the inter-token
latency with n tokens in the batch. The text form is what an active router hands over to its successor.

The router collects them from its instances and gives them to new ones; `failover` writes and reads the text.
"""

import json
import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import NamedTuple, Protocol

from fulcrum_core.errors import InvalidInput
from fulcrum_core.latency import DecodeModel, PrefillModel

MIN_SAMPLES = 8
"""Measurements of an instance from which on its models count as learned."""
MAX_POOLS = 64
"""Most pools in the text form, about 8 KiB."""
CHANGED_RATIO = 1.1
"""Ratio of two predictions from which on they differ."""
_PROMPT_TOKENS, _BATCH_TOKENS = 1_000, 10_000
"""Work for which two models are compared."""
_DIGITS = 4
_MAX_COEFFICIENT = 1e6


class MeasuredInstance(Protocol):
    """One instance as its models are collected."""

    @property
    def pool(self) -> str:
        """Name of the PDPool; empty: not known."""

    @property
    def samples(self) -> tuple[int, int]:
        """Number of prefills and of decode steps that the models were learned from."""

    @property
    def prefill_model(self) -> PrefillModel:
        """T(n)."""

    @property
    def decode_model(self) -> DecodeModel:
        """I(n)."""


class PoolModels(NamedTuple):
    """The learned models of one pool; None: not measured."""

    prefill: PrefillModel | None = None
    decode: DecodeModel | None = None


def compute_suitability(models: PoolModels) -> float | None:
    """Return how well a pool suits prefill: the time of a decode step, as a multiple of that of a prompt.

    None: one of them was not measured.
    """
    if models.prefill is None or models.decode is None:
        return None
    prompt_s, step_s = models.prefill.ttft_s(_PROMPT_TOKENS), models.decode.itl_s(_BATCH_TOKENS)
    ratio = step_s / prompt_s if prompt_s > 0 else math.inf
    return ratio if 0 < ratio < math.inf else None


def collect_models(
    instances: Iterable[MeasuredInstance], known: Mapping[str, PoolModels]
) -> dict[str, PoolModels]:
    """Collect the mean models of the measured instances by pool; pools without one keep what was `known`."""
    prefills: dict[str, list[PrefillModel]] = {}
    decodes: dict[str, list[DecodeModel]] = {}
    for instance in instances:
        if not instance.pool:
            continue
        if instance.samples[0] >= MIN_SAMPLES:
            prefills.setdefault(instance.pool, []).append(instance.prefill_model)
        if instance.samples[1] >= MIN_SAMPLES:
            decodes.setdefault(instance.pool, []).append(instance.decode_model)
    found = dict(known)
    for pool, prefill_models in prefills.items():
        mean = PrefillModel(*(fmean(getattr(m, name) for m in prefill_models) for name in ("c0", "c1", "c2")))
        found[pool] = PoolModels(mean, found.get(pool, PoolModels()).decode)
    for pool, decode_models in decodes.items():
        terms = (fmean(getattr(m, name) for m in decode_models) for name in ("intercept", "slope"))
        found[pool] = PoolModels(found.get(pool, PoolModels()).prefill, DecodeModel(*terms))
    return found


def have_changed(before: Mapping[str, PoolModels], now: Mapping[str, PoolModels]) -> bool:
    """Whether a pool is new, or a prediction differs by more than a tenth."""
    return any(
        _differ(_predict(before.get(pool, PoolModels())), _predict(models)) for pool, models in now.items()
    )


def render_models(models: Mapping[str, PoolModels]) -> str:
    """Render at most `MAX_POOLS` pools as JSON."""
    content = {}
    for pool in sorted(models)[:MAX_POOLS]:
        prefill, decode = models[pool]
        content[pool] = {
            "prefill": prefill and [_round(prefill.c0), _round(prefill.c1), _round(prefill.c2)],
            "decode": decode and [_round(decode.intercept), _round(decode.slope)],
        }
    return json.dumps(content, separators=(",", ":"))


def parse_models(text: str) -> dict[str, PoolModels]:
    """Parse what `render_models` wrote. Anybody may have changed it: what is not a model is left out."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    found = {}
    for pool, entry in list(content.items())[:MAX_POOLS]:
        if isinstance(entry, dict):
            prefill, decode = _read_numbers(entry.get("prefill"), 3), _read_numbers(entry.get("decode"), 2)
            found[pool] = PoolModels(
                _make_prefill(prefill) if prefill else None, _make_decode(decode) if decode else None
            )
    return found


def _read_numbers(value: object, count: int) -> list[float] | None:
    if not isinstance(value, list) or len(value) != count:
        return None
    if not all(type(v) in (int, float) and 0 <= v <= _MAX_COEFFICIENT for v in value):  # NaN is refused, too
        return None
    return [float(v) for v in value]


def _make_prefill(numbers: list[float]) -> PrefillModel | None:
    try:
        model = PrefillModel(*numbers)
    except InvalidInput:
        return None
    return model if model.ttft_s(_PROMPT_TOKENS) > 0 else None


def _make_decode(numbers: list[float]) -> DecodeModel | None:
    try:
        model = DecodeModel(*numbers)
    except InvalidInput:
        return None
    return model if model.itl_s(_BATCH_TOKENS) > 0 else None


def _predict(models: PoolModels) -> tuple[float, float]:
    prefill, decode = models
    return (
        math.nan if prefill is None else prefill.ttft_s(_PROMPT_TOKENS),
        math.nan if decode is None else decode.itl_s(_BATCH_TOKENS),
    )


def _differ(before: tuple[float, float], now: tuple[float, float]) -> bool:
    for old, new in zip(before, now, strict=True):
        if math.isnan(new):
            continue
        if math.isnan(old) or not old / CHANGED_RATIO <= new <= old * CHANGED_RATIO:
            return True
    return False


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
