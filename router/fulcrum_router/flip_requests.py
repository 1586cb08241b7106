"""What others wait for: the router's next epoch, and its next wish for a flip."""

import asyncio
import time

from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import Role

FLIP_WAIT_S = 0.05
"""How long a request waits for a flip that it wants."""
FLIP_WAIT_BACKOFF_S = 1.0
"""After a wait in vain, requests do not wait for the same role for this long."""


class Notifier:
    """Wakes everybody who waits."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        """Wake them."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """True when fired, False when the time is over."""
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
    """The last PDAssignment generation applied: the router's acknowledgement."""

    def __init__(self) -> None:
        self.generation = 0
        self.applied_at_s = 0.0
        self._advanced = Notifier()

    def advance(self, generation: int, applied_at_s: float) -> None:
        """Requests are dispatched by this generation from now on."""
        self.generation, self.applied_at_s = generation, applied_at_s
        self._advanced.notify_all()

    async def wait_until_reached(self, generation: int, timeout_s: float) -> bool:
        """Whether that generation, or a later one, is applied within the time."""
        deadline = time.monotonic() + timeout_s
        while self.generation < generation:
            left = deadline - time.monotonic()
            if left <= 0 or not await self._advanced.wait(left):
                return self.generation >= generation
        return True

    async def wait_until_next(self, timeout_s: float) -> bool:
        """Whether another generation is applied within the time."""
        return await self._advanced.wait(timeout_s)


class FlipRequests:
    """The flips that dispatch wants, for whoever can grant them."""

    def __init__(self, applied: AppliedAssignment) -> None:
        self._applied = applied
        self.last: FlipRequest | None = None
        self.wait_for_flip = False
        """Whether somebody acts on a wish: then the request waits a little for the new generation."""
        self._no_wait_until_s: dict[Role, float] = {}
        self._submitted = Notifier()

    @property
    def seq(self) -> int:
        """How many wishes there were."""
        return self.last.seq if self.last else 0

    async def submit(self, role: Role, reason: str) -> None:
        """Publish the wish; returns when roles have changed or the patience is over."""
        self.last = FlipRequest(seq=self.seq + 1, role=role, reason=reason)
        self._submitted.notify_all()
        if not self.wait_for_flip or time.monotonic() < self._no_wait_until_s.get(role, 0.0):
            return
        if not await self._applied.wait_until_next(FLIP_WAIT_S):
            self._no_wait_until_s[role] = time.monotonic() + FLIP_WAIT_BACKOFF_S

    async def wait_after(self, seq: int, timeout_s: float) -> FlipRequest | None:
        """The last wish, as soon as there is one later than `seq`; None when the time is over."""
        if self.seq <= seq:
            await self._submitted.wait(timeout_s)
        return self.last if self.seq > seq else None
