"""Background tasks of a router: work that is not part of a request, and that has to continue after a failure.

`server` runs probes, watches, canaries, failover and the checks of time-outs with it. A failed task is
logged, counted and started again. Otherwise the router would continue to serve requests, but without
time-outs, probes of its engines or changes of its objects. A request is never run this way.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, MutableMapping
from typing import Any

import structlog

log = structlog.get_logger()

RESTART_DELAY_S = 1.0
"""Seconds between the failure of a task and its next start."""


@contextlib.asynccontextmanager
async def background_task(
    run: Callable[[], Coroutine[Any, Any, None]],
    *,
    name: str,
    failures: MutableMapping[str, int],
    restart_delay_s: float = RESTART_DELAY_S,
) -> AsyncIterator[None]:
    """Run a task during the block; at the end, cancel it and wait until it has ended.

    Args:
        run: Starts the task; called again after each failure. A task that returns is not started again.
        name: Name of the task in logs and metrics.
        failures: Number of failures by task name; each failure adds 1.
        restart_delay_s: Seconds until a failed task is started again.
    """
    task = asyncio.get_running_loop().create_task(_run_again(run, name, failures, restart_delay_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _run_again(
    run: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    failures: MutableMapping[str, int],
    restart_delay_s: float,
) -> None:
    while True:
        try:
            await run()
            return
        except Exception:
            failures[name] = failures.get(name, 0) + 1
            log.exception("background task failed; starting it again", task=name, after_s=restart_delay_s)
        await asyncio.sleep(restart_delay_s)
