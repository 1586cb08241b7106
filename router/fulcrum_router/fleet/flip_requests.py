"""What others wait for: the applied PDAssignment generation, and flip requests.

The state port's long polls wait for both. A request that asks for a flip waits a moment for the next
generation; how long is decided by its journey (`policy.journey`).

The router's state holds both: `observe.objects` advances the generation and the data path submits flip
requests.
"""

import asyncio
import time

from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import Role
from fulcrum_router.policy.newest_flip_requests import NewestFlipRequests


class Notifier:
    """Wakes all waiting coroutines at once. Unlike `asyncio.Event`, it does not stay set."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        """Wake every coroutine that is in `wait`."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify_all`; False if `timeout_s` passes first."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True


class AppliedAssignment:
    """The last PDAssignment generation that dispatch uses: the router's acknowledgement."""

    def __init__(self) -> None:
        self.generation = 0
        """0: none was applied yet."""
        self.applied_at_s = 0.0
        """Unix time at which `generation` was applied."""
        self._advanced = Notifier()

    def advance(self, generation: int, applied_at_s: float) -> None:
        """Record that dispatch uses `generation` from now on, and wake those who wait for it."""
        self.generation, self.applied_at_s = generation, applied_at_s
        self._advanced.notify_all()

    async def wait_until_reached(self, generation: int, timeout_s: float) -> bool:
        """Wait for `generation` or a later one; False if `timeout_s` passes first."""
        deadline_s = time.monotonic() + timeout_s
        while self.generation < generation:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not await self._advanced.wait(left_s):
                return self.generation >= generation
        return True

    async def wait_until_next(self, timeout_s: float) -> bool:
        """Wait for the next `advance`; False if `timeout_s` passes first."""
        return await self._advanced.wait(timeout_s)


class FlipRequests:
    """Flip requests for the autoscaler, which reads the newest for each role by a long poll."""

    def __init__(self) -> None:
        self._newest = NewestFlipRequests()
        self._submitted = Notifier()

    @property
    def last(self) -> FlipRequest | None:
        """The last flip request; None: none yet."""
        return self._newest.last

    @property
    def seq(self) -> int:
        """Number of the last flip request; 0: none yet."""
        return self._newest.seq

    def submit(self, role: Role, reason: str) -> None:
        """Publish a flip request."""
        self._newest.submit(role, reason)
        self._submitted.notify_all()

    async def wait_after(self, seq: int, timeout_s: float) -> FlipRequest | None:
        """Wait for flip requests after number `seq`; None if `timeout_s` passes first.

        Returns the last one, with the newest for the other role if that is after `seq`, too.
        """
        if self.seq <= seq:
            await self._submitted.wait(timeout_s)
        return self._newest.find_after(seq)
