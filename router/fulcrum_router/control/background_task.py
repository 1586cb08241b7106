"""Work that goes on beside what a router serves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs it meanwhile. If a fault ends it, that is told at once: the router serves on without it."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_tell_fault)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def _tell_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.error("a part of the router ended by a fault", part=task.get_coro(), exc_info=fault)
