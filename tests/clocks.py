"""The clocks of tests: each implements `fulcrum_core.ports.Clock`, and only the test moves its time.

Tests of loops on asyncio's own time use `looptime` or `simulation/virtual_time.py` instead.
"""

import asyncio
from dataclasses import dataclass


@dataclass
class ManualClock:
    """A clock that shows `at_s` until the test sets another time."""

    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


@dataclass(frozen=True)
class LoopClock:
    """The running event loop's time; unix time is `epoch_s` at the loop's time 0."""

    epoch_s: float = 0.0

    def now_s(self) -> float:
        return self.epoch_s + asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()
