"""Options of a simulated run: policies by name, arrivals, the order of events, the search for a rate."""

from itertools import pairwise

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.event_queue import STEP_END, EventQueue
from fulcrum_simulator.fleet.load import (
    ComposedLoad,
    Load,
    RecordedLoad,
    ReplayedLoad,
    leave_out_overlong,
    prepare_load,
)
from fulcrum_simulator.fleet.options import Policy, PolicyName, list_splits, parse_policy
from fulcrum_simulator.rate_search import FoundFactor, find_highest_factor, list_factors_around
from fulcrum_simulator.workload import WorkloadRequest

LAPTOP = load_profile("laptop")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "static",
        "static:8P0D",
        "static:0P8D",
        "arrow:4P3D",
        "static:44",
        "xllm-like",
        "round-robin",
        "xllm+direct",
        "cold",
        "cold:60",
        "clairvoyant:0s",
        "+direct",
        "arrow+degrade:0",
        "arrow+degrade",
        "static:٣P٥D",
        "cold:٣s",
        "colocated:٣",
        "arrow+degrade:٣",
        "arrow+foo",
        "arrow+",
    ],
)
def test_an_unknown_policy_or_a_split_of_other_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--policy"):
        parse_policy(text, instances=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrow" + "+direct" * 2000, r"must name each part with \+ once"),
        ("arrow+degrade:5+degrade:6", r"\(arrow\+degrade:5\+degrade:6\) must name each part with \+ once"),
        (f"static:{'9' * 5000}P1D", "is not one of arrow, "),
        (f"colocated:{'9' * 5000}", "is not one of arrow, "),
        ("colocated:0", r"\(colocated:0\) must have a token budget above 0"),
        ("arrow+foo", r"has a part \+foo that is not one of \+direct, \+nodeflect, "),
        ("foo+direct+prefix", r"\(foo\+direct\+prefix\) is not one of arrow, "),
        ("arrow:8P0D+direct", r"\(arrow:8P0D\+direct\) must have at least one instance of each role"),
        ("arrow\nx", r"\(arrow x\) is not one of arrow, "),
    ],
    ids=lambda value: value[:30],
)
def test_a_refused_policy_is_named_as_typed_in_one_short_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^--policy .*{message}") as caught:
        parse_policy(text, instances=8)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_parts_of_a_policy_may_come_in_any_order() -> None:
    policies = {
        parse_policy(f"arrow{parts}", instances=8)
        for parts in (
            "+degrade:64+prefix+direct",
            "+direct+degrade:64+prefix",
            "+enforce+PREFIX+degrade:64+direct",
        )
    }
    assert [str(policy) for policy in policies] == ["arrow:4P4D+direct+prefix+degrade:64"]


def test_splits_are_named_as_they_are_parsed() -> None:
    assert [str(policy) for policy in list_splits(4)] == ["static:1P3D", "static:2P2D", "static:3P1D"]
    assert parse_policy("STATIC:3p1d", instances=4) == Policy(PolicyName.STATIC, 3, 1)
    names = ("arrow:3P1D", "colocated", "colocated:512", "cold:1m", "arrow:3P1D+direct")
    behind = ("balanced:3P1D+direct+nodeflect", "arrow:3P1D+direct+enforce", "static:3P1D+degrade:64")
    for name in (
        *names,
        *behind,
        "dynamo-like",
        "narwhal-like",
        "clairvoyant:1m",
        "xllm:1P3D",
        "round-robin:2P2D",
    ):
        assert str(parse_policy(name, instances=4)) == name


def test_a_short_load_is_repeated_until_it_is_long_enough_to_be_scored() -> None:
    recorded = [WorkloadRequest(float(second), 10, 1) for second in range(5, 105)]
    load = prepare_load(recorded, scale=1.0, speed=2.0, slo=Slo(20.0, 0.1), seed=0)
    assert (load[0].arrival_s, len(load)) == (0.0, 2000)
    assert load[-1].arrival_s == 999.5
    assert [b.arrival_s - a.arrival_s for a, b in pairwise(load)] == [0.5] * 1999


@pytest.mark.parametrize("seed", range(5))
def test_a_load_whose_arrivals_move_does_not_start_before_0(seed: int) -> None:
    recorded = [WorkloadRequest(float(second), 10, 1) for second in range(5, 105)]
    load = prepare_load(recorded, scale=1.0, speed=1.0, slo=Slo(1.0, 0.1), seed=seed)
    assert 0.0 <= load[0].arrival_s <= 0.5


def test_a_request_that_no_engine_can_hold_is_left_out_and_counted() -> None:
    recorded = [WorkloadRequest(0.0, 10, 1), WorkloadRequest(1.0, 65_536, 1)]
    kept, overlong = leave_out_overlong(recorded, load_profile("laptop"))
    assert (kept, overlong and overlong.requests) == (recorded[:1], 1)


def test_events_run_in_order_of_time_then_steps_then_scheduling() -> None:
    events, order = EventQueue(), list[str]()
    for name, at_s, rank in (("c", 2.0, 1), ("d", 2.0, 1), ("b", 2.0, STEP_END), ("a", 1.0, 1)):
        events.schedule(at_s, lambda name=name: order.append(name), rank=rank)  # type: ignore[misc]
    events.schedule(1.5, lambda: order.append("cancelled")).cancel()
    while events.next_event_s() < 10:
        events.run_next()
    assert (order, events.now_s, events.executed) == (["a", "b", "c", "d"], 2.0, 4)


def test_timeouts_run_among_the_other_events_unless_they_are_cancelled() -> None:
    events, order = EventQueue(), list[str]()
    for name, delay_s in (("b", 2.0), ("d", 3.0), ("cancelled", 2.0), ("c", 2.0)):
        timeout = events.schedule_timeout(delay_s, lambda name=name: order.append(name))  # type: ignore[misc]
        if name == "cancelled":
            timeout.cancel()
    for name, at_s in (("a", 2.0), ("e", 3.0)):
        rank = STEP_END if name == "a" else 1
        events.schedule(at_s, lambda name=name: order.append(name), rank=rank)  # type: ignore[misc]
    while events.next_event_s() < 10:
        events.run_next()
    assert (order, events.now_s, events.executed) == (["a", "b", "c", "d", "e"], 3.0, 5)
    with pytest.raises(IndexError):
        events.run_next()


def test_an_action_due_in_the_past_runs_now() -> None:
    events = EventQueue()

    def schedule_in_the_past() -> None:
        events.schedule(1.0, lambda: None)

    events.schedule(5.0, schedule_in_the_past)
    events.run_next()
    assert events.next_event_s() == 5.0


@pytest.mark.parametrize("limit", [0.02, 0.9, 1.0, 7.3, 900.0])
def test_the_highest_factor_is_found_within_two_per_cent(limit: float) -> None:
    found = find_highest_factor(lambda speed: speed, lambda speed: speed <= limit)
    assert found.factor is not None
    assert limit / 1.02 <= found.factor <= limit


def test_no_factor_is_found_if_none_keeps_the_bar() -> None:
    assert find_highest_factor(lambda speed: speed, lambda _: False) == FoundFactor(None, None, 9)


def test_the_factors_around_a_found_one_are_four_on_each_side() -> None:
    factors = list_factors_around(2.0)
    assert sorted(factors) == list(factors)
    assert [factor < 2.0 for factor in factors] == [True] * 4 + [False] * 4


def requests_at(*times_s: float) -> list[WorkloadRequest]:
    return [WorkloadRequest(time_s, 10, 1) for time_s in times_s]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        pytest.param(
            RecordedLoad("x.csv", requests_at(0, 1, 2), scale=1e-3),
            "--scale (0.001) leaves no request of x.csv",
            id="a trace scaled down to nothing",
        ),
        pytest.param(
            ComposedLoad("tiers", LAPTOP, 1e-10),
            "--scale (1e-10) leaves no request of tiers",
            id="a composed load scaled down to nothing",
        ),
        pytest.param(
            ComposedLoad("phases-200s", LAPTOP, 5e-324),
            "--scale (5e-324) leaves no request of phases-200s",
            id="a rate that is too small to be a number",
        ),
        pytest.param(
            ComposedLoad("tiers", LAPTOP.model_copy(update={"kv_capacity_tokens": 16})),
            "tiers (4,983 requests) has no request that fits the profile's KV cache",
            id="a composed load whose requests are all too long",
        ),
        pytest.param(
            ComposedLoad("tiers-flood", LAPTOP, 1000.0),
            "--scale (1000) makes 21,",
            id="a composed load with too many requests",
        ),
        pytest.param(
            RecordedLoad("x.csv", requests_at(*range(7000)), scale=1000.0),
            "--scale (1000) makes 7,000,000 requests of x.csv: the limit is 6,000,000",
            id="a trace scaled up too far",
        ),
        pytest.param(
            RecordedLoad("x.csv", requests_at(0, 1e-9)),
            "x.csv (2 requests in 1e-09 s) must be repeated to last 600 s: at its rate that makes more than "
            "1,000,000 requests",
            id="two requests at almost the same time",
        ),
        pytest.param(
            RecordedLoad("x.csv", requests_at(0, 0.1, 0.2), speed=1000.0),
            "x.csv (3 requests in 0.0002 s) must be repeated to last 600 s",
            id="a trace of three requests sped up too far",
        ),
        pytest.param(
            RecordedLoad("x.csv", requests_at(0, 1e15)),
            "x.csv (1e+15 s) must last at most 366 days",
            id="an arrival in millions of years",
        ),
        pytest.param(
            RecordedLoad("x.csv", requests_at(0, 1), speed=5e-324),
            "x.csv (inf s) must last at most 366 days",
            id="a trace slowed down without end",
        ),
        pytest.param(
            ReplayedLoad("recorded requests", requests_at(0, 1e12)),
            "recorded requests (1e+12 s) must last at most 366 days",
            id="recorded requests of thousands of years",
        ),
    ],
)
def test_a_load_that_is_empty_or_has_no_end_is_refused(load: Load, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load.prepare(1.0, slo=Slo(1.0, 0.1), seed=1)
    assert str(caught.value).startswith(message)


def test_a_trace_at_the_limits_is_prepared() -> None:
    load = RecordedLoad("x.csv", requests_at(0, 366 * 86400)).prepare(1.0, slo=Slo(1.0, 0.1), seed=0)
    assert load == requests_at(0, 366 * 86400)
