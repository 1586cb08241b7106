"""The bounded log of a `MemoryStore`'s changes, from which its watches read.

A watch is a position in the log, so a slow watch costs no memory and needs no subscription. A watch that
falls behind the start of the log gets `Gone` and must list again. Only `memory_store` uses it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import Gone
from fulcrum_core.ports import WatchEvent


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """One change of one object."""

    kind: type[Resource]
    namespace: str
    event: WatchEvent[Any]


class EventLog:
    """The last `size` changes. Versions are consecutive: each change makes the next one."""

    def __init__(self, *, start: int, size: int) -> None:
        self.last_version = start
        self._changes: deque[LoggedChange] = deque(maxlen=size)
        self._appended = asyncio.Event()

    def append(self, record: LoggedChange) -> None:
        """Add the change that made version `last + 1`, and wake all waiting watches."""
        self.last_version += 1
        self._changes.append(record)
        self._appended.set()
        self._appended = asyncio.Event()

    def change_after(self, version: int) -> LoggedChange:
        """The change after `version`, which must be below `last_version`; `Gone` if it was dropped."""
        index = version - self.last_version + len(self._changes)
        if index < 0:
            raise Gone(f"resourceVersion {version} is too old: list again")
        return self._changes[index]

    async def wait_for_change(self, version: int, *, timeout_s: float) -> bool:
        """Wait for a change after `version`; False if none came in time."""
        if self.last_version > version:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._appended.wait()
        except TimeoutError:
            return False
        return True
