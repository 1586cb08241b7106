"""B5: the rate that k parallel prefill instances reach if they serve prompts first come, first served.

A reference, not a bound: another order can do better. Decode is ignored. `fulcrum bounds` prints it.
"""

import heapq
from collections.abc import Sequence

from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.bounds.rates import count_required, find_highest_rate
from fulcrum_simulator.workload.requests import WorkloadRequest


def count_fcfs_on_time(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, refuse_late: bool = False
) -> int:
    """Return how many requests have their first token within the TTFT SLO.

    Each prompt runs alone, on the instance that is free first. With `refuse_late`, a prompt that would end
    late is refused at its arrival and takes no time; it counts as late.
    """
    prefills_s = [fleet.prefill_alone_s(request) for request in requests]
    return _count_on_time([request.arrival_s for request in requests], prefills_s, fleet, refuse_late)


def find_fcfs_rate(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float, refuse_late: bool = False
) -> float:
    """Return B5, in requests/s: the highest rate at which the queue reaches that TTFT attainment."""
    required = count_required(len(requests), attainment)
    prefills_s = [fleet.prefill_alone_s(request) for request in requests]
    return find_highest_rate(
        requests,
        lambda arrivals_s: _count_on_time(arrivals_s, prefills_s, fleet, refuse_late) >= required,
    )


def _count_on_time(
    arrivals_s: Sequence[float], prefills_s: Sequence[float], fleet: UniformFleet, refuse_late: bool
) -> int:
    free_s = [0.0] * fleet.instances
    on_time = 0
    for arrival_s, prefill_s in zip(arrivals_s, prefills_s, strict=True):
        end_s = max(arrival_s, free_s[0]) + prefill_s
        late = end_s - arrival_s > fleet.slo.ttft_s
        if not (late and refuse_late):
            heapq.heapreplace(free_s, end_s)
        on_time += not late
    return on_time
