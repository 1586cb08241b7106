"""B3: the largest number of prompts that any scheduler can compute within the TTFT SLO. Decode is ignored.

`on_time` solves the problem of scheduling; `fulcrum bounds` prints the highest rate.
"""

from collections.abc import Sequence

from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.bounds.on_time import Job, count_on_time_at_most
from fulcrum_simulator.bounds.rates import count_required, find_highest_rate
from fulcrum_simulator.workload.requests import WorkloadRequest


def count_prefills_on_time_at_most(requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> int:
    """Return the most requests that can have their first token within the TTFT SLO.

    The instances are one machine that computes N prompts' work at once; a prompt takes (b·n + c·n²)/N and is
    due S_T after its arrival. Deadlines keep the order of arrival, so the maximum is exact for that machine.
    """
    work_s = _pooled_work_s(requests, fleet)
    return count_on_time_at_most(_jobs([request.arrival_s for request in requests], work_s, fleet.slo.ttft_s))


def find_prefill_burst_rate(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float
) -> float:
    """Return B3, the burst bound, in requests/s: above it no scheduler reaches that TTFT attainment."""
    late_max = len(requests) - count_required(len(requests), attainment)
    required = len(requests) - late_max
    work_s = _pooled_work_s(requests, fleet)
    return find_highest_rate(
        requests,
        lambda arrivals_s: (
            count_on_time_at_most(_jobs(arrivals_s, work_s, fleet.slo.ttft_s), late_max=late_max) >= required
        ),
    )


def _pooled_work_s(requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> list[float]:
    return [fleet.prefill_work_s(request) / fleet.instances for request in requests]


def _jobs(arrivals_s: Sequence[float], work_s: Sequence[float], ttft_s: float) -> list[Job]:
    return [
        Job(arrival_s, each_s, arrival_s + ttft_s)
        for arrival_s, each_s in zip(arrivals_s, work_s, strict=True)
    ]
