"""How tests wait: for a condition with a deadline, for pending tasks, or by moving a virtual clock.

The only module under `tests/` that may call a sleep function.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_INTERVAL_S = 0.005
_PENDING_PASSES = 20


async def wait_until(
    condition: Callable[[], Any | Awaitable[Any]],
    description: str = "condition",
    *,
    timeout_s: float = 20.0,
    interval_s: float = POLL_INTERVAL_S,
) -> None:
    """Poll `condition`, a function or a coroutine function, until it returns a true value.

    `interval_s` is the time between two polls; use a longer one if a poll costs the machine something.

    Raises:
        TimeoutError: naming `description`, if the condition is still false after `timeout_s`.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        if asyncio.get_running_loop().time() >= deadline_s:
            raise TimeoutError(f"not reached within {timeout_s:g} s: {description}")
        await asyncio.sleep(interval_s)


async def wait_until_time(deadline_s: float, reason: str) -> None:
    """Wait until `time.monotonic()` is at least `deadline_s`, for tests of something's real age.

    `reason` says why no condition can be waited for instead.
    """
    assert reason
    await asyncio.sleep(max(0.0, deadline_s - time.monotonic()))


async def advance(seconds: float) -> None:
    """Let virtual time pass; refused on an event loop that runs in real time."""
    loop = asyncio.get_running_loop()
    virtual = getattr(loop, "looptime_on", False) or getattr(loop, "virtual_time", False)
    assert virtual, "advance() needs a virtual clock: mark the test with looptime"
    await asyncio.sleep(seconds)


async def yield_control(times: int) -> None:
    """Let other tasks run `times` turns of the event loop, to interleave concurrent writers."""
    for _ in range(times):
        await asyncio.sleep(0)


async def run_pending_tasks() -> None:
    """Run the event loop until tasks that are ready have run, and the tasks that they made ready."""
    for _ in range(_PENDING_PASSES):
        await asyncio.sleep(0)
