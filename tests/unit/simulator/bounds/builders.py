"""Small workloads and fleets whose bounds can be computed by hand."""

import random

from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.bounds import UniformFleet
from fulcrum_simulator.workload import WorkloadRequest


def round_profile(**changes: float) -> EngineProfile:
    """Return a profile with round coefficients: 1 ms a prompt token, steps of 10 ms and 1 ms a request."""
    coefficients = {"t0": 0.01, "b": 0.001, "c": 0.0, "d1": 0.001, "d2": 1e-9, **changes}
    return load_profile("laptop").model_copy(update=coefficients)


def make_fleet(
    instances: int = 1, *, ttft_s: float = 1.0, tpot_s: float = 0.1, **changes: float
) -> UniformFleet:
    """Return instances of the round profile."""
    return UniformFleet(instances, round_profile(**changes), Slo(ttft_s, tpot_s))


def make_requests(*lengths: tuple[float, int, int]) -> list[WorkloadRequest]:
    """Return requests from (arrival, input tokens, output tokens)."""
    return [WorkloadRequest(*each) for each in lengths]


def draw_requests(
    rng: random.Random, count: int, *, gap_s: float, input_max: int = 1500, output_max: int = 1
) -> list[WorkloadRequest]:
    """Draw a small workload with exponential gaps and uniform lengths."""
    requests, at_s = [], 0.0
    for _ in range(count):
        requests.append(WorkloadRequest(at_s, rng.randint(1, input_max), rng.randint(1, output_max)))
        at_s += rng.expovariate(1 / gap_s)
    return requests
