"""A coroutine that goes on in the callback that it waited for."""

import asyncio

import pytest

from fulcrum_router.http1.inline_task import Completion, Flow, from_task, in_task


def test_it_goes_on_before_the_completion_s_setter_returns() -> None:
    completion: Completion[int] = Completion()
    got: list[int] = []

    async def run() -> None:
        got.append(await completion)

    flow = Flow(run())
    flow.resume()
    assert got == []
    completion.set_result(5)
    assert got == [5]


def test_what_has_happened_already_is_not_waited_for() -> None:
    completion: Completion[int] = Completion()
    completion.set_result(5)
    completion.set_result(6)
    completion.set_exception(ValueError())
    got: list[int] = []

    async def run() -> None:
        got.append(await completion)

    Flow(run()).resume()
    assert got == [5]


def test_cancelling_raises_where_it_waits_and_at_once() -> None:
    completion: Completion[None] = Completion()
    seen: list[str] = []

    async def run() -> None:
        try:
            await completion
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            seen.append("cleaned up")

    flow = Flow(run())
    flow.resume()
    flow.cancel()
    flow.cancel()
    completion.set_result(None)
    assert seen == ["cancelled", "cleaned up"]


async def test_an_error_reaches_who_waits_in_a_flow_and_in_a_task() -> None:
    completion: Completion[None] = Completion()

    async def run() -> None:
        await completion

    asyncio.get_running_loop().call_soon(completion.set_exception, KeyError("gone"))
    with pytest.raises(KeyError):
        await from_task(run())


async def test_a_flow_may_wait_for_asyncio() -> None:
    async def slow(value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def run() -> list[int]:
        return [await in_task(slow(n)) for n in range(3)]

    assert await from_task(run()) == [0, 1, 2]


async def test_cancelling_a_flow_cancels_the_task_that_it_waits_for() -> None:
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def run() -> None:
        await in_task(forever())

    flow = Flow(run())
    flow.resume()
    await asyncio.sleep(0)
    flow.cancel()
    async with asyncio.timeout(20.0):
        await cancelled.wait()


async def test_cancelling_a_task_cancels_the_flow_that_it_waits_for() -> None:
    completion: Completion[None] = Completion()
    seen: list[str] = []

    async def run() -> None:
        try:
            await completion
        finally:
            seen.append("cleaned up")

    task = asyncio.create_task(from_task(run()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cleaned up"]
