"""The bucket: a burst is free, a flood waits its turn, a pause fills it again."""

import asyncio

from fulcrum_cluster.bucket import Bucket


class Time:
    """A clock that stands still unless told, and what was slept."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(round(seconds, 6))


def bucket(time: Time) -> Bucket:
    return Bucket(10.0, 3, monotonic_s=lambda: time.now_s, sleep=time.sleep)


async def test_a_burst_need_not_wait() -> None:
    time = Time()
    full = bucket(time)
    for _ in range(3):
        await full.take()
    assert time.slept_s == []


async def test_what_comes_at_once_waits_one_behind_the_other() -> None:
    time = Time()
    full = bucket(time)
    await asyncio.gather(*(full.take() for _ in range(6)))
    assert time.slept_s == [0.1, 0.2, 0.3]


async def test_a_pause_fills_it_again_and_no_further() -> None:
    time = Time()
    full = bucket(time)
    await asyncio.gather(*(full.take() for _ in range(3)))
    time.now_s = 60.0
    await asyncio.gather(*(full.take() for _ in range(4)))
    assert time.slept_s == [0.1]
