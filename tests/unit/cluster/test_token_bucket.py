"""The token bucket: a burst does not wait, further requests wait in turn, idle time refills it."""

import asyncio

from fulcrum_cluster.token_bucket import TokenBucket


class SleepRecorder:
    """A clock that the test sets, with a sleep function that only records its delays."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(round(seconds, 6))


def bucket(clock: SleepRecorder) -> TokenBucket:
    return TokenBucket(10.0, 3, monotonic_s=lambda: clock.now_s, sleep=clock.sleep)


async def test_requests_within_the_burst_do_not_wait() -> None:
    clock = SleepRecorder()
    full = bucket(clock)
    for _ in range(3):
        await full.acquire()
    assert clock.slept_s == []


async def test_requests_beyond_the_burst_wait_in_turn() -> None:
    clock = SleepRecorder()
    full = bucket(clock)
    await asyncio.gather(*(full.acquire() for _ in range(6)))
    assert clock.slept_s == [0.1, 0.2, 0.3]


async def test_idle_time_refills_the_bucket_up_to_the_burst() -> None:
    clock = SleepRecorder()
    full = bucket(clock)
    await asyncio.gather(*(full.acquire() for _ in range(3)))
    clock.now_s = 60.0
    await asyncio.gather(*(full.acquire() for _ in range(4)))
    assert clock.slept_s == [0.1]
