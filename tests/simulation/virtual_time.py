"""An event loop whose clock jumps to the next timer: a minute of the whole loop passes in a second or two.

Nothing here touches sockets or threads. A world in which nothing will ever happen again is an error, not
a hang.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_S = 1_750_000_000.0
"""Unix time at which every simulated world begins."""


class Deadlock(RuntimeError):
    """Everybody waits and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a file it moves the clock on by the whole time-out."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing will ever happen again")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop on virtual time, which starts at 0."""

    virtual_time = True
    """Lets `tests.waiting.advance` accept this loop."""

    def __init__(self) -> None:
        self._jumping_selector = _JumpingSelector()
        super().__init__(self._jumping_selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping_selector.now_s


class VirtualClock:
    """`fulcrum_core.ports.Clock` on the running virtual loop."""

    def now_s(self) -> float:
        return EPOCH_S + asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


def run_on_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
