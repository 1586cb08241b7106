"""Portions: many objects are checked a few at a time, each as often as the others."""

from collections import Counter

import pytest

from fulcrum_router.http1.portions import MIN_AT_ONCE, PORTIONS, Portions
from fulcrum_router.http1.upstream import ConnectionPool


@pytest.mark.parametrize(
    ("count", "calls"),
    [
        pytest.param(MIN_AT_ONCE, 1, id="few at once"),
        pytest.param(10 * MIN_AT_ONCE, 10, id="many in portions"),
        pytest.param(50_009, PORTIONS, id="very many in no more portions"),
    ],
)
def test_each_object_is_in_one_portion(count: int, calls: int) -> None:
    portions: Portions[int] = Portions()
    taken = [portions.take(range(count)) for _ in range(calls)]
    assert Counter(number for portion in taken for number in portion) == Counter(range(count))
    assert max(map(len, taken)) <= max(MIN_AT_ONCE, -(-count // PORTIONS))


def test_an_object_that_is_new_is_in_the_next_round() -> None:
    portions: Portions[str] = Portions()
    assert [portions.take(["a"]), portions.take(["a", "b"])] == [["a"], ["a", "b"]]


class CountingConnection:
    """Stands for a connection with a leg in flight."""

    def __init__(self) -> None:
        self.checks = 0

    def enforce_timeouts(self, now_s: float) -> None:
        del now_s
        self.checks += 1


def test_the_legs_of_a_pool_are_checked_in_portions() -> None:
    pool = ConnectionPool("127.0.0.1", 1)
    legs = [CountingConnection() for _ in range(10 * MIN_AT_ONCE)]
    pool.busy.update(legs)  # type: ignore[arg-type]  # what the pool uses of them
    pool.enforce_timeouts(0.0)
    at_once = sum(leg.checks for leg in legs)
    for _ in range(PORTIONS - 1):
        pool.enforce_timeouts(0.0)
    assert (at_once, {leg.checks for leg in legs}) == (MIN_AT_ONCE, {1})


def test_a_leg_that_has_ended_meanwhile_is_not_checked() -> None:
    pool = ConnectionPool("127.0.0.1", 1)
    legs = [CountingConnection() for _ in range(2 * MIN_AT_ONCE)]
    pool.busy.update(legs)  # type: ignore[arg-type]
    pool.enforce_timeouts(0.0)
    pool.busy.clear()
    pool.enforce_timeouts(0.0)
    assert sum(leg.checks for leg in legs) == MIN_AT_ONCE
