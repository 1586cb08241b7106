"""Work that goes on beside what a router serves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def background_task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs it meanwhile. If a fault ends it, that is told at once: the router serves on without it."""
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background task failed", task=task.get_coro(), exc_info=error)
