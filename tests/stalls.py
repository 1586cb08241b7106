"""Measures how long one turn of the event loop works: everything else waits that long.

The router's tests of large bodies bound it. A turn is measured in processor time, so that a busy machine does
not show.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_INTERVAL_S = 0.002


class StallMeter:
    """Longest processor time between two of its calls, in seconds: other processes do not count."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.thread_time()
        self._running = True
        self._schedule()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_later(_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        now_s = time.thread_time()
        self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s
        if self._running:
            self._schedule()

    def stop(self) -> None:
        """Measure no more."""
        self._running = False


@asynccontextmanager
async def measure_stalls() -> AsyncIterator[StallMeter]:
    """Measure the turns of the event loop inside the block, without collecting the garbage of other tests."""
    gc.collect()
    gc.disable()
    meter = StallMeter()
    try:
        yield meter
    finally:
        meter.stop()
        gc.enable()
