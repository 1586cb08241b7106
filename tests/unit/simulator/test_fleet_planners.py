"""Planners to compare with: which way they move the split, and that their flips are carried out."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.profiles import load_profile
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import Role, Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.planners import (
    DynamoLikePlanner,
    KnownSplitPlanner,
    NarwhalLikePlanner,
    PlannerView,
    RecentTraffic,
    compute_needs,
)
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import DECODE_HEAVY, PREFILL_HEAVY, MixPeriod, generate_moving

SLO = Slo(1.0, 0.05)


def instance(
    name: str, role: Role, *, queued_s: float = 0.0, tokens: int = 0, itl_s: float = 0.0
) -> InstanceState:
    return InstanceState(
        name=name,
        role=role,
        serving=True,
        prefill_queued_s=queued_s,
        prefill_tokens=0,
        decode_tokens=tokens,
        decode_legs=0,
        legs=0,
        pending_transfers=0,
        itl_s=itl_s,
    )


def view(*, queued_s: float = 0.0, itl_s: float = 0.01, tokens: int = 100, **changes: Any) -> PlannerView:
    """Return four prefill and four decode instances, each with this load."""
    instances = [
        *(instance(f"p{n}", Role.PREFILL, queued_s=queued_s) for n in range(4)),
        *(instance(f"d{n}", Role.DECODE, tokens=tokens, itl_s=itl_s) for n in range(4)),
    ]
    state = RouterState(
        service="s",
        generation=1,
        acknowledged_at_s=0.0,
        at_s=0.0,
        instances=tuple(instances),
        flip_request_role=None,
        flip_request_seq=0,
        prediction_error=None,
        local_prefills=0,
        tiers=(),
    )
    plain = PlannerView(
        now_s=5.0,
        state=state,
        traffic=RecentTraffic(rate_rps=1.0, input_tokens=1000, output_tokens=100),
        prefill_model=PrefillModel(0.0, 1e-4, 0.0),
        decode_model=DecodeModel(0.01, 1e-6),
        kv_capacity_tokens=100_000,
        slo=SLO,
    )
    return replace(plain, **changes)


def test_traffic_needs_instances_of_each_role() -> None:
    # 10 requests/s of 0.1 s prefill; 1,000 tokens/s from batches of 40,000/1,050 at 50 ms a step
    traffic = RecentTraffic(rate_rps=10.0, input_tokens=1000, output_tokens=100)
    assert compute_needs(view(traffic=traffic)) == pytest.approx(
        (1.0, 1000 * 0.05 / (40_000 / 1050)), rel=0.02
    )


def test_dynamo_like_moves_one_instance_by_load_and_many_by_forecast() -> None:
    planner = DynamoLikePlanner()
    assert planner.plan(view())[0] == 4
    assert planner.plan(view(queued_s=2.0))[0] == 5
    assert planner.plan(view(itl_s=0.06))[0] == 3
    assert planner.plan(view(queued_s=2.0, itl_s=0.06))[0] == 4, "both are overloaded"
    assert planner.plan(view(queued_s=2.0, tokens=50_000))[0] == 4, "decode could not spare one"
    prompts = RecentTraffic(rate_rps=50.0, input_tokens=1000, output_tokens=2)
    assert planner.plan(view(now_s=200.0, traffic=prompts))[0] == 7


def test_narwhal_like_moves_to_a_better_neighbour_when_it_is_confirmed() -> None:
    planner = NarwhalLikePlanner()
    late = view(queued_s=2.0)
    assert [planner.plan(late)[0], planner.plan(late)[0]] == [4, 5]
    assert [planner.plan(view(tokens=60_000))[0] for _ in range(2)] == [4, 3]
    assert [planner.plan(view())[0] for _ in range(2)] == [4, 4]


def test_narwhal_like_keeps_the_split_of_a_single_instance() -> None:
    state = view().state
    alone = view(state=state.model_copy(update={"instances": state.instances[:1]}))
    assert NarwhalLikePlanner().plan(alone)[0] == 1


def test_a_known_split_is_that_of_its_interval() -> None:
    planner = KnownSplitPlanner(30.0, (1, 5, 3))
    assert [planner.plan(view(now_s=now_s))[0] for now_s in (0.1, 30.1, 60.1, 300.0)] == [1, 5, 3, 3]
    assert planner.first_prefill == 1


def simulate_moving_load(policy: str) -> dict[str, Any]:
    """Return the report of a policy on phases of long prompts and of long outputs.

    As in the published systems, requests wait in the engines, and decode computes no prompts.
    """
    policy += "+direct+nodeflect"
    periods = (
        MixPeriod(PREFILL_HEAVY.scaled(input=0.4, output=0.1), 13.5, 40.0),
        MixPeriod(DECODE_HEAVY.scaled(input=0.2, output=0.4), 11.7, 40.0),
    )
    load = list(generate_moving(periods=periods, duration_s=80.0, seed=3))
    options = RunOptions(
        profile=load_profile("laptop"), instances=8, policy=parse_policy(policy, instances=8), slo=SLO
    )
    return build_report(simulate(load, options))


@pytest.fixture(scope="module")
def even_split_attainment() -> float:
    """Attainment of the even split that never moves."""
    attainment: float = simulate_moving_load("static:4P4D")["attainment"]
    return attainment


@pytest.mark.parametrize("policy", ["dynamo-like", "narwhal-like", "clairvoyant:5s"])
def test_planned_splits_are_carried_out_and_beat_an_even_split(
    policy: str, even_split_attainment: float
) -> None:
    planned = simulate_moving_load(policy)
    assert planned["policy"].startswith(policy)
    assert planned["flips"]["count"] > 0
    assert planned["attainment"] > even_split_attainment


def test_a_planner_of_the_caller_replaces_that_of_the_policy() -> None:
    mix = MixPeriod(PREFILL_HEAVY.scaled(input=0.4, output=0.1), 5.0, 4.0)
    load = list(generate_moving(periods=(mix,), duration_s=4.0, seed=1))
    policy = parse_policy("clairvoyant", instances=8)
    options = RunOptions(profile=load_profile("laptop"), instances=8, policy=policy, slo=SLO)
    result = simulate(load, options, planner=KnownSplitPlanner(1.0, (2, 4, 6, 3)))
    assert list(result.first_roles.values()).count(Role.PREFILL) == 2
    expected = [(1, "Prefill")] * 2 + [(2, "Prefill")] * 2 + [(3, "Decode")] * 3
    assert [(round(flip.at_s), flip.to) for flip in result.flips[:7]] == expected
