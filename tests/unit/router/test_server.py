"""Background tasks of a router: cancelled at the end, and logged if they fail."""

import asyncio

from structlog.testing import capture_logs

from fulcrum_router.server import background_task
from tests.waiting import run_pending_tasks


async def wait_forever(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def fail() -> None:
    raise KeyError("type")


async def test_a_background_task_is_cancelled_when_the_block_ends() -> None:
    ended = asyncio.Event()
    with capture_logs() as logs:
        async with background_task(wait_forever(ended)):
            await run_pending_tasks()
    assert (ended.is_set(), logs) == (True, [])


async def test_a_failed_background_task_is_logged_before_the_block_ends() -> None:
    with capture_logs() as logs:
        async with background_task(fail()):
            await run_pending_tasks()
            assert [(line["log_level"], repr(line["exc_info"])) for line in logs] == [
                ("error", "KeyError('type')")
            ]
