"""A run over time: samples of the fleet, and attainment by the time of arrival."""

from dataclasses import replace

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.fleet.timeline import Sample, attainment_over_time, thin_out
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest

SLO = Slo(1.0, 0.1)


def record(arrival_s: float, ttft_s: float) -> RequestResult:
    made = RequestResult(WorkloadRequest(arrival_s, 10, 1))
    made.outcome, made.first_token_s = Outcome.OK, arrival_s + ttft_s
    return made


def test_attainment_is_that_of_the_requests_that_arrived_in_the_window() -> None:
    records = [record(0.0, 5.0), record(9.0, 0.1), record(100.0, 0.1)]
    expected = [(0.0, 0.5), *((10.0 * n, None) for n in range(1, 9)), (90.0, 1.0)]
    assert attainment_over_time(records, SLO, 10) == expected
    assert len(attainment_over_time([record(float(n), 0.1) for n in range(101)], SLO, 10)) == 10
    assert attainment_over_time([], SLO, 10) == []


def test_samples_are_thinned_out_at_equal_distances() -> None:
    samples = [Sample(float(second), 1, 1, 0, 0, 0.0, 0, 0.0) for second in range(10)]
    assert [sample.at_s for sample in thin_out(samples, 4)] == [0.0, 3.0, 6.0, 9.0]
    assert thin_out(samples, 10) == samples


def test_a_run_is_sampled_once_a_second() -> None:
    options = RunOptions(
        profile=load_profile("laptop"), instances=2, policy=parse_policy("arrow", instances=2), slo=SLO
    )
    samples = simulate([WorkloadRequest(0.0, 3_000, 200)], options).samples
    assert [sample.at_s for sample in samples[:3]] == [1.0, 2.0, 3.0]
    assert samples[0].prefill_queued_s > 0
    assert samples[0].kv_usage > 0
    assert {(s.prefill_instances, s.decode_instances, s.both_instances) for s in samples} == {(1, 1, 0)}
    assert samples[2].decode_legs == 1


def test_requests_that_wait_in_the_router_are_in_the_samples() -> None:
    options = RunOptions(
        profile=load_profile("laptop"), instances=2, policy=parse_policy("colocated", instances=2), slo=SLO
    )
    split = replace(options, policy=parse_policy("static:1P1D+nodeflect", instances=2))
    load = [WorkloadRequest(0.0, 3_000, 20) for _ in range(20)]
    colocated, waiting = (simulate(load, each).samples[0] for each in (options, split))
    assert (colocated.prefill_instances, colocated.both_instances) == (0, 2)
    assert waiting.waiting > 10
