"""B1 and B2: the highest rate at which the work of a workload fits the instances, whatever the arrival times.

No burst is considered: a workload that arrives in bursts is limited by `prefill_burst`, too. `fulcrum bounds`
prints both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.bounds.rates import count_required
from fulcrum_simulator.workload.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class MeanWork:
    """Seconds of one instance that a request of the workload needs on average, at least."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Prefill and decode together."""
        return self.prefill_s + self.decode_s

    @property
    def prefill_share(self) -> float:
        """Share of the work that is prefill, 0 to 1."""
        return self.prefill_s / self.total_s


def compute_mean_work(requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> MeanWork:
    """Return W_P and W_D of bound B1.

    W_P = E[b·n + c·n²]
    W_D = E[(m-1)·µ] + t0·max(E[(m-1)·µ]/(S_D - t0), E[(m-1)·L]/KV capacity, E[m-1]/max_seqs)
    with µ = d1 + d2·L and L = n + m/2. The maximum is one of means: a maximum per request is no bound.
    """
    demands_s = [fleet.decode_demands_s(request) for request in requests]
    return MeanWork(
        prefill_s=sum(map(fleet.prefill_work_s, requests)) / len(requests),
        decode_s=max(map(sum, zip(*demands_s, strict=True))) / len(requests),
    )


def compute_fluid_rate(requests: Sequence[WorkloadRequest], fleet: UniformFleet) -> float:
    """Return B1, the fluid work bound, in requests/s: λ = N/(W_P + W_D).

    No scheduler that serves all requests, with steps of at most the TPOT SLO on average, goes above it in the
    long run. 0 if the SLO is shorter than an empty step and a request decodes.
    """
    return fleet.instances / compute_mean_work(requests, fleet).total_s


def compute_metric_rate(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float
) -> float:
    """Return B2, the metric bound, in requests/s: B1 for a scheduler that drops the heaviest requests.

    A share `attainment` of the offered requests must be on time, and the lightest are served. Each of the
    three limits of a decode step gives an own order by weight and an own bound; the lowest holds.
    """
    required = count_required(len(requests), attainment)
    prefills_s = [fleet.prefill_work_s(request) for request in requests]
    demands_s = zip(*(fleet.decode_demands_s(request) for request in requests), strict=True)
    lightest_s = max(
        math.fsum(sorted(map(float.__add__, prefills_s, decodes_s))[:required]) for decodes_s in demands_s
    )
    return fleet.instances * len(requests) / lightest_s
