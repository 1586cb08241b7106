"""Tiers in a simulated service: the shipped order of the waiting room keeps the highest tier's promise."""

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import WorkloadRequest


def flooded_workload() -> list[WorkloadRequest]:
    """A premium prompt every 5 s, and from 20 s on more free ones than one instance can compute."""
    premium = [
        WorkloadRequest(1.0 + 5 * n, 2_000, 20, tenant="acme", tier="premium", priority=10) for n in range(12)
    ]
    flood = [
        WorkloadRequest(20.0 + n / 10, 4_000, 20, tenant="flood", tier="free", priority=-10)
        for n in range(400)
    ]
    return sorted([*premium, *flood], key=lambda request: request.arrival_s)


@pytest.mark.parametrize(
    ("policy", "keeps"), [("static:1P1D+nodeflect", True), ("static:1P1D+direct+nodeflect", False)]
)
def test_premium_keeps_its_attainment_in_a_flood_of_free_requests_only_if_requests_wait_in_the_router(
    policy: str, keeps: bool
) -> None:
    options = RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=2,
        policy=parse_policy(policy, instances=2),
        slo=Slo(ttft_s=3.0, tpot_s=0.1),
        drain_s=30.0,
    )
    tiers = build_report(simulate(flooded_workload(), options))["tiers"]
    assert (tiers["premium"]["attainment"] >= 0.98, tiers["free"]["attainment"] < 0.9) == (keeps, True)


def test_only_sheddable_tiers_are_refused() -> None:
    options = RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=2,
        policy=parse_policy("static:1P1D+enforce", instances=2),
        slo=Slo(ttft_s=3.0, tpot_s=0.1),
        drain_s=30.0,
        unsheddable_tiers=frozenset({"premium"}),
    )
    tiers = build_report(simulate(flooded_workload(), options))["tiers"]
    assert (tiers["premium"]["refused"], tiers["free"]["refused"] > 0) == (0, True)
