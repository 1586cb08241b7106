"""Engines that start: which of them admission may count on, and from when."""

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy.starts import KNOWN_STARTS, ComingInstance, EngineStarts


def starting(*durations_s: float, since_s: float = 100.0) -> EngineStarts:
    """One prefill instance of pool a that starts; earlier starts of the pool took so long."""
    starts = EngineStarts()
    for duration_s in durations_s:
        starts.learn("a", duration_s)
    starts.begin("a-1", pool="a", role=Role.PREFILL, since_s=since_s)
    return starts


@pytest.mark.parametrize(
    ("starts", "now_s", "expected"),
    [
        pytest.param(EngineStarts(), 100.0, (), id="nothing starts"),
        pytest.param(starting(), 100.0, (), id="nothing is known of the pool"),
        pytest.param(starting(40.0), 110.0, (ComingInstance(30.0, Role.PREFILL),), id="as long as before"),
        pytest.param(starting(30.0, 40.0), 110.0, (ComingInstance(30.0, Role.PREFILL),), id="the longest"),
        pytest.param(starting(40.0), 140.0, (), id="a start that takes longer may never end"),
        pytest.param(
            starting(90.0, *[40.0] * KNOWN_STARTS),
            110.0,
            (ComingInstance(30.0, Role.PREFILL),),
            id="the last",
        ),
    ],
)
def test_a_start_counts_until_it_takes_longer_than_those_before(
    starts: EngineStarts, now_s: float, expected: tuple[ComingInstance, ...]
) -> None:
    assert starts.list_coming(now_s) == expected


def test_a_start_that_ends_is_learned_and_does_not_count_any_more() -> None:
    starts = starting(40.0)
    starts.end("a-1", 160.0)
    starts.begin("a-2", pool="a", role=Role.DECODE, since_s=200.0)
    assert starts.list_coming(200.0) == (ComingInstance(60.0, Role.DECODE),)


def test_a_start_that_was_given_up_is_not_learned() -> None:
    starts = starting(40.0)
    starts.give_up("a-1")
    starts.end("a-1", 900.0)
    starts.begin("a-2", pool="a", role=Role.DECODE, since_s=1_000.0)
    assert starts.list_coming(1_000.0) == (ComingInstance(40.0, Role.DECODE),)


def test_instances_and_pools_that_are_gone_are_forgotten() -> None:
    starts = starting(40.0)
    starts.keep_only({})
    assert starts.list_coming(100.0) == ()
    starts.begin("a-1", pool="a", role=Role.PREFILL, since_s=100.0)
    assert starts.list_coming(100.0) == ()


def test_the_first_to_serve_comes_first() -> None:
    starts = starting(40.0)
    starts.begin("a-0", pool="a", role=Role.DECODE, since_s=90.0)
    assert [one.in_s for one in starts.list_coming(100.0)] == [30.0, 40.0]
