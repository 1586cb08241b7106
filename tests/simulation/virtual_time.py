"""An asyncio event loop whose clock jumps to the next timer: a minute of simulated time takes a second or
two.

No sockets, no threads. If all tasks wait and no timer is set, the loop raises `Deadlock` instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_S = 1_750_000_000.0
"""Unix time at the start of every simulation."""


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock forward by the timeout instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("all tasks wait and no timer is set")
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


def run_on_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a new virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
