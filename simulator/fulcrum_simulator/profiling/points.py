"""Chooses the points to measure: lengths and batches that spread over what the engine can hold.

`fulcrum profile` asks once, with the limits that the engine reports; `measure` measures the points.
"""

from dataclasses import dataclass

from fulcrum_core.errors import InvalidInput

PREFILL_POINTS = 8
GRID_POINTS = 5
DECODE_STEPS = 24
"""Steps that are measured at first at one point of the decode grid; more, if too few were undisturbed."""
_TOKENS_MIN = 64
"""Shortest prompt."""
_CACHE_SHARE = 0.8
"""Share of the KV cache that the largest point may fill."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """Points of each curve, in tokens and requests; `decode` holds (batch, prompt tokens of each)."""

    prefill: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    mixed_batch: int
    mixed: tuple[int, ...]
    transfer: tuple[int, ...]


def plan_measurement(
    *, max_model_tokens: int, kv_tokens: int, block_size: int, token_budget: int, max_batch: int
) -> MeasurementPlan:
    """Return the points for an engine.

    Raises:
        InvalidInput: if the KV cache is too small for several different points.
    """
    longest = min(max_model_tokens - 1, int(kv_tokens * _CACHE_SHARE))
    # Half of the cache for the prompts; the other half for what they generate while all are prefilled.
    context_max = min(longest // 2, int(kv_tokens * _CACHE_SHARE) // (2 * max_batch))
    if longest < 2 * _TOKENS_MIN or context_max < _TOKENS_MIN // 2:
        rule = f"is too small to measure {max_batch} requests of {_TOKENS_MIN} tokens: lower --max-batch"
        raise InvalidInput("KV cache", f"{kv_tokens} tokens, at most {max_model_tokens} a request", rule)
    contexts = spread(min(_TOKENS_MIN, context_max // 4), context_max, GRID_POINTS)
    batches = spread(1, max_batch, GRID_POINTS)
    mixed_batch = max(1, max_batch // 2)
    mixed_max = max(_TOKENS_MIN, min(longest // 2, token_budget - mixed_batch))
    blocks = spread(2, max(3, longest // 2 // block_size), GRID_POINTS)
    return MeasurementPlan(
        prefill=spread(_TOKENS_MIN, longest, PREFILL_POINTS),
        decode=tuple((batch, context) for batch in batches for context in contexts),
        mixed_batch=mixed_batch,
        mixed=spread(_TOKENS_MIN, mixed_max, GRID_POINTS),
        transfer=tuple(count * block_size for count in blocks),
    )


def spread(first: int, last: int, count: int) -> tuple[int, ...]:
    """Return up to `count` whole numbers from `first` to `last`, each larger by the same factor.

    Numbers that are equal after rounding are returned once.
    """
    factor = (last / first) ** (1 / (count - 1))
    return tuple(sorted({round(first * factor**index) for index in range(count)}))
