"""Transforms of a workload's arrival times keep its lengths and its order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_simulator.workload import (
    LengthLimit,
    OverlongRequests,
    WorkloadRequest,
    jitter_arrivals,
    scale_rate,
    shift_arrivals,
    speed_up_arrivals,
)


def requests_at(*times: float, tokens: int = 1) -> list[WorkloadRequest]:
    return [WorkloadRequest(time, tokens, tokens) for time in times]


workloads = st.lists(
    st.builds(
        WorkloadRequest,
        st.floats(0, 1000, allow_nan=False),
        st.integers(1, 9000),
        st.integers(1, 900),
    ),
    max_size=40,
).map(lambda requests: sorted(requests, key=lambda request: request.arrival_s))


def test_a_faster_replay_divides_the_times() -> None:
    assert list(speed_up_arrivals(requests_at(0.0, 2.0, 6.0), 4.0)) == requests_at(0.0, 0.5, 1.5)


def test_a_shift_adds_to_the_times() -> None:
    assert list(shift_arrivals(requests_at(0.0, 2.0), 10.0)) == requests_at(10.0, 12.0)


@given(workloads, st.integers(0, 99))
def test_jitter_keeps_order_lengths_and_the_start(requests: list[WorkloadRequest], seed: int) -> None:
    moved = jitter_arrivals(requests, seed=seed)
    assert [(r.input_tokens, r.output_tokens) for r in moved] == [
        (r.input_tokens, r.output_tokens) for r in requests
    ]
    assert all(earlier.arrival_s <= later.arrival_s + 1e-9 for earlier, later in pairwise(moved))
    assert all(request.arrival_s >= 0 for request in moved)


def test_jitter_moves_by_at_most_half_a_gap_and_seed_0_not_at_all() -> None:
    requests = requests_at(*(float(second) for second in range(100)))
    moved = jitter_arrivals(requests, seed=7)
    assert jitter_arrivals(requests, seed=0) == requests
    assert moved == jitter_arrivals(requests, seed=7) != requests
    assert all(abs(new.arrival_s - old.arrival_s) <= 0.5 for new, old in zip(moved, requests, strict=True))


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.5, 3.0])
def test_a_scaled_rate_keeps_the_length_of_time(factor: float) -> None:
    requests = requests_at(*(float(second) for second in range(4000)))
    scaled = scale_rate(requests, factor, seed=1)
    assert len(scaled) == pytest.approx(4000 * factor, rel=0.05)
    assert scaled[-1].arrival_s < 4000.0
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(scaled))


def test_a_rate_scaled_by_one_is_the_same_workload_and_copies_are_spread() -> None:
    requests = requests_at(0.0, 1.0, 2.0)
    assert scale_rate(requests, 1.0, seed=9) == requests
    assert [r.arrival_s for r in scale_rate(requests, 2.0, seed=9)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert scale_rate([], 2.0, seed=9) == []


def test_requests_longer_than_the_engine_takes_are_counted_and_not_cut() -> None:
    limit = LengthLimit(10)
    requests = [WorkloadRequest(0.0, 6, 4), WorkloadRequest(1.0, 6, 5), WorkloadRequest(2.0, 20, 1)]
    assert limit.overlong is None
    assert list(limit.filter(requests)) == requests[:1]
    assert limit.overlong == OverlongRequests(requests=2, longest_tokens=21, max_tokens=10)
    assert str(limit.overlong) == (
        "2 requests are longer than the engine's 10 tokens (the longest has 21); left out, not cut"
    )
