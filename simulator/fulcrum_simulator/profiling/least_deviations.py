"""Fits coefficients to measured curves, so that the mean error in percent is as small as possible.

`fit` calls it; `fulcrum_router.policy.predictions.least_squares` solves the normal equations.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from fulcrum_router.policy.predictions.least_squares import solve_not_negative

ROUNDS = 30
LEAST_DEVIATION = 1e-3
"""A point that is hit counts as one that is missed by 0.1 %, else it would rule the next round alone."""


def fit_not_negative(
    rows: Sequence[Sequence[float]], targets: Sequence[float], scales: Sequence[float]
) -> tuple[float, ...]:
    """Return x ≥ 0 with a small Σ|target - row·x|/scale: relative errors where `scales` are measured.

    Least squares, repeated: each round divides the square of a point's deviation by its deviation in the
    round before (Schlossmacher 1973). The best round counts, so that it is no worse than least squares.
    """
    best: tuple[float, tuple[float, ...]] | None = None
    used = list(scales)
    for _ in range(ROUNDS):
        found = _fit_squares(rows, targets, used)
        pairs = zip(rows, targets, scales, strict=True)
        deviations = [abs(target - _dot(row, found)) / scale for row, target, scale in pairs]
        if best is None or fmean(deviations) < best[0]:
            best = fmean(deviations), found
        weighted = zip(scales, deviations, strict=True)
        used = [scale * math.sqrt(max(deviation, LEAST_DEVIATION)) for scale, deviation in weighted]
    assert best is not None
    return best[1]


def _fit_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], scales: Sequence[float]
) -> tuple[float, ...]:
    """Return x ≥ 0 that minimises Σ((target - row·x)/scale)².

    Columns are brought to the same size first: a coefficient of a squared length is tiny.
    """
    scaled = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    right_sides = [target / scale for target, scale in zip(targets, scales, strict=True)]
    columns = list(zip(*scaled, strict=True))
    sizes = [max(map(abs, column)) or 1.0 for column in columns]
    unit = [[value / size for value in column] for column, size in zip(columns, sizes, strict=True)]
    found = solve_not_negative(
        [[_dot(left, right) for right in unit] for left in unit],
        [_dot(column, right_sides) for column in unit],
    )
    return tuple(value / size for value, size in zip(found, sizes, strict=True))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
