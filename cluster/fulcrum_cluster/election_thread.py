"""A leader election in a thread with an event loop of its own: a busy program delays no renewal of its Lease.

When hundreds of objects change together, the event loop of a leader is busy for seconds, and a renewal takes
several of its turns. A program whose event loop has not turned for longer hangs: it loses its Lease. The
operator runs its election so; routers are never as busy and use `leader_election` directly.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import structlog

from fulcrum_cluster.leader_election import LeaderElector
from fulcrum_core.ports import Clock

log = structlog.get_logger()

HUNG_AFTER_S = 15.0
"""Time without a turn of its event loop after which a program hangs, in seconds."""
_TURN_INTERVAL_S = 1.0


class ElectionThread:
    """Runs an elector in a thread; the methods are those of the elector. Use it as a context manager.

    Args:
        make_elector: Creates the elector with the given `on_change` and `able_to_lead`. Everything that the
            elector uses is used in the thread only.
        close: Closes what the elector uses, in the thread.
        on_change: Called in the event loop of the caller.
        hung_after_s: Time without a turn of the caller's event loop after which the Lease is neither renewed
            nor taken.
        clock: Measures that time.
    """

    def __init__(
        self,
        make_elector: Callable[[Callable[[bool], None], Callable[[], bool]], LeaderElector],
        close: Callable[[], Awaitable[None]],
        on_change: Callable[[bool], None],
        *,
        hung_after_s: float,
        clock: Clock,
    ) -> None:
        self._owner, self._on_change, self._close = asyncio.get_running_loop(), on_change, close
        self._hung_after_s, self._clock = hung_after_s, clock
        self._turned_at_s, self._hangs = clock.monotonic_s(), False
        self._turns: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="election", daemon=True)
        self._elector = make_elector(self._notify, self._owner_turns)

    async def __aenter__(self) -> Self:
        self._turns = self._owner.create_task(self._note_turns())
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        if self._turns is not None:
            self._turns.cancel()

    @property
    def leading(self) -> bool:
        """Whether to act as the leader now."""
        return self._elector.leading

    @property
    def holder(self) -> str | None:
        """Holder of the Lease when it was last observed; None: nobody."""
        return self._elector.holder

    async def run(self) -> None:
        """Take part in the election until cancelled; an error of the election is raised."""
        await self._call(self._elector.run())

    async def release(self) -> None:
        """Release the Lease; `on_change` was called when this returns."""
        await self._call(self._elector.release())

    async def _note_turns(self) -> None:
        while True:
            self._turned_at_s = self._clock.monotonic_s()
            await asyncio.sleep(_TURN_INTERVAL_S)

    def _owner_turns(self) -> bool:
        """Whether the caller's event loop does not hang; called in the thread."""
        silent_s = self._clock.monotonic_s() - self._turned_at_s
        hangs = silent_s > self._hung_after_s
        if hangs and not self._hangs:
            log.error("event loop hangs, lease not renewed", silent_s=round(silent_s, 1))
        self._hangs = hangs
        return not hangs

    async def _close_all(self) -> None:
        await self._close()

    async def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _notify(self, leads: bool) -> None:
        self._owner.call_soon_threadsafe(self._on_change, leads)
