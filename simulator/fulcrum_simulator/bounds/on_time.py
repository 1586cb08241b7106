"""Scheduling on one machine: the largest number of jobs that can end by their deadlines.

Instances are pooled into one machine of their combined speed, which can do whatever they can. So the numbers
found here limit every scheduler of the instances. `prefill_burst` and `decode_burst` turn requests into jobs.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fulcrum_simulator.bounds.busy_period import BusyPeriod

_EPSILON_S = 1e-9
"""Allowance for rounding where a completion is compared with a deadline."""


class Job(NamedTuple):
    """Work that may start at `release_s`, takes `work_s`, and should end by `deadline_s`."""

    release_s: float
    work_s: float
    deadline_s: float


def count_on_time_at_most(jobs: Iterable[Job], *, late_max: int | None = None) -> int:
    """Return the largest number of jobs that one machine can end in time; `jobs` in order of release.

    Deadlines must be agreeable: a job released later is not due earlier. The algorithm of Kise, Ibaraki and
    Mine (1978): insert the jobs in order, and when the newest is late, remove the job of its busy period
    whose removal makes the newest end first. Interrupting jobs would not help, since the first due is also
    the first released. With `late_max`, counting ends once more jobs than that are late.
    """
    busy = BusyPeriod()
    completion_s, on_time, late = -math.inf, 0, 0
    for release_s, work_s, deadline_s in jobs:
        if late_max is not None and late > late_max:
            break
        if release_s + work_s > deadline_s + _EPSILON_S:  # late even alone
            late += 1
            continue
        wait_s = max(0.0, completion_s - release_s)
        if not wait_s:
            busy.clear()
        busy.append(work_s, wait_s)
        completion_s = release_s + wait_s + work_s
        if completion_s <= deadline_s + _EPSILON_S:
            on_time += 1
        else:
            completion_s -= busy.remove_one()
            late += 1
    return on_time


def can_end_all_on_time(jobs: Sequence[Job]) -> bool:
    """Return whether one machine that may interrupt jobs can end all of them in time.

    True exactly if in every interval the jobs that are released and due within it take at most its length
    (the demand-bound function). Decided by running the job that is due first (EDF), in O(n log n).
    """
    due: list[tuple[float, float]] = []
    now_s = -math.inf
    for release_s, work_s, deadline_s in sorted(jobs):
        now_s, in_time = _run_until(due, now_s, release_s)
        if not in_time:
            return False
        heapq.heappush(due, (deadline_s, work_s))
    return _run_until(due, now_s, math.inf)[1]


def _run_until(due: list[tuple[float, float]], now_s: float, until_s: float) -> tuple[float, bool]:
    """Run the jobs from `now_s` to `until_s`, first due first; False if one ended late."""
    while due:
        deadline_s, work_s = due[0]
        if now_s + work_s > until_s:
            heapq.heapreplace(due, (deadline_s, now_s + work_s - until_s))
            return until_s, True
        heapq.heappop(due)
        now_s += work_s
        if now_s > deadline_s + _EPSILON_S:
            return now_s, False
    return until_s, True
