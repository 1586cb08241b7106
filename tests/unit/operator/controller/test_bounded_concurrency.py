"""Many calls, a few at a time."""

import asyncio

import pytest

from fulcrum_operator.controller.bounded_concurrency import AT_ONCE, side_by_side

pytestmark = pytest.mark.looptime


class Calls:
    def __init__(self) -> None:
        self.running = self.most = 0
        self.ended: list[int] = []

    async def call(self, number: int, *, fails: bool = False) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1)
        self.running -= 1
        if fails:
            raise ValueError(number)
        self.ended.append(number)


async def test_a_few_run_at_a_time() -> None:
    calls, begun_s = Calls(), asyncio.get_running_loop().time()
    await side_by_side(calls.call(number) for number in range(AT_ONCE * 3))
    assert (calls.most, sorted(calls.ended)) == (AT_ONCE, list(range(AT_ONCE * 3)))
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(3.0)


async def test_a_failure_is_raised_and_keeps_nobody_from_ending() -> None:
    calls = Calls()
    with pytest.raises(ValueError, match=r"3|5"):
        await side_by_side(calls.call(number, fails=number in (3, 5)) for number in range(AT_ONCE * 2))
    assert sorted(calls.ended) == [number for number in range(AT_ONCE * 2) if number not in (3, 5)]


async def test_nothing_to_do_is_done_at_once() -> None:
    await side_by_side(())
