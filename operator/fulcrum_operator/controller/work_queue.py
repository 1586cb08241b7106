"""Work queue of the operator: which services to reconcile and when, not why.

A key is handled at most once at a time; a key that is added meanwhile is handled once more afterwards. The
delay doubles with each failure in a row, but is never shorter than a `Retry-After` of the API server; after
conflicts it is much shorter, and an event ends it. Without events a key is handled every `resync_s`, since an
event may have been missed, until its handler returns infinity. `leader` and a local run have one; events and
watches add keys.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import structlog

from fulcrum_core.errors import Conflict, StoreUnavailable

K = TypeVar("K", bound=Hashable)

RETRY_DELAY_MIN_S = 0.05
"""Delay after the first failure, in seconds."""
RETRY_DELAY_MAX_S = 5.0
"""Longest delay after failures, in seconds."""
CONFLICT_DELAY_MIN_S = 0.005
"""Delay after the first conflict, in seconds. The object can be read again at once, so it is short."""
CONFLICT_DELAY_MAX_S = 0.5
"""Longest delay after repeated conflicts, in seconds."""

_log = structlog.get_logger()


class WorkQueue(Generic[K]):
    """Calls `handle(key)` for every key added; different keys run concurrently.

    Args:
        handle: Handles one key; returns the seconds until the next call, None for the resync period, or
            infinity to forget the key.
        resync_s: Longest time between two calls for a key, in seconds.
    """

    def __init__(self, handle: Callable[[K], Awaitable[float | None]], *, resync_s: float) -> None:
        self._handle, self._resync_s = handle, resync_s
        self._running: dict[K, asyncio.Task[None]] = {}
        self._added_while_running: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._conflicts: dict[K, int] = {}
        self._closed = False

    def add(self, key: K) -> None:
        """Handle the key now, or once more after the call that is running."""
        if self._closed:
            return
        if key in self._running:
            self._added_while_running.add(key)
            return
        self._cancel_timer(key)
        self._running[key] = asyncio.get_running_loop().create_task(self._run_key(key))

    def add_after(self, key: K, delay_s: float) -> None:
        """Handle the key in `delay_s` seconds, unless it is due earlier already."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        timer = self._timers.get(key)
        if self._closed or (timer is not None and timer.when() <= due_s):
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_at(due_s, self._on_timer, key)

    @property
    def running_count(self) -> int:
        """Number of keys that are being handled."""
        return len(self._running)

    async def aclose(self) -> None:
        """Ignore keys from now on and cancel the running calls; returns when they have ended."""
        self._closed = True
        for key in list(self._timers):
            self._cancel_timer(key)
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_timer(self, key: K) -> None:
        del self._timers[key]
        self.add(key)

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def _run_key(self, key: K) -> None:
        requeue_after_s = await self._handle_once(key)
        del self._running[key]
        if key in self._added_while_running:
            self._added_while_running.discard(key)
            self.add(key)
        elif requeue_after_s < math.inf:
            self.add_after(key, requeue_after_s)

    async def _handle_once(self, key: K) -> float:
        """Handle the key once; returns the seconds until the next time."""
        try:
            requeue_after_s = await self._handle(key)
        except Conflict:
            conflicts = self._conflicts[key] = self._conflicts.get(key, 0) + 1
            return backoff_s(conflicts, min_s=CONFLICT_DELAY_MIN_S, max_s=CONFLICT_DELAY_MAX_S)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay_s = max(backoff_s(failures), _retry_after_s(error))
            _log.warning(
                "reconcile failed", key=str(key), failures=failures, retry_s=delay_s, error=repr(error)
            )
            return delay_s
        self._failures.pop(key, None)
        self._conflicts.pop(key, None)
        if requeue_after_s == math.inf:
            return math.inf
        return self._resync_s if requeue_after_s is None else min(requeue_after_s, self._resync_s)


def backoff_s(failures: int, *, min_s: float = RETRY_DELAY_MIN_S, max_s: float = RETRY_DELAY_MAX_S) -> float:
    """Seconds to wait after this number of consecutive failures: doubles from `min_s` to `max_s`."""
    return float(min(max_s, min_s * 2 ** min(failures - 1, 20)))


def _retry_after_s(error: Exception) -> float:
    """Seconds that the API server asked to wait (Retry-After)."""
    return error.retry_after_s or 0.0 if isinstance(error, StoreUnavailable) else 0.0
