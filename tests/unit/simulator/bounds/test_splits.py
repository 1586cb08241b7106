"""The model of split instances by hand and step by step; splits against exhaustive search."""

import math
import random

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.bounds import (
    FixedSplit,
    UniformFleet,
    count_fcfs_on_time,
    find_best_fixed_split,
    find_fixed_split_rate,
    find_moving_split_rate,
    plan_moving_split,
    splits,
)
from fulcrum_simulator.bounds.decode_pool import Decode, DecodePool
from fulcrum_simulator.bounds.rates import TOLERANCE
from fulcrum_simulator.bounds.split_queue import SplitQueue, make_tasks
from fulcrum_simulator.workload import WorkloadRequest
from tests.unit.simulator.bounds.builders import draw_requests, make_fleet, make_requests, round_profile


def step_one_by_one(pool: list[Decode], instances: int) -> list[float]:
    """Return the TPOTs of requests that start together, one step at a time."""
    profile, now_s, tpots_s = round_profile(d2=1e-5), 0.0, []
    running = [[decode.context_tokens, decode.tokens, decode.tokens] for decode in pool]
    while running:
        share = min(instances, len(running))
        context = sum(each[0] for each in running)
        now_s += profile.t0 + (profile.d1 * len(running) + profile.d2 * context) / share
        for each in running:
            each[0], each[1] = each[0] + 1, each[1] - 1
        tpots_s += [now_s / each[2] for each in running if not each[1]]
        running = [each for each in running if each[1]]
    return tpots_s


@pytest.mark.parametrize("instances", [1, 3])
def test_the_pool_jumps_to_where_single_steps_lead(instances: int, seed: int) -> None:
    rng = random.Random(seed)
    decodes = [Decode(0.0, rng.randint(1, 900), rng.randint(1, 300)) for _ in range(20)]
    pool = DecodePool(round_profile(d2=1e-5))
    for decode in decodes:
        pool.add(decode, instances)
    # A jump counts half a step of growth more than the steps that it stands for.
    assert sorted(pool.advance(math.inf, instances)) == pytest.approx(
        sorted(step_one_by_one(decodes, instances)), rel=0.01
    )


def test_the_pool_reaches_the_same_state_in_one_or_in_many_advances(seed: int) -> None:
    rng = random.Random(seed)
    one, many = (DecodePool(round_profile(d2=1e-5)) for _ in range(2))
    for _ in range(10):
        decode = Decode(0.0, rng.randint(1, 900), rng.randint(1, 300))
        one.add(decode, 2)
        many.add(decode, 2)
    ends = [tpot for at_s in range(1, 60) for tpot in many.advance(at_s, 2)]
    assert ends == pytest.approx(one.advance(59, 2))


def test_a_decode_waits_until_its_whole_context_fits_the_cache() -> None:
    tpots_s = []
    for capacity in (220, 219):
        pool = DecodePool(round_profile(kv_capacity_tokens=capacity, d2=1e-12))
        pool.add(Decode(0.0, 100, 50), 1)
        pool.add(Decode(0.0, 20, 50), 1)
        tpots_s += pool.advance(math.inf, 1)
    assert tpots_s == pytest.approx([0.012, 0.012, 0.011, 0.022])  # together, and one after the other


def test_prompts_alone_are_served_like_a_queue(seed: int) -> None:
    requests = draw_requests(random.Random(seed), 40, gap_s=0.3)
    fleet = make_fleet(4)
    queue = SplitQueue(make_tasks(requests, fleet), [request.arrival_s for request in requests], fleet)
    queue.advance(3, math.inf)
    assert len(requests) - queue.late == count_fcfs_on_time(requests, make_fleet(3))


def test_an_instance_that_moves_away_and_back_still_has_its_prompt() -> None:
    """Of two that move back at 0.55 s, one has not computed before, and the other is free at 0.91 s."""
    requests, fleet = make_requests(*((0.0, 900, 1) for _ in range(6))), make_fleet(4, ttft_s=1.5)
    queue = SplitQueue(make_tasks(requests, fleet), [0.0] * 6, fleet)
    for prefill, until_s in ((3, 0.5), (1, 0.55), (3, math.inf)):
        queue.advance(prefill, until_s)
    assert queue.late == 2


def test_one_instance_has_no_split() -> None:
    requests = make_requests((0.0, 100, 2), (1.0, 100, 2))
    with pytest.raises(InvalidInput, match="must be at least 2"):
        find_fixed_split_rate(requests, make_fleet(1), attainment=0.9)


def moving_mix(rng: random.Random, *, phases: int, phase_s: float) -> list[WorkloadRequest]:
    """Return phases of long prompts and of long outputs in turn."""
    requests = []
    for phase in range(phases):
        at_s = phase * phase_s
        while (at_s := at_s + rng.expovariate(4 if phase % 2 else 3)) < (phase + 1) * phase_s:
            lengths = (20, rng.randint(150, 250)) if phase % 2 else (rng.randint(400, 800), 2)
            requests.append(WorkloadRequest(at_s, *lengths))
    return requests


def mix_fleet(instances: int) -> UniformFleet:
    return make_fleet(instances, tpot_s=0.03, d1=0.002)


def search_exhaustively(requests: list[WorkloadRequest], fleet: UniformFleet, interval_s: float) -> int:
    """Return the most requests in time over all sequences of splits."""
    arrivals_s = [request.arrival_s for request in requests]
    intervals = math.ceil(arrivals_s[-1] / interval_s)
    queues = [SplitQueue(make_tasks(requests, fleet), arrivals_s, fleet)]
    for number in range(1, intervals + 1):
        until_s = number * interval_s if number < intervals else math.inf
        branches = [(queue.copy(), prefill) for queue in queues for prefill in range(1, fleet.instances)]
        for queue, prefill in branches:
            queue.advance(prefill, until_s)
        queues = [queue for queue, _ in branches]
    return len(requests) - min(queue.late for queue in queues)


def test_the_moving_split_is_near_the_best_of_all_sequences_and_never_above(seed: int) -> None:
    rng = random.Random(seed)
    found, best = 0, 0
    for _ in range(5):
        requests = moving_mix(rng, phases=3, phase_s=8)
        plan = plan_moving_split(requests, mix_fleet(4), interval_s=4)
        optimum = search_exhaustively(requests, mix_fleet(4), 4)
        assert find_best_fixed_split(requests, mix_fleet(4)).on_time <= plan.on_time <= optimum
        found, best = found + plan.on_time, best + optimum
    assert found >= 0.97 * best


def test_the_moving_split_serves_what_no_fixed_split_does_when_the_mix_moves() -> None:
    requests = moving_mix(random.Random(1), phases=6, phase_s=20)
    fixed = find_best_fixed_split(requests, mix_fleet(4))
    plan = plan_moving_split(requests, mix_fleet(4), interval_s=5)
    assert plan.on_time > 1.2 * fixed.on_time
    assert len(plan.prefill) == 24


def test_the_best_fixed_split_gives_the_heavier_phase_more_instances() -> None:
    prompts = make_requests(*((at / 2, 900, 2) for at in range(60)))
    outputs = make_requests(*((at / 4, 10, 200) for at in range(60)))
    splits = [find_best_fixed_split(requests, mix_fleet(4)).prefill for requests in (prompts, outputs)]
    assert splits == [2, 1]


def test_a_split_needs_two_instances_and_an_interval_above_0() -> None:
    requests = make_requests((0, 1, 1), (1, 1, 1))
    with pytest.raises(InvalidInput, match="must be at least 2 to be split"):
        find_best_fixed_split(requests, make_fleet(1))
    with pytest.raises(InvalidInput, match="must be a positive number of seconds"):
        plan_moving_split(requests, make_fleet(2), interval_s=0)


@pytest.mark.parametrize(
    ("last_s", "instances", "interval_s", "shown"),
    [(100.0, 3, 0.001, "1ms"), (1e308, 2, 1e-3, "1ms"), (3.1e6, 2, 30.0, "30s")],
)
def test_a_moving_split_with_too_many_intervals_is_refused(
    last_s: float, instances: int, interval_s: float, shown: str
) -> None:
    requests = make_requests((0, 1, 1), (last_s, 1, 1))
    rule = rf"^interval of the moving split \({shown}\) is too short: .* more than 100,000 splits to compute"
    with pytest.raises(InvalidInput, match=rule):
        plan_moving_split(requests, make_fleet(instances), interval_s=interval_s)


def test_a_moving_split_that_no_rate_allows_has_the_rate_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SPLITS_MAX", 100)
    requests, fleet = make_requests((0, 1000, 5), (90, 1000, 5)), make_fleet(2, ttft_s=0.001)
    assert find_moving_split_rate(requests, fleet, attainment=0.9, interval_s=1) == 0.0


def test_two_instances_have_one_split() -> None:
    requests = make_requests((0, 100, 3), (1, 100, 3))
    assert find_best_fixed_split(requests, make_fleet(2)) == FixedSplit(prefill=1, on_time=2)


def test_the_rate_of_a_moving_split_is_at_least_that_of_a_fixed_one() -> None:
    requests, fleet = moving_mix(random.Random(2), phases=4, phase_s=10), mix_fleet(3)
    fixed = find_fixed_split_rate(requests, fleet, attainment=0.9)
    moving = find_moving_split_rate(requests, fleet, attainment=0.9, interval_s=2)
    assert 0 < fixed <= moving * (1 + 2 * TOLERANCE)
