"""The functions with which tests wait (`tests/waiting.py`) end at the condition or at the deadline."""

import asyncio

import pytest

from tests.waiting import advance, run_pending_tasks, wait_until


@pytest.mark.looptime
async def test_wait_until_returns_once_the_condition_is_true() -> None:
    values = iter([False, False, True])
    await wait_until(lambda: next(values))
    assert list(values) == []


@pytest.mark.looptime
async def test_wait_until_accepts_a_coroutine_function() -> None:
    async def condition() -> bool:
        return asyncio.get_running_loop().time() > 1.0

    await wait_until(condition)
    assert asyncio.get_running_loop().time() > 1.0


@pytest.mark.looptime
async def test_wait_until_names_the_condition_that_was_not_reached() -> None:
    with pytest.raises(TimeoutError, match=r"not reached within 2 s: the pod is ready"):
        await wait_until(lambda: False, "the pod is ready", timeout_s=2.0)


@pytest.mark.looptime(start=5.0)
async def test_advance_moves_a_virtual_clock() -> None:
    await advance(3.0)
    assert asyncio.get_running_loop().time() == pytest.approx(8.0)


async def test_advance_is_refused_on_a_real_clock() -> None:
    with pytest.raises(AssertionError, match="needs a virtual clock"):
        await advance(0.0)


async def test_run_pending_tasks_also_runs_tasks_created_by_tasks() -> None:
    done = asyncio.Event()

    async def create_another() -> None:
        asyncio.get_running_loop().call_soon(done.set)

    task = asyncio.create_task(create_another())
    await run_pending_tasks()
    assert done.is_set()
    await task
