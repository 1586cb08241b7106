"""One loop for each service that there is, begun and ended as services come and go.

Two autoscalers may run at once (a roll-out, a partition): each flip is a conditional write, so what both
decide is written once, and the other one decides anew.
"""

import asyncio
from collections.abc import Callable

import structlog

from fulcrum_autoscaler.desired import WatchedObjects
from fulcrum_autoscaler.journal import Journals
from fulcrum_autoscaler.loop import Autoscaler
from fulcrum_autoscaler.meters import Families, Meters
from fulcrum_autoscaler.routers import RouterPort
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Clock, Store

log = structlog.get_logger()

AGAIN_S = 1.0
"""Pause before a loop that failed by a fault of its own is begun anew."""

_Key = tuple[str, str]


class Services:
    """The loops of all services of a namespace, or of all.

    Args:
        store: Where the objects are.
        namespace: Where; "" is every namespace.
        only: The one service to act on, whether it is there yet or not; None: each that there is.
        router_of: The state port of a service's router, by namespace and name.
        clock: For all loops.
        journals: Where they tell what they decide.
        families: Where they count it.
    """

    def __init__(
        self,
        store: Store,
        *,
        namespace: str,
        only: str | None,
        router_of: Callable[[str, str], RouterPort],
        clock: Clock,
        journals: Journals,
        families: Families,
    ) -> None:
        self._store, self._namespace, self._only = store, namespace, only
        self._router_of, self._clock = router_of, clock
        self._journals, self._families = journals, families
        self._seen = WatchedObjects(store, namespace=namespace, on_service=self._changed)
        self._running: dict[_Key, asyncio.Task[None]] = {}
        self._ending: dict[_Key, asyncio.Task[None]] = {}

    @property
    def ready(self) -> bool:
        """Whether all objects were read once."""
        return self._seen.synced

    async def run(self) -> None:
        """Follow the store and act, until cancelled."""
        if self._only is not None:
            self._begin((self._namespace, self._only))
        try:
            await self._seen.run()
        finally:
            tasks = [*self._running.values(), *self._ending.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _changed(self, old: PDService | None, new: PDService | None) -> None:
        subject = new or old
        if subject is None or self._only is not None:
            return
        key = subject.metadata.namespace, subject.metadata.name
        if new is None:
            self._end(key)
        elif key not in self._running:
            self._begin(key)

    def _begin(self, key: _Key) -> None:
        log.info("service found", namespace=key[0], service=key[1])
        former = self._ending.pop(key, None)
        self._running[key] = asyncio.get_running_loop().create_task(self._loop(key, former))

    def _end(self, key: _Key) -> None:
        task = self._running.pop(key, None)
        if task is not None:
            log.info("service gone", namespace=key[0], service=key[1])
            task.cancel()
            self._ending[key] = task

    async def _loop(self, key: _Key, former: asyncio.Task[None] | None) -> None:
        """Act on one service until cancelled; a fault in it costs the others nothing."""
        namespace, service = key
        if former is not None:
            await asyncio.wait([former])
        meters = Meters(self._families, namespace=namespace, service=service)
        try:
            while True:
                autoscaler = Autoscaler(
                    desired=self._seen.of(namespace, service),
                    store=self._store,
                    router=self._router_of(namespace, service),
                    clock=self._clock,
                    journal=self._journals.open(namespace, service),
                    meters=meters,
                )
                try:
                    await autoscaler.run()
                except Exception:
                    log.exception("loop failed by a fault of its own", namespace=namespace, service=service)
                await asyncio.sleep(AGAIN_S)
        finally:
            self._journals.close(namespace, service)
            meters.close()
