"""One loop for each service that there is, begun and ended as services come and go.

Two autoscalers may run at once (a roll-out, a partition): each flip is a conditional write, so what both
decide is written once, and the other one decides anew.
"""

import asyncio
from collections.abc import Callable

import structlog

from fulcrum_autoscaler.decision_history import DecisionHistories
from fulcrum_autoscaler.loop import ServiceAutoscaler
from fulcrum_autoscaler.metrics import AutoscalerMetrics, ServiceMetrics
from fulcrum_autoscaler.router_client import RouterClient
from fulcrum_autoscaler.watched_objects import WatchedObjects
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Clock, Store

log = structlog.get_logger()

RESTART_PAUSE_S = 1.0
"""Pause before a loop that failed by a fault of its own is begun anew."""

_ServiceKey = tuple[str, str]


class AutoscalerSupervisor:
    """The loops of all services of a namespace, or of all.

    Args:
        store: Where the objects are.
        namespace: Where; "" is every namespace.
        only_service: The one service to act on, whether it is there yet or not; None: each that there is.
        router_client_for: The state port of a service's router, by namespace and name.
        clock: For all loops.
        histories: Where they keep what they decide.
        metrics: Where they count it.
    """

    def __init__(
        self,
        store: Store,
        *,
        namespace: str,
        only_service: str | None,
        router_client_for: Callable[[str, str], RouterClient],
        clock: Clock,
        histories: DecisionHistories,
        metrics: AutoscalerMetrics,
    ) -> None:
        self._store, self._namespace, self._only_service = store, namespace, only_service
        self._router_client_for, self._clock = router_client_for, clock
        self._histories, self._metrics = histories, metrics
        self._watched = WatchedObjects(store, namespace=namespace, on_service_change=self._on_service_change)
        self._running: dict[_ServiceKey, asyncio.Task[None]] = {}
        self._stopping: dict[_ServiceKey, asyncio.Task[None]] = {}

    @property
    def ready(self) -> bool:
        """Whether all objects were read once."""
        return self._watched.synced

    async def run(self) -> None:
        """Follow the store and act, until cancelled."""
        if self._only_service is not None:
            self._start_loop((self._namespace, self._only_service))
        try:
            await self._watched.run()
        finally:
            tasks = [*self._running.values(), *self._stopping.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _on_service_change(self, old: PDService | None, new: PDService | None) -> None:
        service = new or old
        if service is None or self._only_service is not None:
            return
        key = service.metadata.namespace, service.metadata.name
        if new is None:
            self._stop_loop(key)
        elif key not in self._running:
            self._start_loop(key)

    def _start_loop(self, key: _ServiceKey) -> None:
        log.info("service found", namespace=key[0], service=key[1])
        previous = self._stopping.pop(key, None)
        self._running[key] = asyncio.get_running_loop().create_task(self._run_loop(key, previous))

    def _stop_loop(self, key: _ServiceKey) -> None:
        task = self._running.pop(key, None)
        if task is not None:
            log.info("service gone", namespace=key[0], service=key[1])
            task.cancel()
            self._stopping[key] = task

    async def _run_loop(self, key: _ServiceKey, previous: asyncio.Task[None] | None) -> None:
        """Act on one service until cancelled; a fault in it costs the others nothing."""
        namespace, service = key
        if previous is not None:
            await asyncio.wait([previous])
        metrics = ServiceMetrics(self._metrics, namespace=namespace, service=service)
        try:
            while True:
                autoscaler = ServiceAutoscaler(
                    objects=self._watched.for_service(namespace, service),
                    store=self._store,
                    router=self._router_client_for(namespace, service),
                    clock=self._clock,
                    history=self._histories.get_or_create(namespace, service),
                    metrics=metrics,
                )
                try:
                    await autoscaler.run()
                except Exception:
                    log.exception("loop failed by a fault of its own", namespace=namespace, service=service)
                await asyncio.sleep(RESTART_PAUSE_S)
        finally:
            self._histories.remove(namespace, service)
            metrics.remove()
