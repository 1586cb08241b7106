"""Finds the highest factor of a load at which a condition holds, by bisection.

The condition need not hold at every lower factor: the search finds one factor at which it begins to fail.
`list_factors_around` lists others, to look for that. Bounds and `fleet.policy_runs` search request rates with
it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")

RUN_PRECISION = 1.02
"""Ratio of the lowest factor that is not accepted to the highest that is, for simulated runs."""
RUN_FACTORS = 2.0**-8, 2.0**10


@dataclass(frozen=True, slots=True)
class FoundFactor(Generic[R]):
    """The highest factor that was accepted, and its result; None if none was. `trials` were made."""

    factor: float | None
    result: R | None
    trials: int


def find_highest_factor(
    run: Callable[[float], R],
    accepts: Callable[[R], bool],
    *,
    precision: float = RUN_PRECISION,
    factors: tuple[float, float] = RUN_FACTORS,
    first: float = 1.0,
    step: float = 2.0,
) -> FoundFactor[R]:
    """Find the highest factor of which `accepts` allows the result of `run`.

    `first` is tried first; it is multiplied or divided by `step`, then by its square and so on, at most by 2,
    until an accepted and a refused factor are found or the limits `factors` are passed.
    """
    trials = 0
    best: tuple[float, R] | None = None
    low, high, factor = 0.0, float("inf"), first
    while factors[0] <= factor <= factors[1] and (not low or high / low > precision):
        result = run(factor)
        trials += 1
        if accepts(result):
            low, best = factor, (factor, result)
        else:
            high = factor
        factor = _next_factor(low, high, step)
        if not low or high == float("inf"):
            step = min(step * step, 2.0)
    return FoundFactor(best[0] if best else None, best[1] if best else None, trials)


def _next_factor(low: float, high: float, step: float) -> float:
    if not low:
        return high / step
    if high == float("inf"):
        return low * step
    return float((low * high) ** 0.5)


def list_factors_around(found: float) -> tuple[float, ...]:
    """Return eight factors around a found one, four on each side, to check that attainment falls there."""
    return tuple(found * share for share in (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5))
