"""Background tasks of a router: cancelled at the end; logged, counted and started again if they fail."""

import asyncio

from structlog.testing import capture_logs

from fulcrum_router.control.background_task import background_task
from tests.waiting import run_pending_tasks


async def test_a_background_task_is_cancelled_when_the_block_ends() -> None:
    ended = asyncio.Event()

    async def wait_forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with capture_logs() as logs:
        async with background_task(wait_forever, name="waits", failures={}):
            await run_pending_tasks()
    assert (ended.is_set(), logs) == (True, [])


async def test_a_failed_background_task_is_logged_counted_and_started_again() -> None:
    starts, failures = 0, {"reads": 1}

    async def fail_twice() -> None:
        nonlocal starts
        starts += 1
        if starts <= 2:
            raise KeyError("type")
        await asyncio.Event().wait()

    with capture_logs() as logs:
        async with background_task(fail_twice, name="reads", failures=failures, restart_delay_s=0.0):
            await run_pending_tasks()
    assert (starts, failures, [line["task"] for line in logs]) == (3, {"reads": 3}, ["reads", "reads"])


async def test_a_background_task_that_returns_is_not_started_again() -> None:
    starts = 0

    async def run() -> None:
        nonlocal starts
        starts += 1

    async with background_task(run, name="once", failures={}, restart_delay_s=0.0):
        await run_pending_tasks()
    assert starts == 1
