"""Generated workloads: the same seed draws the same requests, and the lengths match the published figures."""

import random
from bisect import bisect_left
from itertools import pairwise
from statistics import mean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_simulator.workload import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    GeneratedWorkload,
    LengthDistribution,
    MixPeriod,
    WorkloadPhase,
    generate_bursty,
    generate_moving,
    generate_steady,
)

PERIODS = (MixPeriod(PREFILL_HEAVY, 8.0, 10.0), MixPeriod(DECODE_HEAVY, 4.0, 5.0))


def make_workloads(seed: int) -> list[GeneratedWorkload]:
    return [
        generate_steady(rate_rps=10.0, duration_s=30.0, seed=seed),
        generate_moving(periods=PERIODS, duration_s=30.0, seed=seed),
        generate_bursty(rate_rps=10.0, duration_s=30.0, seed=seed, compression=12.0),
    ]


@given(st.integers(0, 2**32))
def test_the_same_seed_draws_the_same_requests_sorted_and_within_the_time(seed: int) -> None:
    for load, again in zip(make_workloads(seed), make_workloads(seed), strict=True):
        requests = list(load)
        assert requests == list(again) == list(load)
        assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(requests))
        assert all(0 <= request.arrival_s < 30.0 for request in requests)
        assert all(request.input_tokens >= 1 and request.output_tokens >= 1 for request in requests)


def test_another_seed_draws_other_requests() -> None:
    assert all(
        list(one) != list(other) for one, other in zip(make_workloads(1), make_workloads(2), strict=True)
    )


def test_a_steady_load_has_the_rate_and_the_gaps_of_a_poisson_process() -> None:
    times = [request.arrival_s for request in generate_steady(rate_rps=10.0, duration_s=1000.0, seed=3)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert 9.5 < len(times) / 1000.0 < 10.5
    assert 0.95 < stdev(gaps) / mean(gaps) < 1.05


def test_code_lengths_match_the_published_figures() -> None:
    rng = random.Random(5)
    inputs = [CODE.input.draw(rng) for _ in range(20_000)]
    outputs = [CODE.output.draw(rng) for _ in range(20_000)]
    assert 1350 < median(inputs) < 1500
    assert max(inputs) <= 7437
    assert 12 <= median(outputs) <= 14
    assert 24 < mean(outputs) < 30


def test_a_distribution_made_from_a_mean_has_that_mean() -> None:
    rng = random.Random(6)
    distribution = LengthDistribution.with_mean(430, sigma=0.5, max_tokens=100_000)
    assert 420 < mean(distribution.draw(rng) for _ in range(20_000)) < 440


def test_scaling_a_mix_shortens_its_lengths_and_keeps_its_name() -> None:
    assert CHAT.scaled(input=0.5) == type(CHAT)(CHAT.name, LengthDistribution(224.5, 1.0, 12114), CHAT.output)


def test_a_moving_load_alternates_and_ends_on_time() -> None:
    load = generate_moving(periods=PERIODS, duration_s=20.0, seed=1)
    assert [(phase.name, phase.start_s, phase.end_s, phase.rate_rps) for phase in load.phases] == [
        ("prefill-heavy", 0.0, 10.0, 8.0),
        ("decode-heavy", 10.0, 15.0, 4.0),
        ("prefill-heavy", 15.0, 20.0, 8.0),
    ]


def test_the_phase_at_a_time_is_known_until_the_end() -> None:
    load = generate_moving(periods=PERIODS, duration_s=15.0, seed=1)
    names = [phase.name if (phase := load.phase_at(at_s)) else None for at_s in (0.0, 9.9, 10.0, 15.0)]
    assert names == ["prefill-heavy", "prefill-heavy", "decode-heavy", None]


def test_a_bursty_load_is_silent_between_its_bursts_and_keeps_its_mean_rate() -> None:
    load = generate_bursty(rate_rps=5.0, duration_s=200_000.0, seed=2)
    requests = list(load)
    silences = [phase for phase in load.phases if phase.name == "silence"]
    assert len(requests) / 200_000.0 == pytest.approx(5.0, rel=0.015)
    times = [request.arrival_s for request in requests]
    assert all(bisect_left(times, phase.start_s) == bisect_left(times, phase.end_s) for phase in silences)
    assert all(phase.end_s - phase.start_s <= 217.0 + 1e-6 for phase in silences)


def test_a_phase_without_a_rate_is_empty() -> None:
    phase = WorkloadPhase("silence", 0.0, 10.0, 0.0, CHAT)
    assert list(phase.requests(random.Random(1))) == []
