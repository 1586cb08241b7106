"""A current copy of all Fulcrum objects of a kind (`Informer`), kept by list and watch (`Reflector`).

Router, autoscaler and CLI read the informer and not the store, so that they continue with the last known
state while the store is unavailable. The operator has a copy of its own, `controller/cache.py`: it also needs
pods and other kinds, and must read its own writes before a watch reports them.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Generic, TypeVar, cast

import structlog

from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import Gone, StoreError, StoreUnavailable
from fulcrum_core.ports import EventType, Store, WatchEvent

E = TypeVar("E")
R = TypeVar("R", bound=Resource)

OnChange = Callable[[R | None, R | None], None]

_log = structlog.get_logger()
_FIRST_DELAY_S = 0.05
_DELAY_MAX_S = 2.0


class Reflector(ABC, Generic[E]):
    """Lists, then watches from the list's version, and restarts after any error until `run` is cancelled.

    Args:
        kind: Kind of the objects, for the log.
        rng: Spreads the retries of many processes.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        kind: str,
        *,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.synced = asyncio.Event()
        """Set when the first list has been read."""
        self._kind_name = kind
        self._rng, self._sleep = rng or random.Random(), sleep
        self._since: str | None = None
        self._failures = 0
        self._last_logged_error = ""

    @abstractmethod
    async def _relist(self) -> str:
        """Read a whole list, set `synced`, and return the list's version."""

    @abstractmethod
    def _watch_changes(self, since: str) -> AsyncGenerator[E, None]:
        """Watch the changes after a version."""

    @abstractmethod
    def _apply_event(self, event: E) -> str:
        """Apply one change and return its version."""

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            wait_s = 0.0
            try:
                await self._list_and_watch()
            except Gone:
                self._since = None
            except StoreUnavailable as error:
                wait_s = error.retry_after_s or 0.0  # until then the last known state is used
            except StoreError as error:
                self._log_error_once(error)
            except Exception:
                # An unreadable response, or a bug of ours: list again. If the loop ended here, the program
                # would act on stale objects, unnoticed.
                self._since = None
                _log.exception("watch restarted after an error", kind=self._kind_name)
            await self._sleep(max(wait_s, self._retry_delay_s()))
            self._failures += 1

    async def _list_and_watch(self) -> None:
        """List if there is no version to resume from, then apply changes until the stream ends."""
        if not self._since:
            self._since, self._last_logged_error = await self._relist(), ""
        async with aclosing(self._watch_changes(self._since)) as events:
            async for event in events:
                self._failures = 0
                self._since = self._apply_event(event)

    def _log_error_once(self, error: StoreError) -> None:
        """Log an error that a person must repair (a permission, a CRD) once, not at each retry."""
        if self._last_logged_error != str(error):
            self._last_logged_error = str(error)
            _log.warning("watch refused", kind=self._kind_name, error=self._last_logged_error)

    def _retry_delay_s(self) -> float:
        """Delay that doubles from 50 ms to 2 s, with jitter down to half of it."""
        longest = min(_DELAY_MAX_S, _FIRST_DELAY_S * 2 ** min(self._failures, 10))
        return float(longest * self._rng.uniform(0.5, 1.0))


class Informer(Reflector[WatchEvent[R]], Generic[R]):
    """All objects of one kind in a namespace, as last observed; `run` keeps the copy current.

    An object that the model cannot parse (of a newer version) is logged, its last readable state is kept, and
    `unreadable` contains its key.

    Args:
        store: Store of the objects.
        kind: Kind of the objects.
        namespace: Namespace of the objects; "" means all.
        on_change: Called after each change with the object before and after it: None before an addition,
            None after a deletion.
        rng: Spreads the retries of many processes.
        sleep: Waits for a number of seconds.
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
        super().__init__(kind.kind_name(), rng=rng, sleep=sleep)
        self.unreadable: frozenset[str] = frozenset()
        """Keys of the objects whose current version cannot be parsed."""
        self._store, self._kind, self._namespace = store, kind, namespace
        self._on_change = on_change
        self._objects: dict[str, R] = {}

    @property
    def objects(self) -> Mapping[str, R]:
        """The objects as last observed: by name, or by `namespace/name` if all namespaces are followed."""
        return MappingProxyType(self._objects)

    def find(self, namespace: str, name: str) -> R | None:
        """One object as last observed; None if there is none."""
        return self._objects.get(self._key(namespace, name)) if self._namespace in ("", namespace) else None

    def _watch_changes(self, since: str) -> AsyncGenerator[WatchEvent[R], None]:
        stream = self._store.watch(self._kind, namespace=self._namespace, since=since)
        return cast(AsyncGenerator[WatchEvent[R], None], stream)

    async def _relist(self) -> str:
        listing = await self._store.list(self._kind, namespace=self._namespace)
        current = {self._object_key(obj): obj for obj in listing.items}
        unreadable = frozenset(self._key(*key) for key in listing.unreadable)
        for key in sorted(unreadable - self.unreadable):
            self._mark_unreadable(key)
        self.unreadable = unreadable
        for key in sorted(self._objects.keys() - current.keys() - unreadable):
            self._set_object(key, None)
        for key, obj in current.items():
            self._set_object(key, obj)
        self.synced.set()
        return listing.resource_version

    def _apply_event(self, event: WatchEvent[R]) -> str:
        if event.object is not None:
            self._apply_change(event.type, self._object_key(event.object), event.object)
        elif event.unreadable is not None:
            self._apply_change(event.type, self._key(*event.unreadable), None)
        return event.resource_version

    def _apply_change(self, change: EventType, key: str, new: R | None) -> None:
        if change is EventType.DELETED:
            self._set_object(key, None)
        elif new is None:
            self._mark_unreadable(key)
            return
        else:
            self._set_object(key, new)
        self.unreadable -= {key}

    def _mark_unreadable(self, key: str) -> None:
        self.unreadable |= {key}
        _log.warning(
            "object cannot be parsed; its last readable state is kept",
            kind=self._kind.kind_name(),
            object=key,
        )

    def _set_object(self, key: str, new: R | None) -> None:
        old = self._objects.get(key)
        if _resource_version(old) == _resource_version(new):
            return
        if new is None:
            del self._objects[key]
        else:
            self._objects[key] = new
        self._on_change(old, new)

    def _key(self, namespace: str, name: str) -> str:
        return name if self._namespace else f"{namespace}/{name}"

    def _object_key(self, obj: R) -> str:
        return self._key(obj.metadata.namespace, obj.metadata.name)


def _resource_version(obj: Resource | None) -> str | None:
    return None if obj is None else obj.metadata.resource_version
