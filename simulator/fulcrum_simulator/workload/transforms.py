"""Changes of a workload's times: rate, speed, jitter, alternation.

Lengths never change, so what a request costs stays what was recorded. Rate and speed are two
things: a higher speed shortens the phases of the load too, a higher rate keeps them.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from fulcrum_simulator.workload.requests import WorkloadRequest


def speed_up_arrivals(requests: Iterable[WorkloadRequest], speed: float) -> Iterator[WorkloadRequest]:
    """The same requests, `speed` times as fast: every arrival time is divided by it."""
    return (replace(request, arrival_s=request.arrival_s / speed) for request in requests)


def shift_arrivals(requests: Iterable[WorkloadRequest], by_s: float) -> Iterator[WorkloadRequest]:
    """The same requests, `by_s` seconds later."""
    return (replace(request, arrival_s=request.arrival_s + by_s) for request in requests)


def scale_rate(requests: Sequence[WorkloadRequest], factor: float, *, seed: int) -> list[WorkloadRequest]:
    """The arrival rate multiplied by `factor`, at the same length of time, so that drifts keep their pace.

    Each request comes floor(factor) times and once more with the probability of the rest. Copies lie within
    one mean gap of their original, evenly spread, so that they do not arrive as one.
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


def jitter_arrivals(requests: Sequence[WorkloadRequest], *, seed: int) -> list[WorkloadRequest]:
    """Every arrival moved by up to half the gap to its neighbour on that side; seed 0: as recorded.

    The order stays. The first request moves backwards only as far as the start, the last one never forwards.
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


def alternate_workloads(
    first: Iterable[WorkloadRequest], second: Iterable[WorkloadRequest], *, phase_s: float
) -> Iterator[WorkloadRequest]:
    """Phases of `phase_s` taken in turn from two workloads, until one of them runs out at its turn.

    Each workload's own time stands still while the other one plays, so no request is skipped.
    """
    slices = (_TimeSlices(first, phase_s), _TimeSlices(second, phase_s))
    phase = 0
    while slices[phase % 2].has_more():
        slice_index = phase // 2
        yield from shift_arrivals(slices[phase % 2].take_slice(slice_index), (phase - slice_index) * phase_s)
        phase += 1


class _TimeSlices:
    """A workload cut into slices of equal time."""

    def __init__(self, requests: Iterable[WorkloadRequest], phase_s: float) -> None:
        self._requests = iter(requests)
        self._next = next(self._requests, None)
        self._phase_s = phase_s

    def has_more(self) -> bool:
        return self._next is not None

    def take_slice(self, index: int) -> Iterator[WorkloadRequest]:
        """The requests that arrive before the end of slice `index`, counted from 0."""
        end_s = (index + 1) * self._phase_s
        while self._next is not None and self._next.arrival_s < end_s:
            yield self._next
            self._next = next(self._requests, None)
