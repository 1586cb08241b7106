"""Follows a running service through its public interfaces, for the live view and the report.

These are watches of the store, the router's state port, the autoscaler's `/decisions` and the engines'
`/metrics`. `session` reads what it has seen; it changes nothing in the service.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from fulcrum_cli.play.engine_lateness import EngineLateness, parse_buckets
from fulcrum_cli.play.recorder import RecordedFlip, Recorder
from fulcrum_cli.target.autoscaler import AutoscalerUnavailable, fetch_decisions
from fulcrum_cluster.informer import Informer
from fulcrum_cluster.router_client import HttpRouterClient, RouterUnavailable
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.ports import Store
from fulcrum_core.router_state import RouterState

STATE_POLL_S = 0.5
UNAVAILABLE_AFTER_S = 1.0
SCRAPE_INTERVAL_S = 5.0
_SCRAPE_TIMEOUT_S = 2.0
_DECISIONS_KEPT = 30

OnFlip = Callable[[RecordedFlip], None]


class Observer:
    """State and history of one service. `run` keeps them current until cancelled."""

    def __init__(
        self,
        store: Store,
        service: str,
        *,
        namespace: str,
        router: HttpRouterClient,
        http: httpx.AsyncClient,
        autoscaler_url: str | None,
    ) -> None:
        self.recorder = Recorder()
        self.lateness = EngineLateness()
        self.state: RouterState | None = None
        self.decisions: Sequence[dict[str, Any]] = ()
        self.state_changed = asyncio.Condition()
        self._unavailable_since_s: dict[str, float] = {}
        self._service, self._router, self._http = service, router, http
        self._autoscaler_url = autoscaler_url
        self.on_flip: OnFlip = lambda _flip: None
        self._instances = Informer(store, PDInstance, namespace=namespace)
        self._assignments = Informer(store, PDAssignment, namespace=namespace, on_change=self._on_assignment)

    @property
    def instances(self) -> Mapping[str, PDInstance]:
        """The service's instances by name."""
        listed = self._instances.objects
        return {name: listed[name] for name in sorted(listed) if listed[name].spec.service == self._service}

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Components that have not responded for `UNAVAILABLE_AFTER_S` or longer, with the time since."""
        now_s = time.monotonic()
        unavailable = sorted(
            (component, now_s - since_s) for component, since_s in self._unavailable_since_s.items()
        )
        return tuple(
            f"{component} for {for_s:.0f} s"
            for component, for_s in unavailable
            if for_s >= UNAVAILABLE_AFTER_S
        )

    def _record_response(self, component: str, *, responded: bool) -> None:
        if responded:
            self._unavailable_since_s.pop(component, None)
        else:
            self._unavailable_since_s.setdefault(component, time.monotonic())

    async def run(self) -> None:
        """Follow everything until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._instances.run())
            tasks.create_task(self._assignments.run())
            tasks.create_task(self._follow_router())
            tasks.create_task(self._record_seconds())
            tasks.create_task(_call_every(SCRAPE_INTERVAL_S, self.scrape))
            if self._autoscaler_url:
                tasks.create_task(_call_every(1.0, self._read_decisions))

    async def wait_acknowledged(self, generation: int, *, timeout_s: float) -> None:
        """Wait until the router has applied the generation, or until `timeout_s` has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.state_changed:
                await self.state_changed.wait_for(lambda: self._generation() >= generation)

    async def scrape(self) -> None:
        """Read the lateness histogram of every engine that responds."""
        engines = [(name, i.status.endpoint) for name, i in self.instances.items() if i.status.endpoint]
        await asyncio.gather(*(self._scrape(name, endpoint) for name, endpoint in engines))

    def _generation(self) -> int:
        return self.state.generation if self.state else 0

    def _on_assignment(self, _before: PDAssignment | None, after: PDAssignment | None) -> None:
        if after is None or after.spec.service != self._service:
            return
        for flip in self.recorder.record_assignment(after):
            self.on_flip(flip)

    async def _follow_router(self) -> None:
        """Long-poll for the next generation, so that an acknowledgement is seen without delay."""
        while True:
            try:
                state = await self._router.get_state(
                    min_generation=self._generation() + 1, timeout_s=STATE_POLL_S
                )
            except RouterUnavailable:
                self._record_response("router", responded=False)
                await asyncio.sleep(STATE_POLL_S)
                continue
            self._record_response("router", responded=True)
            async with self.state_changed:
                self.state = state
                self.recorder.record_acknowledgement(state.generation, state.acknowledged_at_s)
                self.state_changed.notify_all()

    async def _record_seconds(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s += 1.0
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            self.recorder.record_second({name: i.status for name, i in self.instances.items()})

    async def _read_decisions(self) -> None:
        assert self._autoscaler_url is not None
        try:
            self.decisions = await fetch_decisions(self._http, self._autoscaler_url, limit=_DECISIONS_KEPT)
        except AutoscalerUnavailable:  # keep the last decisions
            self._record_response("autoscaler", responded=False)
        else:
            self._record_response("autoscaler", responded=True)

    async def _scrape(self, name: str, endpoint: str) -> None:
        try:
            response = await self._http.get(f"http://{endpoint}/metrics", timeout=_SCRAPE_TIMEOUT_S)
        except httpx.HTTPError:
            return
        if response.is_success:
            self.lateness.record(name, parse_buckets(response.text))


async def _call_every(interval_s: float, callback: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await callback()
