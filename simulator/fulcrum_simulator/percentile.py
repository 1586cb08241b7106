"""Percentiles of measured values, as the load generator and the simulated fleet report them."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that at least `percent` % of the values do not exceed (nearest rank); None if
    empty.
    """
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(0, int(rank) - 1)]
