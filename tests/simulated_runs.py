"""Short simulated runs, for tests of what is shown of them: the live page's states, and the plot."""

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import RunResult, simulate
from fulcrum_simulator.workload import WorkloadRequest

PROFILE = load_profile("l70-h100-tp4")


def run_equal_requests(
    policy: str, *, tiers: tuple[str, ...] = ("",), rate_rps: float = 4.0, tokens: int = 4_000
) -> RunResult:
    """Sixty seconds of equal requests on four instances."""
    workload = [
        WorkloadRequest(number / rate_rps, tokens, 200, tier=tiers[number % len(tiers)])
        for number in range(int(60 * rate_rps))
    ]
    options = RunOptions(
        profile=PROFILE, instances=4, policy=parse_policy(policy, instances=4), slo=Slo(3.0, 0.1), seed=1
    )
    return simulate(workload, options)
