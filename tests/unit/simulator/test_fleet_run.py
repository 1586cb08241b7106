"""A simulated fleet: every request ends, the seed decides everything, control acts with the set delays."""

import gc
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_cli.simulation.report_text import format_report
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_router.policy.journey import Journey
from fulcrum_simulator.fleet.load import RecordedLoad
from fulcrum_simulator.fleet.options import ControlOptions, Policy, PolicyName, RunOptions, parse_policy
from fulcrum_simulator.fleet.policy_runs import pick_best, run_policy
from fulcrum_simulator.fleet.report import build_report
from fulcrum_simulator.fleet.run import RunResult, simulate
from fulcrum_simulator.routing import Outcome, SimulatedRequest
from fulcrum_simulator.workload import (
    DECODE_HEAVY,
    PREFILL_HEAVY,
    MixPeriod,
    WorkloadRequest,
    generate_moving,
)

SLO = Slo(1.0, 0.05)
SMALL_CACHE = load_profile("laptop").model_copy(update={"kv_capacity_tokens": 4_096})
EXACT = ControlOptions(model_error=0.0, step_noise=0.0)


def options(policy: str = "arrow", **changes: Any) -> RunOptions:
    return replace(
        RunOptions(
            profile=load_profile("laptop"), instances=8, policy=parse_policy(policy, instances=8), slo=SLO
        ),
        **changes,
    )


def moving_load(
    duration_s: float = 60.0, *, factor: float = 1.0, period_s: float = 12.0
) -> list[WorkloadRequest]:
    """Return long prompts and long outputs in turns, each too much for half of the instances."""
    periods = (
        MixPeriod(PREFILL_HEAVY.scaled(input=0.4, output=0.1), 15 * factor, period_s),
        MixPeriod(DECODE_HEAVY.scaled(input=0.2, output=0.4), 13 * factor, period_s),
    )
    return list(generate_moving(periods=periods, duration_s=duration_s, seed=3))


def count_outcomes(result: RunResult) -> dict[str, int]:
    return dict(Counter(r.outcome.value if r.outcome else "unfinished" for r in result.records))


def test_a_run_ends_when_the_attainment_cannot_be_reached_any_more() -> None:
    load = moving_load(10.0, factor=4.0)
    whole, lost = simulate(load, options()), simulate(load, options(), attainment_min=0.9)
    ended = [(whole.records[n], r) for n, r in enumerate(lost.records) if r.last_token_s is not None]
    assert all(w.last_token_s == r.last_token_s for w, r in ended)
    assert lost.end_s < whole.end_s
    assert build_report(lost)["attainment"] < 0.9


def test_a_lone_request_takes_the_time_of_its_stages() -> None:
    profile = load_profile("laptop")
    control = replace(EXACT, hop_s=0.001)
    result = simulate([WorkloadRequest(0.0, 600, 3)], options("static:4P4D", control=control))
    model = profile.step_model
    prefill_s = model.step_s([(0, 512)], []) + model.step_s([(512, 88)], [])
    blocks = -(-600 // profile.block_size)
    transfer_s = (
        profile.link_setup_s
        + blocks * profile.block_size * profile.kv_bytes_per_token / profile.link_bytes_per_s
    )
    decode_s = [model.step_s([], [600 + n]) for n in range(3)]
    (record,) = result.records
    assert (record.outcome, record.prefill, record.decode) == (Outcome.OK, "i0", "i4")
    assert record.arrow_ttft_s == pytest.approx(prefill_s + 2 * 0.001)
    assert record.ttft_s == pytest.approx(prefill_s + transfer_s + decode_s[0] + 4 * 0.001)
    assert record.tpot_s == pytest.approx((decode_s[1] + decode_s[2]) / 2)


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("arrow", {}),
        ("balanced", {}),
        ("arrow", {"control": ControlOptions(failures_per_hour=100.0)}),
        ("arrow", {"profile": SMALL_CACHE}),
        ("arrow+direct+nodeflect", {}),
        ("colocated", {"profile": SMALL_CACHE}),
        ("xllm", {}),
    ],
    ids=[
        "arrow",
        "balanced",
        "engines that fail",
        "a small KV cache",
        "direct",
        "colocated with a small KV cache",
        "xllm",
    ],
)
def test_executing_each_step_gives_the_same_run(policy: str, changes: dict[str, Any]) -> None:
    assert_skipping_changes_nothing(moving_load(12, period_s=6.0), policy, **changes)


def test_executing_each_step_gives_the_same_run_while_answers_that_end_let_others_go() -> None:
    assert_skipping_changes_nothing(moving_load(20, factor=2.0, period_s=10.0), "balanced")


def assert_skipping_changes_nothing(load: list[WorkloadRequest], policy: str, **changes: Any) -> None:
    skipping = build_report(simulate(load, options(policy, **changes)))
    each = build_report(simulate(load, options(policy, lookahead_steps=1, **changes)))
    for report in (skipping, each):
        del report["events"], report["instance_time"]  # fewer events, and sums in another order
    assert skipping == each


def test_the_same_seed_gives_the_same_report_and_another_one_does_not() -> None:
    load = moving_load(12)
    first, second, other = (build_report(simulate(load, options(seed=seed))) for seed in (1, 1, 2))
    assert json.dumps(first) == json.dumps(second)
    assert first["ttft_s"] != other["ttft_s"]


def test_arrow_flips_both_ways_on_a_moving_load_and_beats_the_even_split() -> None:
    load = moving_load(50, factor=0.9, period_s=25.0)
    arrow, static = (build_report(simulate(load, options(policy))) for policy in ("arrow", "static:4P4D"))
    assert arrow["flips"]["to_prefill"] > 0
    assert arrow["flips"]["to_decode"] > 0
    assert arrow["attainment"] > static["attainment"] + 0.1
    assert static["flips"]["count"] == 0


def test_with_queue_requests_wait_in_the_router_instead_of_the_engines() -> None:
    load = moving_load(12, factor=1.5)
    direct, queue = (
        build_report(simulate(load, options(policy)))["request_time_s"]
        for policy in ("static:4P4D+direct", "static:4P4D")
    )
    assert direct["dispatch"] == 0.0
    assert direct["prefill_queue"] > 1.0
    assert queue["dispatch"] > queue["prefill_queue"]


def test_a_cold_flip_takes_the_instance_out_of_service() -> None:
    samples = simulate(moving_load(20), options("cold:5s")).samples
    serving = [sample.prefill_instances + sample.decode_instances for sample in samples]
    warm = simulate(moving_load(20), options("arrow")).samples
    assert (min(serving) < 8, max(serving)) == (True, 8)
    assert {sample.prefill_instances + sample.decode_instances for sample in warm} == {8}


def test_colocated_instances_transfer_no_kv_and_keep_to_their_budget() -> None:
    result = simulate(moving_load(15), options("colocated:256"))
    assert {record.prefill for record in result.records} == {""}
    assert count_outcomes(result) == {"ok": len(result.records)}
    longer = simulate(moving_load(15), options("colocated"))
    tpot_s = [build_report(each)["tpot_s"]["p99"] for each in (result, longer)]
    assert tpot_s[0] < tpot_s[1]


def test_no_flip_is_decided_on_state_older_than_three_ticks() -> None:
    control = ControlOptions(state_age_s=4.0)
    result = simulate(moving_load(20), options(control=control))
    assert (result.flips, result.flip_requests > 0) == ((), True)


def test_every_request_ends_once_while_engines_fail() -> None:
    control = ControlOptions(failures_per_hour=100.0)
    load = moving_load(40)
    result = simulate(load, options(control=control))
    outcomes = count_outcomes(result)
    assert result.engine_failures > 5
    assert sum(outcomes.values()) == len(load)
    assert outcomes["ok"] > 0.8 * len(result.records)
    assert "unfinished" not in outcomes


def test_a_run_that_meets_its_goal_exactly_is_not_lost() -> None:
    load = [WorkloadRequest(10.0 * n, 12_000 if n % 10 == 0 else 100, 2) for n in range(100)]
    result = simulate(load, options("static:1P7D+nodeflect", unscored_share=0.0), attainment_min=0.9)
    assert build_report(result)["attainment"] == 0.9


def test_a_failed_engine_starts_as_fast_as_its_own_hardware() -> None:
    slow = load_profile("laptop").model_copy(update={"name": "slow", "startup_s": 10_000.0})
    load = [WorkloadRequest(float(second), 100, 2) for second in range(200)]
    control = ControlOptions(failures_per_hour=100.0)
    one, all_slow = (
        simulate(load, options(control=control, other_profiles=dict.fromkeys(numbers, slow)))
        for numbers in ((0,), range(8))
    )
    assert one.engine_failures > all_slow.engine_failures
    assert all_slow.engine_failures <= 8, "each fails once and does not come back"


def test_times_of_requests_and_engines_add_up_although_engines_fail() -> None:
    control = ControlOptions(failures_per_hour=200.0)
    result = simulate(moving_load(60, factor=0.5), options("static:4P4D+nodeflect", control=control))
    report = build_report(result)
    ends_s = [(r.prefill_end_s, r.first_token_s) for r in result.records if r.prefill_end_s is not None]
    assert all(first_s is None or prefill_s <= first_s for prefill_s, first_s in ends_s)
    assert report["instance_time"]["restarting"] > 0.01
    assert sum(report["instance_time"].values()) == pytest.approx(1.0)
    assert min(report["request_time_s"].values()) >= 0.0


def test_a_step_that_outlasts_the_run_counts_until_its_end() -> None:
    load = [WorkloadRequest(0.0, 100, 2), WorkloadRequest(1.0, 4_000, 2)]
    report = build_report(simulate(load, options("colocated", instances=1, drain_s=0.05)))
    assert report["requests"]["unfinished"] == 1
    assert report["instance_time"]["prefill"] < 0.3
    assert sum(report["instance_time"].values()) == pytest.approx(1.0)


def test_requests_without_a_prefill_leg_are_reported_apart() -> None:
    report = build_report(
        simulate([WorkloadRequest(0.0, 100, 20)] * 3, options("colocated", unscored_share=0.0))
    )
    assert report["requests"]["without_prefill_leg"] == report["requests"]["ok"] == 3
    assert report["request_time_s"]["prefill"] is None
    assert report["request_time_without_prefill_leg_s"]["decode"] > 0


def test_of_equal_policies_that_with_the_shorter_ttft_is_best() -> None:
    load = RecordedLoad("few", [WorkloadRequest(float(second), 500, 20) for second in range(700)])
    runs = [run_policy(load, options(f"static:{p}P{8 - p}D"), [1]) for p in (1, 4)]
    assert {each.runs[0].attainment for each in runs} == {1.0}
    assert pick_best(runs) is min(runs, key=lambda each: each.runs[0].ttft_p90_s)


def test_requests_leave_nothing_to_the_garbage_collector() -> None:
    """It is off during a run, and a long one has millions of them."""
    gc.collect()
    gc.disable()
    try:
        simulate(moving_load(40), options(control=ControlOptions(failures_per_hour=100.0)))
        left = Counter(type(o) for o in gc.get_objects() if isinstance(o, SimulatedRequest | Journey))
    finally:
        gc.enable()
    assert not left


def test_what_still_runs_after_the_drain_has_missed() -> None:
    load = moving_load(30, factor=6.0)
    report = build_report(simulate(load, options("static:1P7D", drain_s=1.0)))
    offered = [request for request in load if request.arrival_s >= 3.0]
    assert report["requests"]["unfinished"] > 0
    assert report["requests"]["scored"] == pytest.approx(len(offered), abs=2)
    assert report["attainment"] < 1.0 - report["requests"]["unfinished"] / report["requests"]["scored"] + 1e-9


def test_requests_of_the_first_tenth_are_served_but_not_scored() -> None:
    load = [WorkloadRequest(float(second), 100, 2) for second in range(101)]
    result = simulate(load, options())
    assert count_outcomes(result) == {"ok": 101}
    assert build_report(result)["requests"]["scored"] == 91


def test_a_report_of_nothing_but_misses_can_be_printed() -> None:
    load = [WorkloadRequest(0.0, 60_000, 2), WorkloadRequest(0.1, 60_000, 2)]
    report = build_report(simulate(load, options(drain_s=0.01)))
    assert (report["attainment"], report["ttft_s"]["mean"]) == (0.0, None)
    assert "SLO attainment   0.0 % of 1 scored requests of 2 offered" in format_report(report)


def test_an_even_split_is_where_arrow_starts() -> None:
    assert parse_policy("arrow", instances=5) == Policy(PolicyName.ARROW, 2, 3)


def test_cpu_instances_change_nothing_while_accelerators_are_in_time() -> None:
    load = moving_load(10.0, factor=0.3)
    without, with_cpus = (simulate(load, options(cpu_instances=cpus)) for cpus in (0, 2))
    times = [
        [(r.prefill, r.decode, r.first_token_s, r.last_token_s) for r in run.records]
        for run in (without, with_cpus)
    ]
    assert times[0] == times[1]


def test_cpu_instances_compute_long_prompts_that_accelerators_would_compute_too_late() -> None:
    load = [WorkloadRequest(0.3 * number, 6_000, 10) for number in range(150)]
    slo = Slo(10.0, 0.2)
    without, with_cpus = (
        simulate(load, options("static:5P3D", slo=slo, cpu_instances=cpus, cpu_slowness=3.0)).records
        for cpus in (0, 4)
    )
    on_cpus = [r for r in with_cpus if r.prefill.startswith("cpu")]
    met = [sum(r.meets(slo) for r in records) for records in (without, with_cpus, on_cpus)]
    assert (met[1] > met[0], met[2] / max(1, len(on_cpus)) > 0.9) == (True, True), met
