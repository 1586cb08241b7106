"""A shell's view of one kind: listed, then followed, and kept while the store is away.

What a shell acts on is the mirror, never the store's answer of the moment: when the store is gone, the
last known state stands and the shell goes on serving.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import Gone, StoreUnavailable
from fulcrum_core.ports import EventType, Store, WatchEvent

R = TypeVar("R", bound=Resource)

OnChange = Callable[[R | None, R | None], None]

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0


class Mirror(Generic[R]):
    """All objects of one kind in a namespace, as last heard of; `run` keeps it current.

    Args:
        store: Where the objects are.
        kind: Which objects.
        namespace: Where.
        on_change: Called after each change with the object before and after it: None before an addition,
            None after a deletion.
        rng: Spreads the retries of many processes.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        store: Store,
        kind: type[R],
        *,
        namespace: str,
        on_change: OnChange[R] = lambda _old, _new: None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.synced = asyncio.Event()
        self._store, self._kind, self._namespace = store, kind, namespace
        self._on_change = on_change
        self._rng, self._sleep = rng or random.Random(), sleep
        self._objects: dict[str, R] = {}
        self._since: str | None = None
        self._failures = 0

    @property
    def objects(self) -> Mapping[str, R]:
        """The objects by name, as last heard of."""
        return MappingProxyType(self._objects)

    async def run(self) -> None:
        """Follow the store until cancelled. `synced` is set once the first list was taken in."""
        while True:
            try:
                await self._follow()
            except Gone:
                self._since = None
            except StoreUnavailable:
                pass  # the last known state stands
            await self._sleep(self._delay_s())
            self._failures += 1

    async def _follow(self) -> None:
        """List if there is nothing to resume from, then take in changes until the stream ends."""
        since = self._since or await self._relist()
        stream = self._store.watch(self._kind, namespace=self._namespace, since=since)
        async with aclosing(cast(AsyncGenerator[WatchEvent[R], None], stream)) as events:
            async for event in events:
                self._failures = 0
                self._since = event.resource_version
                self._take(event)

    async def _relist(self) -> str:
        listing = await self._store.list(self._kind, namespace=self._namespace)
        self._since = listing.resource_version
        current = {obj.metadata.name: obj for obj in listing.items}
        for name in sorted(self._objects.keys() - current.keys()):
            self._set(name, None)
        for name, obj in current.items():
            self._set(name, obj)
        self.synced.set()
        return listing.resource_version

    def _take(self, event: WatchEvent[R]) -> None:
        if event.object is None:
            return
        name = event.object.metadata.name
        self._set(name, None if event.type is EventType.DELETED else event.object)

    def _set(self, name: str, new: R | None) -> None:
        old = self._objects.get(name)
        if _version(old) == _version(new):
            return
        if new is None:
            del self._objects[name]
        else:
            self._objects[name] = new
        self._on_change(old, new)

    def _delay_s(self) -> float:
        """Doubling from 50 ms to 2 s, each between half and the whole of that."""
        longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(self._failures, 10))
        return float(longest * self._rng.uniform(0.5, 1.0))


def _version(obj: Resource | None) -> str | None:
    return None if obj is None else obj.metadata.resource_version
