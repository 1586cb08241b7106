"""Searches the highest rate at which a share of a workload is on time.

The rate is changed as in the published measurements: all arrival times are divided by one factor. Doing so
never makes a first-come-first-served queue shorter, so that the share falls as the factor grows. The bounds
search with it; each counts its own requests on time.
"""

import math
from collections.abc import Callable, Sequence

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.rate_search import find_highest_factor
from fulcrum_simulator.workload.requests import WorkloadRequest

TOLERANCE = 0.002
"""Relative width of the interval at which a search ends."""
_FACTOR_MAX = 2.0**30


def count_required(offered: int, attainment: float) -> int:
    """Return how many of `offered` requests must be on time for that attainment, 0 to 1.

    Raises:
        InvalidInput: if the attainment is not above 0 and at most 1.
    """
    if not 0 < attainment <= 1:
        raise InvalidInput("attainment", attainment, "must be above 0 and at most 1")
    return math.ceil(offered * attainment - 1e-9)


def mean_rate(requests: Sequence[WorkloadRequest]) -> float:
    """Return the requests per second of a workload, from its first to its last arrival.

    Raises:
        InvalidInput: if all requests arrive at one instant, or there is only one.
    """
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0:
        raise InvalidInput("workload", f"{len(requests)} requests", "must arrive over some time")
    return len(requests) / span_s


def find_highest_rate(
    requests: Sequence[WorkloadRequest], is_met: Callable[[Sequence[float]], bool]
) -> float:
    """Return the highest rate, in requests/s, at which `is_met` holds for the scaled arrival times.

    0 if it holds at no rate, infinity if it holds for a workload that arrives at once.
    """
    arrivals_s = [request.arrival_s for request in requests]

    def holds(factor: float) -> bool:
        return is_met([arrival_s / factor for arrival_s in arrivals_s])

    found = find_highest_factor(holds, bool, precision=1 + TOLERANCE, factors=(1 / _FACTOR_MAX, _FACTOR_MAX))
    factor = found.factor or 0.0
    return mean_rate(requests) * (math.inf if factor >= _FACTOR_MAX else factor)
