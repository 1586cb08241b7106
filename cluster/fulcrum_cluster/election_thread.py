"""A leader election in a thread with an event loop of its own: a busy program delays no renewal of its Lease.

When hundreds of objects change together, the event loop of a leader is busy for seconds, and a renewal takes
several of its turns. A program that hangs for good keeps its Lease, so it needs a liveness probe.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from fulcrum_cluster.leader_election import LeaderElector


class ElectionThread:
    """Runs an elector in a thread; the methods are those of the elector. Use it as a context manager.

    Args:
        make_elector: Creates the elector with the given `on_change`. Everything that the elector uses is used
            in the thread only.
        close: Closes what the elector uses, in the thread.
        on_change: Called in the event loop of the caller.
    """

    def __init__(
        self,
        make_elector: Callable[[Callable[[bool], None]], LeaderElector],
        close: Callable[[], Awaitable[None]],
        on_change: Callable[[bool], None],
    ) -> None:
        self._owner, self._on_change, self._close = asyncio.get_running_loop(), on_change, close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="election", daemon=True)
        self._elector = make_elector(self._notify)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    @property
    def leading(self) -> bool:
        """Whether to act as the leader now."""
        return self._elector.leading

    @property
    def holder(self) -> str | None:
        """Holder of the Lease when it was last observed."""
        return self._elector.holder

    async def run(self) -> None:
        """Take part in the election until cancelled; an error of the election is raised."""
        await self._call(self._elector.run())

    async def release(self) -> None:
        """Release the Lease; `on_change` was called when this returns."""
        await self._call(self._elector.release())

    async def _close_all(self) -> None:
        await self._close()

    async def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _notify(self, leads: bool) -> None:
        self._owner.call_soon_threadsafe(self._on_change, leads)
