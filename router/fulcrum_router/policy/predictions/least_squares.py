"""Least squares with coefficients that are not negative, for the few coefficients of a latency model.

`estimate` solves by it what routers learn, and the simulator's `profiling` what it measures.
"""

import itertools
import math
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def solve_not_negative(xtx: Matrix, xty: Sequence[float]) -> tuple[float, ...]:
    """Return θ ≥ 0 that minimises the loss with the normal equations XᵀX·θ = Xᵀy.

    Every subset of coefficients is tried (seven for three coefficients), and the best solution without a
    negative one is returned: exact, and without a library. If the samples do not distinguish
    some coefficients, one of the possible solutions is returned.
    """
    size = len(xty)
    best, best_gain = (0.0,) * size, 0.0
    for length in range(1, size + 1):
        for chosen in itertools.combinations(range(size), length):
            theta = _solve([[xtx[i][j] for j in chosen] for i in chosen], [xty[i] for i in chosen])
            if theta is None or min(theta) < 0:
                continue
            # At the minimum over a subset of coefficients, the loss is lower than with θ = 0 by θ·(Xᵀy).
            gain = sum(t * xty[i] for t, i in zip(theta, chosen, strict=True))
            if gain > best_gain:
                by_index = dict(zip(chosen, theta, strict=True))
                best, best_gain = tuple(by_index.get(i, 0.0) for i in range(size)), gain
    return best


def _solve(xtx: list[list[float]], xty: list[float]) -> list[float] | None:
    """Solve a linear system by Gaussian elimination with partial pivoting; None if it is singular."""
    rows = [[*row, value] for row, value in zip(xtx, xty, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r in range(column + 1, size):
            factor = rows[r][column] / rows[column][column]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[column], strict=True)]
    theta = [0.0] * size
    for r in reversed(range(size)):
        known = sum(rows[r][k] * theta[k] for k in range(r + 1, size))
        theta[r] = (rows[r][size] - known) / rows[r][r]
    return theta if all(map(math.isfinite, theta)) else None
