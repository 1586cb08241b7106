"""Least squares with coefficients that are not negative, for the few coefficients of a latency model."""

from collections.abc import Sequence
from itertools import combinations


def fit_not_negative(
    rows: Sequence[Sequence[float]], targets: Sequence[float], scales: Sequence[float]
) -> tuple[float, ...]:
    """Return x ≥ 0 that minimises Σ((target - row·x)/scale)²: relative errors where `scales` are measured.

    Exact for a few columns: every subset of columns is fitted without a limit, and the best one whose
    coefficients are not negative counts. Columns that cannot be told apart share one of their fits.
    """
    scaled = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    rights = [target / scale for target, scale in zip(targets, scales, strict=True)]
    columns = range(len(rows[0]))
    best = (0.0,) * len(columns)
    best_error = sum(right**2 for right in rights)
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            found = _fit([[row[column] for column in chosen] for row in scaled], rights)
            if found is None or min(found) < 0:
                continue
            full = [0.0] * len(columns)
            for column, value in zip(chosen, found, strict=True):
                full[column] = value
            error = sum((right - _dot(row, full)) ** 2 for row, right in zip(scaled, rights, strict=True))
            if error < best_error:
                best, best_error = tuple(full), error
    return best


def _dot(row: Sequence[float], coefficients: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, coefficients, strict=True))


def _fit(rows: Sequence[Sequence[float]], rights: Sequence[float]) -> list[float] | None:
    """Solve the normal equations of row·x = right; None if the columns depend on one another."""
    size = len(rows[0])
    scales = [max(abs(row[column]) for row in rows) or 1.0 for column in range(size)]
    unit = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in unit) for j in range(size)]
        + [sum(row[i] * right for row, right in zip(unit, rights, strict=True))]
        for i in range(size)
    ]
    solution = _solve(matrix)
    return None if solution is None else [x / scale for x, scale in zip(solution, scales, strict=True)]


def _solve(matrix: list[list[float]]) -> list[float] | None:
    """Solve a system of linear equations, given with its right side, by elimination with pivots."""
    size = len(matrix)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[row][size] / matrix[row][row] for row in range(size)]
