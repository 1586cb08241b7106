"""Inline tasks: resumption, turns of the event loop, cancellation, and calls from and to asyncio tasks."""

import asyncio

import pytest

from fulcrum_router.http1.inline_task import Completion, InlineTask, Turns, run_in_asyncio_task, run_inline
from tests.waiting import run_pending_tasks, yield_control


def test_an_inline_task_resumes_before_set_result_returns() -> None:
    completion: Completion[int] = Completion()
    got: list[int] = []

    async def run() -> None:
        got.append(await completion)

    inline_task = InlineTask(run())
    inline_task.resume()
    assert got == []
    completion.set_result(5)
    assert got == [5]


def test_a_done_completion_does_not_suspend_and_keeps_its_first_result() -> None:
    completion: Completion[int] = Completion()
    completion.set_result(5)
    completion.set_result(6)
    completion.set_exception(ValueError())
    got: list[int] = []

    async def run() -> None:
        got.append(await completion)

    InlineTask(run()).resume()
    assert got == [5]


async def test_tasks_take_turns_of_the_event_loop_in_their_order() -> None:
    turns, taken, turn = Turns(), list[tuple[str, int]](), 0

    async def run(name: str) -> None:
        await turns.take()
        taken.append((name, turn))

    tasks = {name: InlineTask(run(name)) for name in "abcd"}
    for task in tasks.values():
        task.resume()
    tasks["b"].cancel()
    for turn in range(1, 6):  # noqa: B007  # read by `run`
        await yield_control(1)
    assert [name for name, _ in taken] == ["a", "c", "d"]
    assert len({turn for _, turn in taken}) == 3


async def test_after_a_long_turn_others_have_as_much_time() -> None:
    clock_s, loop, began_s = [0.0], asyncio.get_running_loop(), list[float]()
    turns = Turns(clock=lambda: clock_s[0])
    done = asyncio.Event()

    async def work(took_s: float) -> None:
        await turns.take()
        began_s.append(loop.time())
        clock_s[0] += took_s
        if len(began_s) == 2:
            done.set()

    for took_s in (0.03, 0.0):
        InlineTask(work(took_s)).resume()
    await done.wait()
    assert began_s[1] - began_s[0] >= 0.028  # the event loop rounds to milliseconds


async def test_a_turn_that_fails_does_not_end_the_line() -> None:
    turns, done = Turns(), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    async def fail() -> None:
        await turns.take()
        raise ValueError

    async def work() -> None:
        await turns.take()
        done.set()

    InlineTask(fail()).resume()
    InlineTask(work()).resume()
    await done.wait()


def test_cancel_raises_at_the_await_at_once() -> None:
    completion: Completion[None] = Completion()
    events: list[str] = []

    async def run() -> None:
        try:
            await completion
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        finally:
            events.append("cleaned up")

    inline_task = InlineTask(run())
    inline_task.resume()
    inline_task.cancel()
    inline_task.cancel()
    completion.set_result(None)
    assert events == ["cancelled", "cleaned up"]


async def test_an_error_propagates_through_inline_task_and_asyncio_task() -> None:
    completion: Completion[None] = Completion()

    async def run() -> None:
        await completion

    asyncio.get_running_loop().call_soon(completion.set_exception, KeyError("missing"))
    with pytest.raises(KeyError):
        await run_inline(run())


async def test_an_inline_task_can_await_asyncio() -> None:
    async def wait_one_turn(value: int) -> int:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        await turn
        return value

    async def run() -> list[int]:
        return [await run_in_asyncio_task(wait_one_turn(n)) for n in range(3)]

    assert await run_inline(run()) == [0, 1, 2]


async def test_cancelling_an_inline_task_cancels_the_asyncio_task_it_awaits() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def run() -> None:
        await run_in_asyncio_task(forever())

    inline_task = InlineTask(run())
    inline_task.resume()
    async with asyncio.timeout(20.0):
        await started.wait()
        inline_task.cancel()
        await cancelled.wait()


async def test_a_result_that_comes_in_the_turn_of_the_cancellation_is_discarded() -> None:
    """At the cancellation, the asyncio task has ended, but its done callback has not run yet."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    discarded: list[str] = []

    async def wait() -> str:
        return await future

    async def run() -> None:
        await run_in_asyncio_task(wait(), discard=discarded.append)

    inline_task = InlineTask(run())
    inline_task.resume()
    await run_pending_tasks()
    future.set_result("connection")
    loop = asyncio.get_running_loop()
    loop.call_soon(inline_task.cancel)  # after the task has run, before its callbacks
    await run_pending_tasks()
    assert discarded == ["connection"]


async def test_cancelling_an_asyncio_task_cancels_the_inline_task_it_awaits() -> None:
    completion: Completion[None] = Completion()
    started = asyncio.Event()
    events: list[str] = []

    async def run() -> None:
        started.set()
        try:
            await completion
        finally:
            events.append("cleaned up")

    task = asyncio.create_task(run_inline(run()))
    async with asyncio.timeout(20.0):
        await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["cleaned up"]
