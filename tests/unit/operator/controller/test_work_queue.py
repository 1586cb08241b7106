"""The operator's queue, on a clock that is moved."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from fulcrum_core.errors import Conflict, StoreUnavailable
from fulcrum_operator.controller.work_queue import (
    CONFLICT_DELAY_S,
    LONGEST_CONFLICT_DELAY_S,
    KeyedQueue,
    backoff_s,
)

pytestmark = pytest.mark.looptime


class Work:
    """Notes when each key was looked at; takes `took_s`, fails as long as `errors` has something."""

    def __init__(self) -> None:
        self.looks: dict[str, list[float]] = defaultdict(list)
        self.errors: list[Exception] = []
        self.took_s = 0.0
        self.again_s: float | None = None
        self.running = 0
        self.running_max = 0

    async def __call__(self, key: str) -> float | None:
        self.looks[key].append(round(asyncio.get_running_loop().time(), 6))
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await asyncio.sleep(self.took_s)
        self.running -= 1
        if self.errors:
            raise self.errors.pop()
        again_s, self.again_s = self.again_s, None
        return again_s


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
async def queue(work: Work) -> AsyncIterator[KeyedQueue[str]]:
    made = KeyedQueue[str](work, resync_s=100.0)
    yield made
    await made.aclose()


async def test_a_key_added_often_is_looked_at_once(queue: KeyedQueue[str], work: Work) -> None:
    for _ in range(3):
        queue.add("a")
    await asyncio.sleep(1)
    assert work.looks == {"a": [0.0, 0.0]}  # once, and once more since it was added while at work


async def test_a_key_is_never_worked_on_twice_at_a_time(queue: KeyedQueue[str], work: Work) -> None:
    work.took_s = 2.0
    queue.add("a")
    await asyncio.sleep(1)
    queue.add("a")
    queue.add("a")
    await asyncio.sleep(10)
    assert (work.looks, work.running_max) == ({"a": [0.0, 2.0]}, 1)


async def test_different_keys_go_side_by_side(queue: KeyedQueue[str], work: Work) -> None:
    work.took_s = 2.0
    queue.add("a")
    queue.add("b")
    await asyncio.sleep(1)
    assert (work.looks, work.running_max) == ({"a": [0.0], "b": [0.0]}, 2)


async def test_a_key_that_wants_to_look_again_does(queue: KeyedQueue[str], work: Work) -> None:
    work.again_s = 5.0
    queue.add("a")
    await asyncio.sleep(50)
    assert work.looks == {"a": [0.0, 5.0]}


async def test_an_event_comes_before_the_time_arranged_and_in_its_place(
    queue: KeyedQueue[str], work: Work
) -> None:
    work.again_s = 5.0
    queue.add("a")
    await asyncio.sleep(2)
    queue.add("a")
    await asyncio.sleep(50)
    assert work.looks == {"a": [0.0, 2.0]}


async def test_every_key_comes_back_by_itself(queue: KeyedQueue[str], work: Work) -> None:
    queue.add("a")
    await asyncio.sleep(201)
    assert work.looks == {"a": [0.0, 100.0, 200.0]}


async def test_of_two_times_arranged_the_earlier_holds(queue: KeyedQueue[str], work: Work) -> None:
    queue.add_after("a", 5.0)
    queue.add_after("a", 3.0)
    queue.add_after("a", 9.0)
    await asyncio.sleep(50)
    assert work.looks == {"a": [3.0]}


async def test_a_key_that_fails_comes_back_later_and_later_until_it_works(
    queue: KeyedQueue[str], work: Work
) -> None:
    work.errors = [ValueError("broken")] * 3
    queue.add("a")
    await asyncio.sleep(1)
    assert work.looks == {"a": [0.0, 0.05, 0.15, 0.35]}


async def test_a_key_that_worked_again_starts_with_the_shortest_wait(
    queue: KeyedQueue[str], work: Work
) -> None:
    work.errors = [ValueError("broken")] * 2
    queue.add("a")
    await asyncio.sleep(1)
    work.errors = [ValueError("broken")]
    queue.add("a")
    await asyncio.sleep(1)
    assert work.looks == {"a": [0.0, 0.05, 0.15, 1.0, 1.05]}


async def test_a_conflict_is_no_failure(queue: KeyedQueue[str], work: Work) -> None:
    work.errors = [Conflict("changed")] * 3
    queue.add("a")
    await asyncio.sleep(1)
    assert work.looks == {"a": [0.0, *(round(CONFLICT_DELAY_S * n, 6) for n in (1, 3, 7))]}


async def test_conflicts_that_go_on_are_not_met_at_full_speed(queue: KeyedQueue[str], work: Work) -> None:
    work.errors = [Conflict("changed")] * 1000
    queue.add("a")
    await asyncio.sleep(20)
    gaps = [b - a for a, b in pairwise(work.looks["a"])]
    assert max(gaps) == pytest.approx(LONGEST_CONFLICT_DELAY_S)
    assert len(work.looks["a"]) < 60


async def test_a_key_with_nothing_left_is_looked_at_no_more(queue: KeyedQueue[str], work: Work) -> None:
    work.again_s = math.inf
    queue.add("a")
    await asyncio.sleep(1000)
    before = list(work.looks["a"])
    queue.add("a")
    await asyncio.sleep(1)
    assert (before, work.looks["a"]) == ([0.0], [0.0, 1000.0])


async def test_a_store_that_asks_for_patience_gets_it(queue: KeyedQueue[str], work: Work) -> None:
    work.errors = [StoreUnavailable("busy", retry_after_s=3.0)]
    queue.add("a")
    await asyncio.sleep(10)
    assert work.looks == {"a": [0.0, 3.0]}


async def test_a_closed_queue_ends_what_is_at_work_and_takes_nothing(
    queue: KeyedQueue[str], work: Work
) -> None:
    work.took_s = 10.0
    queue.add("a")
    queue.add_after("b", 1.0)
    await asyncio.sleep(0.5)
    await queue.aclose()
    queue.add("c")
    queue.add_after("d", 1.0)
    await asyncio.sleep(50)
    assert work.looks == {"a": [0.0]}


def test_the_wait_after_a_failure_is_bounded() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 50)] == [0.05, 0.1, 0.2, 5.0]
