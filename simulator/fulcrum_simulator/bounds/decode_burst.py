"""B4: an upper limit of the requests whose output tokens a scheduler can produce within both SLOs.

Only decode work is counted: the steps that a request decodes in, with the least share of their fixed duration
that the SLO, the KV cache and the batch size allow. Prefill is ignored. `fulcrum bounds` prints it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.bounds.on_time import Job, can_end_all_on_time, count_on_time_at_most
from fulcrum_simulator.bounds.rates import count_required, find_highest_rate
from fulcrum_simulator.workload.requests import WorkloadRequest


def count_decodes_on_time_at_most(requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> int:
    """Return an upper limit of the requests that can end by a + S_T + (m-1)·S_D.

    It is the number of all requests exactly if they all can: if in every interval the work of the requests
    that arrive and are due within it fits (the demand-bound function of preemptive scheduling). Otherwise two
    easier problems are solved, and the lower number counts: each deadline is moved back to the latest one of
    an earlier arrival, or each arrival forward to the earliest one of a later deadline.
    """
    return len(requests) - _count_late_at_least(
        _Decodes(requests, fleet), [request.arrival_s for request in requests], len(requests)
    )


def find_decode_burst_rate(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float
) -> float:
    """Return B4, in requests/s: above it no scheduler ends that share of the requests in time."""
    late_max = len(requests) - count_required(len(requests), attainment)
    decodes = _Decodes(requests, fleet)
    return find_highest_rate(
        requests, lambda arrivals_s: _count_late_at_least(decodes, arrivals_s, late_max) <= late_max
    )


class _Decodes:
    """Demands and permitted durations of a workload's decodes, which do not depend on the arrival times."""

    def __init__(self, requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> None:
        demands_s = [fleet.decode_demands_s(request) for request in requests]
        self.pooled_s = [[each / fleet.instances for each in limit] for limit in zip(*demands_s, strict=True)]
        self.permitted_s = [
            fleet.slo.ttft_s + (request.output_tokens - 1) * fleet.slo.tpot_s for request in requests
        ]

    def jobs_by_limit(self, arrivals_s: Sequence[float]) -> Iterator[list[Job]]:
        """Yield the jobs of the requests that decode, once for each limit of a step."""
        for pooled_s in self.pooled_s:
            yield [
                Job(arrival_s, work_s, arrival_s + permitted_s)
                for arrival_s, work_s, permitted_s in zip(arrivals_s, pooled_s, self.permitted_s, strict=True)
                if work_s > 0
            ]


def _count_late_at_least(decodes: _Decodes, arrivals_s: Sequence[float], late_max: int) -> int:
    """Return a lower limit of the late requests, or some number above `late_max` if they are more."""
    late = 0
    for jobs in decodes.jobs_by_limit(arrivals_s):
        late = max(late, _count_late(jobs, late_max))
        if late > late_max:
            break
    return late


def _count_late(jobs: Sequence[Job], late_max: int) -> int:
    if can_end_all_on_time(jobs):
        return 0
    late = 1
    for relax in (_with_later_deadlines, _with_earlier_releases):
        late = max(late, len(jobs) - count_on_time_at_most(relax(jobs), late_max=late_max))
        if late > late_max:
            break
    return late


def _with_later_deadlines(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs in order of release, none due before a job released earlier."""
    ordered = sorted(jobs)
    deadlines_s = accumulate((job.deadline_s for job in ordered), max)
    return [job._replace(deadline_s=due_s) for job, due_s in zip(ordered, deadlines_s, strict=True)]


def _with_earlier_releases(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs in order of deadline, none released after a job that is due later."""
    latest_first = sorted(jobs, key=lambda job: job.deadline_s, reverse=True)
    releases_s = accumulate((job.release_s for job in latest_first), min)
    relaxed = [
        job._replace(release_s=release_s) for job, release_s in zip(latest_first, releases_s, strict=True)
    ]
    return relaxed[::-1]
