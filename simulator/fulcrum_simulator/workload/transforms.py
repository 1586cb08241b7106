"""Transforms of a workload's arrival times: rate, speed, jitter. Lengths never change.

A higher speed also shortens the phases of the load; a higher rate keeps them. `fulcrum play`, `fleet.load`
and `bench` use them.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from fulcrum_simulator.workload.requests import WorkloadRequest


def speed_up_arrivals(requests: Iterable[WorkloadRequest], speed: float) -> Iterator[WorkloadRequest]:
    """Divide every arrival time by `speed`."""
    return (replace(request, arrival_s=request.arrival_s / speed) for request in requests)


def shift_arrivals(requests: Iterable[WorkloadRequest], by_s: float) -> Iterator[WorkloadRequest]:
    """Add `by_s` to every arrival time."""
    return (replace(request, arrival_s=request.arrival_s + by_s) for request in requests)


def scale_rate(requests: Sequence[WorkloadRequest], factor: float, *, seed: int) -> list[WorkloadRequest]:
    """Multiply the arrival rate by `factor` over the same duration, so that slow changes of the load keep
    their pace.

    Each request is repeated floor(factor) times, and once more with the probability of the remainder. The
    copies are spread evenly over one mean gap after the original.
    """
    if not requests:
        return []
    rng = random.Random(seed)
    copies = _copies(factor)
    step_s = _mean_gap_s(requests) / copies
    last_share = factor - (copies - 1)
    scaled = [
        replace(request, arrival_s=request.arrival_s + copy * step_s)
        for request in requests
        for copy in range(copies)
        if copy < copies - 1 or rng.random() < last_share
    ]
    return sorted(scaled, key=_arrival_s)


def _copies(factor: float) -> int:
    return int(factor) if factor == int(factor) else int(factor) + 1


def _mean_gap_s(requests: Sequence[WorkloadRequest]) -> float:
    return (requests[-1].arrival_s - requests[0].arrival_s) / max(1, len(requests) - 1)


def _arrival_s(request: WorkloadRequest) -> float:
    return request.arrival_s


def repeat_until(requests: Sequence[WorkloadRequest], duration_s: float) -> list[WorkloadRequest]:
    """Repeat a workload, one mean gap after its end, until its arrivals span `duration_s`."""
    if not requests:
        return []
    period_s = compute_repeat_period_s(requests)
    if period_s <= 0:
        return list(requests)
    rounds = max(1, math.ceil(duration_s / period_s))
    return [
        replace(request, arrival_s=request.arrival_s + number * period_s)
        for number in range(rounds)
        for request in requests
    ]


def compute_repeat_period_s(requests: Sequence[WorkloadRequest]) -> float:
    """Return the seconds after which `repeat_until` repeats a workload; 0 if it arrives at one time."""
    return requests[-1].arrival_s - requests[0].arrival_s + _mean_gap_s(requests)


def jitter_arrivals(requests: Sequence[WorkloadRequest], *, seed: int) -> list[WorkloadRequest]:
    """Move every arrival by up to half the gap to its neighbour on that side; seed 0 moves none.

    The order stays. The first request is moved back at most to the start, the last one never forward.
    """
    if seed == 0:
        return list(requests)
    rng = random.Random(seed)
    times = [request.arrival_s for request in requests]
    gaps = [times[0] * 2, *(later - earlier for earlier, later in pairwise(times)), 0.0] if times else []
    return [
        replace(
            request, arrival_s=request.arrival_s + _displacement_s(rng.uniform(-0.5, 0.5), before_s, after_s)
        )
        for request, (before_s, after_s) in zip(requests, pairwise(gaps), strict=True)
    ]


def _displacement_s(share: float, before_s: float, after_s: float) -> float:
    return share * (before_s if share < 0 else after_s)
