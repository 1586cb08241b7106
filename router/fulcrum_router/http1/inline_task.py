"""Inline tasks: run a request's coroutine without an asyncio task.

The coroutine resumes inside the callback that completes its wait. That saves one event-loop turn per leg
(10 % of the router's CPU with short prompts), and a client disconnect cancels both legs at once. Such a
coroutine awaits `Completion`s only; it runs asyncio coroutines with `run_in_asyncio_task`.

`exchange` and `pass_through` run each request as one; canaries and probes use `run_inline`. `Turns` lets long
work of several requests alternate with other callbacks.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Completion(Generic[T]):
    """A result that one inline task awaits; it is set once."""

    __slots__ = ("_error", "_value", "_waiter", "done")

    def __init__(self) -> None:
        self._waiter: InlineTask | None = None
        self._error: BaseException | None = None
        self.done = False

    def __await__(self) -> Generator["Completion[T]", None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value

    def set_result(self, value: T) -> None:
        """Set the result and resume the waiter before returning. Ignored if already done."""
        if not self.done:
            self._value: T = value
            self._finish()

    def set_exception(self, error: BaseException) -> None:
        """Set the exception and resume the waiter before returning. Ignored if already done."""
        if not self.done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self.done = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.resume()

    def set_waiter(self, waiter: "InlineTask | None") -> None:
        """Set the inline task that is resumed at completion; None removes it."""
        self._waiter = waiter


class InlineTask:
    """Runs a coroutine that awaits completions only; the first `resume` starts it.

    The coroutine must catch its exceptions: one that leaves it reaches whoever called `resume` or `cancel`,
    or set the result that it awaited.
    """

    __slots__ = ("_coroutine", "_waiting_for")

    def __init__(self, coroutine: Coroutine[Completion[Any], None, None]) -> None:
        self._coroutine = coroutine
        self._waiting_for: Completion[Any] | None = None

    def resume(self) -> None:
        """Run the coroutine until its next await, or its end."""
        try:
            self._waiting_for = completion = self._coroutine.send(None)
        except StopIteration:
            self._waiting_for = None
            return
        completion.set_waiter(self)

    def cancel(self) -> None:
        """Raise CancelledError at the current await. Without effect if the coroutine has ended."""
        completion, self._waiting_for = self._waiting_for, None
        if completion is None:
            return
        completion.set_waiter(None)
        try:
            self._waiting_for = completion = self._coroutine.throw(asyncio.CancelledError())
        except (StopIteration, asyncio.CancelledError):
            return
        completion.set_waiter(self)


LONG_TURN_S = 0.002
"""Processor time of a turn after which others are given time."""


class Turns:
    """Gives inline tasks that ask for one a turn of the event loop each, in their order.

    After a turn that took long, all else has as much time before the next one. `clock` is processor time.
    """

    __slots__ = ("_clock", "_waiting")

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._waiting: deque[Completion[None]] = deque()

    def take(self) -> Completion[None]:
        """Awaited in an inline task: go on in a later turn of the event loop, in which no other one does."""
        completion: Completion[None] = Completion()
        self._waiting.append(completion)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._give)
        return completion

    def _give(self) -> None:
        began_s = self._clock()
        try:
            self._waiting[0].set_result(None)  # it stays in the line meanwhile: whoever joins does not begin
        finally:
            self._waiting.popleft()
            if self._waiting:
                took_s, loop = self._clock() - began_s, asyncio.get_running_loop()
                if took_s < LONG_TURN_S:
                    loop.call_soon(self._give)
                else:
                    loop.call_later(took_s, self._give)


async def run_in_asyncio_task(
    coroutine: Coroutine[Any, Any, T], *, discard: Callable[[T], object] | None = None
) -> T:
    """Called in an inline task: run an asyncio coroutine and return its result.

    `discard` is called with a result that the caller does not get, because the caller was cancelled in the
    turn of the event loop in which the coroutine returned.
    """
    completion: Completion[T] = Completion()
    abandoned = False

    def done(task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            completion.set_exception(error)
        elif not abandoned:
            completion.set_result(task.result())
        elif discard is not None:
            discard(task.result())

    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(done)
    try:
        return await completion
    finally:
        abandoned = True
        task.cancel()


async def run_inline(coroutine: Coroutine[Completion[Any], None, T]) -> T:
    """Called in an asyncio task: run a coroutine that awaits completions and return its result."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            value = await coroutine
        except BaseException as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(value)

    inline_task = InlineTask(run())
    inline_task.resume()
    try:
        return await future
    finally:
        inline_task.cancel()
