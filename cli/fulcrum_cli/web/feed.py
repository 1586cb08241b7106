"""Reads one service for all open pages: watches of its objects, and polls of router and autoscaler.

Nothing is polled while no page is open. `fulcrum web` and `play` run it; `page_model` makes a page of what it
has read, and `broadcast` sends that.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from fulcrum_cli.target.autoscaler import AutoscalerUnavailable
from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_cli.web.decision_log import DecisionLog
from fulcrum_cli.web.page_model import PageObservation, build_page
from fulcrum_cli.web.reading_window import ReadingWindow
from fulcrum_cli.web.router_reading import parse_reading
from fulcrum_cli.web.sources import FeedSource
from fulcrum_cluster.informer import Informer
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Store

POLL_S = 1.0
"""Seconds between two polls: the router renders its metrics once a second."""
SEND_S = 0.5
"""Seconds between two states: role changes are watched, and shown without waiting for a poll."""

ReadControls = Callable[[], Mapping[str, Any] | None]
"""Returns what the page may change and its state; None if it only shows."""


class Feed:
    """Sends the state of one service to a `Broadcast`. `run` until cancelled."""

    def __init__(
        self,
        store: Store,
        service: PDService,
        broadcast: Broadcast,
        source: FeedSource,
        *,
        read_controls: ReadControls = lambda: None,
    ) -> None:
        self._service, self._broadcast, self._source = service, broadcast, source
        self._read_controls = read_controls
        self._window, self._log = ReadingWindow(), DecisionLog()
        self._unavailable: set[str] = set()
        namespace = service.metadata.namespace
        self._services = Informer(store, PDService, namespace=namespace)
        self._instances = Informer(store, PDInstance, namespace=namespace)
        self._assignments = Informer(store, PDAssignment, namespace=namespace, on_change=self._on_assignment)

    async def run(self) -> None:
        """Follow the service and send its state until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in (self._services, self._instances, self._assignments):
                tasks.create_task(informer.run())
            tasks.create_task(self._call_while_open(POLL_S, self._poll_router))
            tasks.create_task(self._call_while_open(POLL_S, self._poll_autoscaler))
            tasks.create_task(self._call_while_open(SEND_S, self._send))

    async def _call_while_open(self, interval_s: float, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._broadcast.wait_opened()
            await call()
            await asyncio.sleep(interval_s)

    def _on_assignment(self, _before: PDAssignment | None, after: PDAssignment | None) -> None:
        if after is not None and after.spec.service == self._service.metadata.name:
            self._log.record_assignment(after)

    async def _poll_router(self) -> None:
        try:
            text = await self._source.read_metrics()
        except RouterUnavailable:
            self._unavailable.add("router")
        else:
            self._unavailable.discard("router")
            self._window.add(parse_reading(text, at_s=time.monotonic()))

    async def _poll_autoscaler(self) -> None:
        try:
            decisions = await self._source.read_decisions()
        except AutoscalerUnavailable:
            self._unavailable.add("autoscaler")
        else:
            self._unavailable.discard("autoscaler")
            self._log.record_autoscaler(decisions)

    async def _send(self) -> None:
        await self._instances.synced.wait()
        self._broadcast.send(orjson.dumps(build_page(self._observe(), now_s=time.time())))

    def _observe(self) -> PageObservation:
        name = self._service.metadata.name
        return PageObservation(
            service=self._services.objects.get(name, self._service),
            instances={n: i for n, i in self._instances.objects.items() if i.spec.service == name},
            assignment=self._assignments.objects.get(name),
            reading=self._window.last,
            traffic=self._window.traffic(),
            decisions=self._log.list(),
            source=self._source.description,
            unavailable=tuple(sorted(self._unavailable)),
            controls=self._read_controls(),
        )
