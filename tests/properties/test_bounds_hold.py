"""No simulated policy exceeds a bound: neither in requests with a prompt in time, nor in requests in time.

The simulation and the bounds share the engine profile and nothing else, so each checks the other.
"""

import random

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.bounds import (
    UniformFleet,
    count_decodes_on_time_at_most,
    count_prefills_on_time_at_most,
)
from fulcrum_simulator.fleet.options import ControlOptions, RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import LengthDistribution, TrafficMix, WorkloadRequest, generate_bursty

PROFILE = load_profile("laptop")
INSTANCES = 4
EXACT = ControlOptions(model_error=0.0, step_noise=0.0)


def draw_burst(rng: random.Random, *, rate_rps: float, output: int) -> list[WorkloadRequest]:
    """Draw bursts of requests of about 600 prompt tokens and `output` output tokens."""
    mix = TrafficMix("mix", LengthDistribution(600, 0.6, 4096), LengthDistribution(output, 0.6, 512))
    bursts = generate_bursty(
        rate_rps=rate_rps, duration_s=25, seed=rng.randrange(2**32), mix=mix, compression=10
    )
    return list(bursts)


@pytest.mark.parametrize("policy", ["arrow", "balanced", "static:3P1D", "static:1P3D"])
@pytest.mark.parametrize(("rate_rps", "output"), [(10.0, 4), (25.0, 4), (8.0, 120)])
def test_no_policy_exceeds_a_bound(policy: str, rate_rps: float, output: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        requests = draw_burst(rng, rate_rps=rate_rps, output=output)
        slo = Slo(rng.choice((0.5, 1.0, 2.0)), rng.choice((0.03, 0.06)))
        fleet = UniformFleet(INSTANCES, PROFILE, slo)
        options = RunOptions(
            profile=PROFILE,
            instances=INSTANCES,
            policy=parse_policy(policy, instances=INSTANCES),
            slo=slo,
            control=EXACT,
            unscored_share=0.0,
        )
        records = simulate(requests, options).records
        prompts = sum(
            record.arrow_ttft_s is not None and record.arrow_ttft_s <= slo.ttft_s for record in records
        )
        in_time = sum(record.meets(slo) for record in records)
        in_time_by_arrow = sum(record.meets_by_arrow(slo) for record in records)
        assert prompts <= count_prefills_on_time_at_most(requests, fleet)
        assert max(in_time, in_time_by_arrow) <= count_decodes_on_time_at_most(requests, fleet)
