"""Finds the highest rate at which a policy keeps a given SLO attainment, by bisection of the load's speed.

All arrival times are divided by the speed, as in the Arrow paper, so that bursts become shorter, too.
Attainment need not fall steadily with the speed; the search finds one speed at which it crosses the bar.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")

PRECISION = 1.02
"""Ratio of the lowest speed that misses the bar to the highest that keeps it, at the end."""
SPEED_MIN, SPEED_MAX = 2.0**-8, 2.0**10


@dataclass(frozen=True, slots=True)
class FoundRate(Generic[R]):
    """The highest speed that kept the bar and its result; None if no speed did. `trials` runs were made."""

    speed: float | None
    result: R | None
    trials: int


def find_highest_speed(run: Callable[[float], R], keeps_bar: Callable[[R], bool]) -> FoundRate[R]:
    """Find the highest speed at which `keeps_bar` holds for the result of `run`, to 2 %.

    Speed 1 is tried first; it is doubled or halved until the bar lies between two speeds.
    """
    trials = 0
    best: tuple[float, R] | None = None
    low, high, speed = 0.0, float("inf"), 1.0
    while SPEED_MIN <= speed <= SPEED_MAX and (not low or high / low > PRECISION):
        result = run(speed)
        trials += 1
        if keeps_bar(result):
            low, best = speed, (speed, result)
        else:
            high = speed
        speed = _next_speed(low, high)
    return FoundRate(best[0] if best else None, best[1] if best else None, trials)


def _next_speed(low: float, high: float) -> float:
    if not low:
        return high / 2
    if high == float("inf"):
        return low * 2
    return float((low * high) ** 0.5)
