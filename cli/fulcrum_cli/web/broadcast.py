"""Sends each new state of a service to all open pages. A page that reads slowly skips states.

Every page has a queue of `QUEUE_MAX` states; the oldest is dropped for a new one. So a page that stops
reading costs little memory and slows nothing down. `feed` or `replay` sends, and `server` has a queue for
each connection.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from fulcrum_core.errors import FulcrumError

PAGES_MAX = 50
"""Pages that may be open at a time."""
QUEUE_MAX = 2
"""States that wait for one page."""


class TooManyPages(FulcrumError):
    """The limit of open pages is reached."""


class PageQueue:
    """The states that one page has not read yet."""

    def __init__(self) -> None:
        self._states: deque[bytes] = deque(maxlen=QUEUE_MAX)
        self._added = asyncio.Event()

    def put(self, state: bytes) -> None:
        """Add a state; if the queue is full, drop the oldest."""
        self._states.append(state)
        self._added.set()

    async def get(self) -> bytes:
        """Remove and return the oldest state, waiting for one."""
        while not self._states:
            self._added.clear()
            await self._added.wait()
        return self._states.popleft()


class Broadcast:
    """The open pages of one service."""

    def __init__(self, *, pages_max: int = PAGES_MAX) -> None:
        self._pages: set[PageQueue] = set()
        self._pages_max = pages_max
        self._last: bytes | None = None
        self._opened = asyncio.Event()

    @property
    def open_pages(self) -> int:
        """Number of open pages."""
        return len(self._pages)

    @contextmanager
    def open_page(self) -> Iterator[PageQueue]:
        """Add a page for the time of the context; its queue begins with the last state.

        Raises:
            TooManyPages: if as many are open as may be.
        """
        if len(self._pages) >= self._pages_max:
            raise TooManyPages(f"{len(self._pages)} pages are open already; close one")
        queue = PageQueue()
        if self._last is not None:
            queue.put(self._last)
        self._pages.add(queue)
        self._opened.set()
        try:
            yield queue
        finally:
            self._pages.discard(queue)
            if not self._pages:
                self._opened.clear()

    async def wait_opened(self) -> None:
        """Wait until a page is open."""
        await self._opened.wait()

    def send(self, state: bytes) -> None:
        """Give the state to all open pages."""
        self._last = state
        for queue in self._pages:
            queue.put(state)
