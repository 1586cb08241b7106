"""Limits the request rate of one program, so that a bug of ours cannot overload the API server.

`transport` takes a token for each request. Rate limits of clients are the router's
(`policy.tiers.rate_limits`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable


class TokenBucket:
    """A token bucket: `rate` requests per second on average, `burst` at once after a pause.

    Args:
        rate: Requests per second.
        burst: Requests that may be sent at once after a pause.
        monotonic_s: The clock.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._burst = rate, burst
        self._monotonic_s, self._sleep = monotonic_s, sleep
        self._tokens, self._at_s = float(burst), monotonic_s()

    async def acquire(self) -> None:
        """Take one token; wait until one is free, in the order of the calls."""
        now_s = self._monotonic_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate) - 1
        self._at_s = now_s
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)
