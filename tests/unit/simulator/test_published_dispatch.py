"""Dispatch of published systems in the simulator: round robin, and xLLM's choices and flips."""

import random
from collections import Counter

import pytest

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role, Slo
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_simulator.fleet.event_queue import EventQueue
from fulcrum_simulator.fleet.instance import InstanceOptions, SimulatedInstance
from fulcrum_simulator.fleet.options import ControlOptions, RunOptions, parse_policy
from fulcrum_simulator.fleet.published_dispatch import Xllm
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.routed_instance import RoutedFleet, RoutedInstance
from fulcrum_simulator.fleet.run import RunResult, simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest

PROFILE, SLO = load_profile("laptop"), Slo(1.0, 0.05)
EXACT = ControlOptions(model_error=0.0, step_noise=0.0)


def run(load: list[WorkloadRequest], policy: str, control: ControlOptions = EXACT) -> RunResult:
    options = RunOptions(
        profile=PROFILE, instances=4, policy=parse_policy(policy, instances=4), slo=SLO, control=control
    )
    return simulate(load, options)


def send_evenly(count: int, *, every_s: float, prompt: int, answer: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(number * every_s, prompt, answer) for number in range(count)]


def build_fleet(prefill: int, decode: int) -> tuple[RoutedFleet, list[LearningInstance]]:
    """Build idle instances p0, p1, … and d0, d1, … whose models are exact."""
    step, events = PROFILE.step_model, EventQueue()
    options = InstanceOptions(profile=PROFILE, step_noise=0.0, lookahead_steps=1)
    roles = {f"p{n}": Role.PREFILL for n in range(prefill)} | {f"d{n}": Role.DECODE for n in range(decode)}
    routed = [
        RoutedInstance(
            SimulatedInstance(name, options, events, {}, random.Random(1)),
            role,
            step.prefill_model(PROFILE.token_budget),
            step.decode_model(1000),
        )
        for name, role in roles.items()
    ]
    fleet = RoutedFleet(routed)
    return fleet, list(fleet.records)


def fill_decode(instance: LearningInstance, itl_s: float) -> None:
    """Give the instance decode work with which a request more takes `itl_s` for a step."""
    instance.ledger.add_decode(tokens=int(instance.decode_model.max_tokens(itl_s)))


def fill_prefill(instance: LearningInstance, seconds: float) -> None:
    instance.ledger.add_prefill(tokens=1000, predicted_s=seconds, now_s=0.0)


def test_round_robin_takes_the_instances_of_each_role_in_turn() -> None:
    result = run(send_evenly(6, every_s=0.01, prompt=200, answer=8), "round-robin:1P3D")
    assert [(r.prefill, r.decode) for r in result.records] == [("i0", f"i{1 + n % 3}") for n in range(6)]
    assert {r.outcome for r in result.records} == {Outcome.OK}


def test_a_lone_request_takes_as_long_as_with_the_shipped_dispatch() -> None:
    load = send_evenly(1, every_s=1.0, prompt=600, answer=5)
    times = [
        (record.ttft_s, record.tpot_s)
        for policy in ("static:2P2D", "round-robin:2P2D", "xllm:2P2D")
        for record in run(load, policy).records
    ]
    assert times[0] == pytest.approx(times[1])
    assert times[0] == pytest.approx(times[2])


def test_xllm_takes_the_prefill_instance_with_the_least_queue_and_the_first_fast_decode_instance() -> None:
    fleet, (p0, p1, d0, d1) = build_fleet(2, 2)
    fill_prefill(p0, 0.2)
    fill_decode(d0, 0.04)
    assert Xllm(fleet).choose(100, SLO, 0.0) == (p1, d0)
    fill_decode(d0, 0.06)
    assert Xllm(fleet).choose(100, SLO, 0.0) == (p1, d1)


def test_xllm_gives_a_prompt_to_the_fastest_decode_instance_when_prefill_is_late() -> None:
    fleet, (p0, d0, d1) = build_fleet(1, 2)
    fill_decode(d0, 0.03)
    fill_prefill(p0, 0.9)
    assert Xllm(fleet).choose(100, SLO, 0.0) == (p0, d0)
    fill_prefill(p0, 0.9)
    dispatch = Xllm(fleet)
    assert dispatch.choose(100, SLO, 0.0) == (d1, d0)
    assert d1.role is Role.DECODE
    assert not dispatch.flips
    fill_prefill(d1, 5.0)
    assert Xllm(fleet).choose(100, SLO, 0.0) == (p0, d0)


def test_xllm_flips_the_prefill_instance_that_it_chose_while_no_decode_instance_is_fast_enough() -> None:
    fleet, (p0, p1, d0) = build_fleet(2, 1)
    fill_decode(d0, 0.1)
    dispatch = Xllm(fleet)
    assert dispatch.choose(100, SLO, 5.0) == (p0, d0)
    assert [(flip.instance, flip.to, flip.split, flip.at_s) for flip in dispatch.flips] == [
        ("p0", "Decode", "2P1D", 5.0)
    ]
    assert [record.name for record in fleet.candidates.decode] == ["p0", "d0"]
    fill_decode(p0, 0.08)
    assert dispatch.choose(100, SLO, 6.0) == (p1, p0)
    assert len(dispatch.flips) == 1


def test_xllm_flips_a_decode_instance_back_when_its_last_request_has_ended() -> None:
    fleet, (_, d0, d1) = build_fleet(1, 2)
    dispatch = Xllm(fleet)
    entry = d0.ledger.add_decode(tokens=100)
    dispatch.request_ended(d0, 1.0)
    assert not dispatch.flips
    entry.release()
    dispatch.request_ended(d0, 2.0)
    assert [(flip.instance, flip.to) for flip in dispatch.flips] == [("d0", "Prefill")]
    dispatch.request_ended(d1, 3.0)
    assert d1.role is Role.DECODE
    assert dispatch.refused == 1


def test_xllm_counts_answers_from_the_arrival_of_their_requests() -> None:
    """Four requests at once, each with more than half of what one decode instance can decode in time."""
    tokens = int(0.6 * PROFILE.step_model.decode_model(1000).max_tokens(SLO.tpot_s))
    result = run([WorkloadRequest(number / 1000, tokens, 8) for number in range(4)], "xllm:1P3D")
    assert len({record.decode for record in result.records}) >= 3


def test_xllm_flips_no_instance_with_requests_on_their_way_nor_one_that_does_not_serve() -> None:
    fleet, (_, d0, d1) = build_fleet(1, 2)
    dispatch = Xllm(fleet)
    reservation = d0.ledger.reserve(tokens=100)
    dispatch.request_ended(d0, 1.0)
    assert not dispatch.flips
    reservation.release()
    d0.serving = False
    fleet.refresh()
    dispatch.request_ended(d0, 2.0)
    assert not dispatch.flips
    dispatch.request_ended(d1, 3.0)
    assert not dispatch.flips, "it is the last one that serves"


@pytest.mark.parametrize("policy", ["round-robin:2P2D", "xllm"])
def test_every_request_ends_once_while_engines_fail(policy: str) -> None:
    load = send_evenly(400, every_s=0.1, prompt=800, answer=40)
    result = run(load, policy, ControlOptions(failures_per_hour=100.0))
    outcomes = Counter(record.outcome for record in result.records)
    assert result.engine_failures > 1
    assert sum(outcomes.values()) == len(load)
    assert None not in outcomes
    assert outcomes[Outcome.OK] > 0.4 * len(load)


def test_xllm_flips_both_ways_when_the_mix_moves() -> None:
    prompts = send_evenly(50, every_s=0.4, prompt=1500, answer=4)
    answers = [
        WorkloadRequest(20.0 + one.arrival_s, 100, 400)
        for one in send_evenly(300, every_s=0.05, prompt=100, answer=400)
    ]
    report = build_report(run([*prompts, *answers], "xllm"))
    assert report["flips"]["to_prefill"] > 0
    assert report["flips"]["to_decode"] > 0
