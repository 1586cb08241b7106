"""The best fixed split of a workload, and a split that moves with known arrivals (the clairvoyant split).

Both are references on the model of `split_queue`: what a policy that knows the future reaches with queues in
order of arrival. A policy that orders or refuses requests can do better, up to the
bound of `prefill_burst`. `fulcrum bounds` prints the highest rate of each, and the
compared policy `clairvoyant` follows the moving split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fulcrum_core.api.meta import format_duration
from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.bounds.rates import count_required, find_highest_rate
from fulcrum_simulator.bounds.split_queue import SplitQueue, Task, make_tasks
from fulcrum_simulator.workload.requests import WorkloadRequest

SPLITS_MAX = 100_000
"""Most splits of a moving split, over all intervals; from each, all splits of the next interval are tried."""


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """A split that never moves, and how many requests it serves within the SLO."""

    prefill: int
    on_time: int


@dataclass(frozen=True, slots=True)
class MovingSplit:
    """Prefill instances in each interval of `interval_s`, and how many requests are served within the SLO."""

    interval_s: float
    prefill: tuple[int, ...]
    on_time: int


def find_best_fixed_split(requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> FixedSplit:
    """Return the split of x prefill and N - x decode instances that serves most requests, by trying all."""
    return _best_fixed(make_tasks(requests, fleet), [request.arrival_s for request in requests], fleet)


def plan_moving_split(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, interval_s: float
) -> MovingSplit:
    """Return a good split for each interval, with all arrivals and lengths known (dynamic programme).

    For each number of prefill instances in an interval, all numbers of the interval before are tried. The
    state with the fewest late requests is kept, including those that are certain to be late without a change;
    with equal counts, the one with the least work left. Since one state is kept for each split, the result is
    not the optimum: knowing the future may be worth more. It is never below the best fixed split.
    """
    _check_interval(requests, fleet, interval_s)
    return _best_moving(
        make_tasks(requests, fleet), [request.arrival_s for request in requests], fleet, interval_s
    )


def find_fixed_split_rate(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float
) -> float:
    """Return the highest rate, in requests/s, at which some fixed split reaches that attainment."""
    _check_can_split(fleet)
    required, tasks = count_required(len(requests), attainment), make_tasks(requests, fleet)
    return find_highest_rate(
        requests,
        lambda arrivals_s: any(
            _count_fixed(tasks, arrivals_s, fleet, prefill) >= required
            for prefill in range(1, fleet.instances)
        ),
    )


def find_moving_split_rate(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float, interval_s: float
) -> float:
    """Return the highest rate, in requests/s, at which `plan_moving_split` reaches that attainment.

    At rates so low that the arrivals have too many intervals, the split does not move.
    """
    _check_interval(requests, fleet, interval_s)
    required, tasks = count_required(len(requests), attainment), make_tasks(requests, fleet)

    def count_on_time(arrivals_s: Sequence[float]) -> int:
        if _has_too_many_splits(arrivals_s[-1], fleet, interval_s):
            return _best_fixed(tasks, arrivals_s, fleet).on_time
        return _best_moving(tasks, arrivals_s, fleet, interval_s).on_time

    return find_highest_rate(
        requests,
        lambda arrivals_s: count_on_time(arrivals_s) >= required,
    )


def _best_fixed(tasks: Sequence[Task], arrivals_s: Sequence[float], fleet: UniformFleet) -> FixedSplit:
    _check_can_split(fleet)
    return max(
        (
            FixedSplit(prefill, _count_fixed(tasks, arrivals_s, fleet, prefill))
            for prefill in range(1, fleet.instances)
        ),
        key=lambda split: (split.on_time, -split.prefill),
    )


def _check_can_split(fleet: UniformFleet) -> None:
    if fleet.instances < 2:
        raise InvalidInput("instances", fleet.instances, "must be at least 2 to be split")


def _has_too_many_splits(last_s: float, fleet: UniformFleet, interval_s: float) -> bool:
    return last_s / interval_s * (fleet.instances - 1) > SPLITS_MAX


def _check_interval(requests: Sequence[WorkloadRequest], fleet: UniformFleet, interval_s: float) -> None:
    if not 0 < interval_s < math.inf:
        raise InvalidInput("interval_s", interval_s, "must be a positive number of seconds")
    if _has_too_many_splits(requests[-1].arrival_s, fleet, interval_s):
        rule = (
            f"is too short: {requests[-1].arrival_s:g} s of arrivals and {fleet.instances} instances "
            f"make more than {SPLITS_MAX:,} splits to compute"
        )
        raise InvalidInput("interval of the moving split", format_duration(interval_s), rule)


def _count_fixed(
    tasks: Sequence[Task], arrivals_s: Sequence[float], fleet: UniformFleet, prefill: int
) -> int:
    queue = SplitQueue(tasks, arrivals_s, fleet)
    queue.advance(prefill, math.inf)
    return len(tasks) - queue.late


def _best_moving(
    tasks: Sequence[Task], arrivals_s: Sequence[float], fleet: UniformFleet, interval_s: float
) -> MovingSplit:
    fixed = _best_fixed(tasks, arrivals_s, fleet)
    intervals = max(1, math.ceil(arrivals_s[-1] / interval_s))
    paths = [_Path(SplitQueue(tasks, arrivals_s, fleet), ())]
    for number in range(1, intervals + 1):
        until_s = number * interval_s if number < intervals else math.inf
        paths = [_extend_best(paths, prefill, until_s) for prefill in range(1, fleet.instances)]
    moving = min(paths, key=lambda path: path.queue.late)
    on_time = len(tasks) - moving.queue.late
    if on_time < fixed.on_time:
        return MovingSplit(interval_s, (fixed.prefill,) * intervals, fixed.on_time)
    return MovingSplit(interval_s, moving.prefill, on_time)


class _Path(NamedTuple):
    """A state, and the splits that led to it."""

    queue: SplitQueue
    prefill: tuple[int, ...]


def _extend_best(paths: Sequence[_Path], prefill: int, until_s: float) -> _Path:
    """Run every path on under one split and return the best; with equal ranks the one with fewer flips."""

    def extend(path: _Path) -> tuple[tuple[int, float, int], _Path]:
        queue = path.queue.copy()
        queue.advance(prefill, until_s)
        flips = abs(prefill - path.prefill[-1]) if path.prefill else 0
        return (*queue.rank(prefill), flips), _Path(queue, (*path.prefill, prefill))

    return min(map(extend, paths), key=lambda ranked: ranked[0])[1]
