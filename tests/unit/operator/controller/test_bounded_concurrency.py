"""`run_bounded` limits how many calls run at a time and raises the first failure at the end."""

import asyncio

import pytest

from fulcrum_operator.controller.bounded_concurrency import CONCURRENCY_MAX, run_bounded
from tests.waiting import advance

pytestmark = pytest.mark.looptime


class Calls:
    def __init__(self) -> None:
        self.running = self.running_max = 0
        self.ended: list[int] = []

    async def call(self, number: int, *, fails: bool = False) -> None:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await advance(1)
        self.running -= 1
        if fails:
            raise ValueError(number)
        self.ended.append(number)


async def test_no_more_than_the_maximum_run_at_a_time() -> None:
    calls, begun_s = Calls(), asyncio.get_running_loop().time()
    await run_bounded(calls.call(number) for number in range(CONCURRENCY_MAX * 3))
    assert (calls.running_max, sorted(calls.ended)) == (CONCURRENCY_MAX, list(range(CONCURRENCY_MAX * 3)))
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(3.0)


async def test_a_failure_is_raised_after_all_other_calls_have_ended() -> None:
    calls = Calls()
    with pytest.raises(ValueError, match=r"3|5"):
        await run_bounded(calls.call(number, fails=number in (3, 5)) for number in range(CONCURRENCY_MAX * 2))
    assert sorted(calls.ended) == [number for number in range(CONCURRENCY_MAX * 2) if number not in (3, 5)]


async def test_no_calls_return_at_once() -> None:
    await run_bounded(())
