"""B1 to B5 by hand, and how they must move with instances, attainment and SLO."""

import random
from itertools import pairwise
from math import inf

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.bounds import (
    MeanWork,
    compute_fluid_rate,
    compute_mean_work,
    compute_metric_rate,
    count_decodes_on_time_at_most,
    count_fcfs_on_time,
    count_prefills_on_time_at_most,
    find_decode_burst_rate,
    find_fcfs_rate,
    find_prefill_burst_rate,
)
from fulcrum_simulator.bounds.rates import TOLERANCE
from tests.unit.simulator.bounds.builders import draw_requests, make_fleet, make_requests

ABOUT = 1.1 * TOLERANCE
"""Relative error of a search."""


def test_the_fluid_bound_is_instances_over_the_mean_work_by_hand() -> None:
    # 100 tokens: 0.1 s. 11 outputs: 10 steps of 1 ms of work, and their share of steps of 10 ms.
    requests = make_requests((0, 100, 11), (1, 100, 11))
    fleet = make_fleet(2, d2=1e-12)
    work = compute_mean_work(requests, fleet)
    found = [work.prefill_s, work.decode_s, compute_fluid_rate(requests, fleet)]
    # A step decodes at most 64 requests: the limit that counts here.
    assert found == pytest.approx([0.1, 0.01 + 0.1 / 64, 2 / (0.11 + 0.1 / 64)])


def test_the_fixed_duration_of_decode_steps_counts_by_the_limit_that_needs_most_steps() -> None:
    requests = make_requests((0, 1, 101))
    by_slo = compute_mean_work(requests, make_fleet(tpot_s=0.02, d2=1e-12))  # 10 ms of work a step: 10 steps
    by_cache = compute_mean_work(
        requests, make_fleet(kv_capacity_tokens=102, d2=1e-12)
    )  # half of it each: 50
    found = (by_slo.decode_s, by_cache.decode_s)
    assert found == pytest.approx((0.1 + 0.01 * 10, 0.1 + 0.01 * 100 * 51.5 / 102))


def test_no_rate_decodes_with_an_slo_below_an_empty_step() -> None:
    fleet = make_fleet(tpot_s=0.01)
    decoding, prefill_only = make_requests((0, 10, 2), (1, 10, 2)), make_requests((0, 10, 1), (1, 10, 1))
    rates = [
        compute_fluid_rate(decoding, fleet),
        find_decode_burst_rate(decoding, fleet, attainment=1),
        compute_fluid_rate(prefill_only, fleet),
    ]
    assert rates == pytest.approx([0, 0, 100])


def test_the_metric_bound_drops_the_heaviest_requests_but_counts_them_as_offered() -> None:
    requests = make_requests((0, 100, 1), (1, 900, 1), (2, 100, 1), (3, 100, 1))
    fleet = make_fleet()
    rates = [compute_metric_rate(requests, fleet, attainment=share) for share in (1, 0.75)]
    assert rates == pytest.approx([4 / 1.2, 4 / 0.3])


def test_the_burst_bound_pools_the_instances_and_drops_the_longest_prompt() -> None:
    requests = make_requests((0, 2000, 1), (0, 800, 1), (0, 800, 1), (0.1, 400, 1))
    counts = [count_prefills_on_time_at_most(requests, make_fleet(count)) for count in (1, 2, 4)]
    assert counts == [1, 3, 4]


def test_the_burst_rate_of_equal_prompts_is_the_fluid_rate_plus_what_the_slo_allows_to_queue() -> None:
    # 100 prompts of 0.1 s over 99 gaps; the last waits for 99·(0.1 - gap) and may take 1 s in all.
    requests = make_requests(*((at, 100, 1) for at in range(100)))
    rate = find_prefill_burst_rate(requests, make_fleet(), attainment=1)
    gap_s = 0.1 - 0.9 / 99
    assert rate == pytest.approx(100 / 99 / gap_s, rel=ABOUT)


def test_first_come_first_served_lets_one_long_prompt_make_the_others_late() -> None:
    requests = make_requests((0, 1400, 1), (0.1, 500, 1), (0.2, 100, 1))
    one, two = make_fleet(1), make_fleet(2)
    counts = [
        count_fcfs_on_time(requests, one),
        count_fcfs_on_time(requests, one, refuse_late=True),
        count_fcfs_on_time(requests, two),
    ]
    assert counts == [0, 2, 2]


def test_the_prompt_of_a_queue_takes_whole_steps() -> None:
    requests = make_requests((0, 1000, 1))  # 1 s and two steps of 512 tokens
    counts = [count_fcfs_on_time(requests, make_fleet(ttft_s=ttft_s)) for ttft_s in (1.019, 1.021)]
    assert counts == [0, 1]


def test_the_decode_burst_bound_is_exact_where_all_can_be_in_time() -> None:
    # 101 outputs: 100 ms of work, and 100/64 of 10 ms; due 1 s + 100·20 ms after the arrival.
    fleet = make_fleet(tpot_s=0.02, d2=1e-12, max_seqs=1)
    requests = make_requests((0, 1, 101), (0, 1, 101), (0, 1, 101))  # 1.1 s each with their own steps
    assert [count_decodes_on_time_at_most(requests[:count], fleet) for count in (1, 2, 3)] == [1, 2, 2]


def test_no_bound_ever_counts_fewer_than_a_queue_that_exists(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        requests = draw_requests(rng, 30, gap_s=rng.choice((0.2, 0.5, 1.0)))
        for refuse_late in (False, True):
            queue = count_fcfs_on_time(requests, make_fleet(2), refuse_late=refuse_late)
            assert queue <= count_prefills_on_time_at_most(requests, make_fleet(2))


@pytest.mark.parametrize(
    "bound", [find_prefill_burst_rate, find_decode_burst_rate, find_fcfs_rate, compute_metric_rate]
)
def test_rates_rise_with_instances_and_ttft_and_fall_with_attainment(bound, seed: int) -> None:  # type: ignore[no-untyped-def]
    requests = draw_requests(random.Random(seed), 60, gap_s=0.5, output_max=200)
    slack = 1 + 2 * TOLERANCE
    by_instances = [bound(requests, make_fleet(count, ttft_s=3), attainment=0.9) for count in (1, 2, 4)]
    by_ttft = [bound(requests, make_fleet(2, ttft_s=ttft_s), attainment=0.9) for ttft_s in (2, 4, 8)]
    by_share = [bound(requests, make_fleet(2, ttft_s=3), attainment=share) for share in (1, 0.9, 0.5)]
    for rates in (by_instances, by_ttft, by_share):
        assert all(low <= high * slack for low, high in pairwise(rates)), rates


def test_a_workload_that_fits_at_once_has_no_highest_rate() -> None:
    requests = make_requests((0, 10, 1), (1, 10, 1))
    assert find_prefill_burst_rate(requests, make_fleet(), attainment=1) == inf


def test_a_prompt_longer_than_the_slo_is_in_time_at_no_rate() -> None:
    requests = make_requests((0, 5000, 1), (1, 10, 1))
    rates = [find_prefill_burst_rate(requests, make_fleet(), attainment=share) for share in (1, 0.5)]
    assert rates == [0, inf]


@pytest.mark.parametrize("attainment", [0, -1, 1.01, float("nan")])
def test_an_attainment_outside_0_to_1_is_refused(attainment: float) -> None:
    with pytest.raises(InvalidInput, match="must be above 0 and at most 1"):
        compute_metric_rate(make_requests((0, 1, 1)), make_fleet(), attainment=attainment)


def test_a_rate_needs_requests_that_arrive_over_some_time() -> None:
    with pytest.raises(InvalidInput, match="must arrive over some time"):
        find_fcfs_rate(make_requests((1, 1, 1), (1, 1, 1)), make_fleet(), attainment=1)


def test_mean_work_knows_the_share_of_prefill() -> None:
    assert MeanWork(prefill_s=3.0, decode_s=1.0).prefill_share == 0.75
