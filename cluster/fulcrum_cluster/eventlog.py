"""What happened in a store, in order: a bounded log that watches read at their own pace.

A watch is a cursor into the log, so a slow reader costs no memory and nobody has to subscribe or leave; one
that falls behind the log's start is `Gone` and lists again.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import Gone
from fulcrum_core.ports import WatchEvent


@dataclass(frozen=True, slots=True)
class Record:
    """One change, at the version that it made."""

    kind: type[Resource]
    namespace: str
    event: WatchEvent[Any]


class EventLog:
    """The last `size` changes. Versions are consecutive: each change makes the next one."""

    def __init__(self, *, start: int, size: int) -> None:
        self.last = start
        self._records: deque[Record] = deque(maxlen=size)
        self._grown = asyncio.Event()

    def append(self, record: Record) -> None:
        """Add the change that made version `last + 1`, and wake all who wait."""
        self.last += 1
        self._records.append(record)
        self._grown.set()
        self._grown = asyncio.Event()

    def after(self, version: int) -> Record:
        """The change that followed `version`, which is less than `last`; `Gone` if it is forgotten."""
        index = version - self.last + len(self._records)
        if index < 0:
            raise Gone(f"resourceVersion {version} is too old: list again")
        return self._records[index]

    async def grown_beyond(self, version: int, *, timeout_s: float) -> bool:
        """Wait for a change after `version`; False if none came in time."""
        if self.last > version:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._grown.wait()
        except TimeoutError:
            return False
        return True
