"""The service that a live bench starts: as the options of the simulated run say."""

from pathlib import Path

import pytest

from bench.live_fleet import NO_TIER, build_objects
from fulcrum_core.api import PDService, QoSTier, parse_object
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import AdmissionMode, AutoscalingMode, DispatchMode, OverloadAction, Slo
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.workload import WorkloadRequest

SLO = Slo(ttft_s=3.0, tpot_s=0.1)
LOAD = (
    WorkloadRequest(0.0, 100, 10),
    WorkloadRequest(0.1, 100, 10, tenant="acme", tier="premium", priority=10),
)


def build(policy: str) -> tuple[PDService, dict[str, QoSTier]]:
    options = RunOptions(
        profile=load_profile("laptop"),
        instances=4,
        policy=parse_policy(policy, instances=4),
        slo=SLO,
        weights={"premium": 3},
        reserved={"premium": Reserve(0.5, 10.0)},
    )
    objects = [parse_object(one) for one in build_objects(LOAD, options, Path("profile.yaml"))]
    service = next(one for one in objects if isinstance(one, PDService))
    return service, {one.metadata.name: one for one in objects if isinstance(one, QoSTier)}


@pytest.mark.parametrize(
    ("policy", "mode", "admission", "dispatch", "is_aware"),
    [
        ("static:1P3D", AutoscalingMode.OFF, AdmissionMode.OFF, DispatchMode.QUEUE, False),
        ("balanced+enforce", AutoscalingMode.AUTO, AdmissionMode.ENFORCE, DispatchMode.QUEUE, False),
        ("arrow+direct+prefix", AutoscalingMode.AUTO, AdmissionMode.OFF, DispatchMode.DIRECT, True),
    ],
)
def test_the_service_has_the_policy(
    policy: str, mode: AutoscalingMode, admission: AdmissionMode, dispatch: DispatchMode, is_aware: bool
) -> None:
    spec = build(policy)[0].spec
    found = spec.router.dispatch
    assert (spec.autoscaling.mode, spec.router.admission) == (mode, admission)
    assert (found.mode, found.prefix_aware, spec.slo.to_slo()) == (dispatch, is_aware, SLO)


def test_the_tiers_are_those_of_the_load() -> None:
    service, tiers = build("static:1P3D+degrade:128")
    assert set(service.spec.qos_tiers) == set(tiers) == {NO_TIER, "premium"}
    premium = tiers["premium"].spec
    assert (premium.priority, premium.weight) == (10, 3)
    assert (premium.reserved_fraction, premium.reclaim_within) == (0.5, 10.0)
    limits = {tier.spec.admission.max_output_tokens for tier in tiers.values()}
    assert ({tier.spec.admission.mode for tier in tiers.values()}, limits) == (
        {OverloadAction.DEGRADE},
        {128},
    )


def test_a_policy_that_only_a_simulation_has_does_not_run_live() -> None:
    with pytest.raises(SystemExit, match="does not run live"):
        build("colocated")
