"""The bucket: a burst is free, a flood waits its turn, a pause fills it again."""

import asyncio

from fulcrum_cluster.token_bucket import TokenBucket


class ManualClock:
    """A clock that only sleeping moves, and a record of the sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(round(seconds, 6))


def bucket(time: ManualClock) -> TokenBucket:
    return TokenBucket(10.0, 3, monotonic_s=lambda: time.now_s, sleep=time.sleep)


async def test_requests_within_the_burst_do_not_wait() -> None:
    time = ManualClock()
    full = bucket(time)
    for _ in range(3):
        await full.acquire()
    assert time.slept_s == []


async def test_requests_beyond_the_burst_wait_in_turn() -> None:
    time = ManualClock()
    full = bucket(time)
    await asyncio.gather(*(full.acquire() for _ in range(6)))
    assert time.slept_s == [0.1, 0.2, 0.3]


async def test_idle_time_refills_the_bucket_up_to_the_burst() -> None:
    time = ManualClock()
    full = bucket(time)
    await asyncio.gather(*(full.acquire() for _ in range(3)))
    time.now_s = 60.0
    await asyncio.gather(*(full.acquire() for _ in range(4)))
    assert time.slept_s == [0.1]
