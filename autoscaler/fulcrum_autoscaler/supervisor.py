"""Starts one control loop for each service, and stops it when the service is deleted.

The decision history and the metrics of a deleted service are removed with its loop.

Two autoscalers may run at the same time (a roll-out, a network partition): each flip is a conditional write,
so of two equal flips one is written and the other autoscaler decides again. `program` runs it.
"""

import asyncio
from collections.abc import Callable

import structlog

from fulcrum_autoscaler.decision_history import DecisionHistories
from fulcrum_autoscaler.loop import RouterClient, ServiceAutoscaler
from fulcrum_autoscaler.metrics import AutoscalerMetrics, ServiceMetrics
from fulcrum_autoscaler.watched_objects import WatchedObjects
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Clock, Store

log = structlog.get_logger()

RESTART_PAUSE_S = 1.0
"""Pause before a loop that failed with an exception is started again."""

_ServiceKey = tuple[str, str]


class AutoscalerSupervisor:
    """The control loops of all services of one namespace, or of all namespaces.

    Args:
        store: The store of the API objects.
        namespace: Namespace of the services; "" is every namespace.
        only_service: Name of the one service to manage, even before it exists; None manages every service.
        router_client_for: Returns the client of a router, by namespace and name of the service and a function
            for the latest known PDService.
        clock: Clock of all loops.
        histories: Receives the decisions of all loops.
        metrics: Receives the metrics of all loops.
    """

    def __init__(
        self,
        store: Store,
        *,
        namespace: str,
        only_service: str | None,
        router_client_for: Callable[[str, str, Callable[[], PDService | None]], RouterClient],
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
        """Whether all API objects have been listed once."""
        return self._watched.synced

    async def run(self) -> None:
        """Watch the store and run the loops until cancelled."""
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
        log.info("autoscaling started", namespace=key[0], service=key[1])
        previous = self._stopping.pop(key, None)
        self._running[key] = asyncio.get_running_loop().create_task(self._run_loop(key, previous))

    def _stop_loop(self, key: _ServiceKey) -> None:
        task = self._running.pop(key, None)
        if task is not None:
            log.info("autoscaling stopped, service deleted", namespace=key[0], service=key[1])
            task.cancel()
            self._stopping[key] = task
            task.add_done_callback(lambda ended: self._forget_stopped(key, ended))

    def _forget_stopped(self, key: _ServiceKey, task: asyncio.Task[None]) -> None:
        if self._stopping.get(key) is task:
            del self._stopping[key]

    async def _run_loop(self, key: _ServiceKey, previous: asyncio.Task[None] | None) -> None:
        """Run the loop of one service until cancelled.

        A failing loop is started again; other loops are not affected.
        """
        namespace, service = key
        if previous is not None:
            await asyncio.wait([previous])
        metrics = ServiceMetrics(self._metrics, namespace=namespace, service=service)
        objects = self._watched.for_service(namespace, service)
        router = self._router_client_for(namespace, service, objects.service)
        try:
            while True:
                autoscaler = ServiceAutoscaler(
                    objects=objects,
                    store=self._store,
                    router=router,
                    clock=self._clock,
                    history=self._histories.get_or_create(namespace, service),
                    metrics=metrics,
                )
                try:
                    await autoscaler.run()
                except Exception:
                    log.exception(
                        "autoscaling loop failed, restarting it", namespace=namespace, service=service
                    )
                await asyncio.sleep(RESTART_PAUSE_S)
        finally:
            self._histories.remove(namespace, service)
            metrics.remove()
