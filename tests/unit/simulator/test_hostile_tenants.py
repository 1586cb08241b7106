"""A tenant that sends far too much, of the same tier as another one: the other one does not pay for it."""

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest

SLO = Slo(ttft_s=3.0, tpot_s=0.1)
GOOD = [WorkloadRequest(0.5 + n, 1_500, 20, tenant="acme") for n in range(20)]
OPTIONS = RunOptions(
    profile=load_profile("l70-h100-tp4"),
    instances=4,
    policy=parse_policy("static:2P2D+enforce", instances=4),
    slo=SLO,
    drain_s=30.0,
)


def send(tokens: int, output: int, *, rate_rps: float, names: int = 1) -> list[WorkloadRequest]:
    """For 20 s, at most 20,000 requests; with several names a request has the next one."""
    count = min(20_000, int(20 * rate_rps))
    return [WorkloadRequest(n / rate_rps, tokens, output, tenant=f"mallory{n % names}") for n in range(count)]


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(send(32, 2, rate_rps=500.0), id="many short prompts"),
        pytest.param(send(32, 2, rate_rps=10_000.0), id="10,000 short prompts a second"),
        pytest.param(send(32, 2, rate_rps=250.0, names=10_000), id="a new name for each short prompt"),
        pytest.param(send(100_000, 2, rate_rps=1.0), id="prompts of 100,000 tokens"),
        pytest.param(send(6_000, 20, rate_rps=20.0), id="four times the capacity"),
        pytest.param(send(200, 3_000, rate_rps=10.0), id="endless answers"),
    ],
)
def test_a_tenant_that_sends_far_too_much_takes_nothing_from_another(hostile: list[WorkloadRequest]) -> None:
    workload = sorted([*GOOD, *hostile], key=lambda request: request.arrival_s)
    records = simulate(workload, OPTIONS).records
    good = [record for record in records if record.request.tenant == "acme"]
    assert [record for record in good if not record.meets(SLO)] == []
    others = [record for record in records if record.request.tenant != "acme"]
    assert any(record.outcome is not Outcome.REFUSED for record in others)
