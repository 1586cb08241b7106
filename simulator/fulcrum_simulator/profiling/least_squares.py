"""The normal equations of measured curves, solved as the router solves those of its samples.

`fit` calls it; `fulcrum_router.policy.predictions.least_squares` solves them.
"""

from collections.abc import Sequence

from fulcrum_router.policy.predictions.least_squares import solve_not_negative


def fit_not_negative(
    rows: Sequence[Sequence[float]], targets: Sequence[float], scales: Sequence[float]
) -> tuple[float, ...]:
    """Return x ≥ 0 that minimises Σ((target - row·x)/scale)²: relative errors where `scales` are measured.

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
