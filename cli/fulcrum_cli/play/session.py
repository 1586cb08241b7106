"""One session of `fulcrum play`: send the load, force flips, kill engines, handle keys, build the frames.

The command `play` starts the service, `observer` watches it.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.play.frame import Frame
from fulcrum_cli.play.frame_builder import RunProgress, ServiceObservation, build_frame
from fulcrum_cli.play.loads import FLOOD_AFTER_S, TIERS, TIERS_FLOOD, list_shapes, make_load
from fulcrum_cli.play.observer import Observer
from fulcrum_cli.play.options import PlayOptions
from fulcrum_cli.play.report import RunFigures
from fulcrum_cli.play.screen import Key
from fulcrum_cli.play.stress import ForcedFlips, NoFlipPossible, kill_engines_in_turn
from fulcrum_core.errors import FulcrumError, InvalidInput
from fulcrum_core.formatting import format_count
from fulcrum_core.ports import Store
from fulcrum_simulator.client import LoadGenerator
from fulcrum_simulator.workload import GeneratedWorkload, LengthLimit, WorkloadPhase

DRAIN_S = 120.0
"""Longest wait for unfinished requests at the end of the load, in seconds."""

_NOTICE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHandle:
    """Access to the service that a session needs.

    `kill` raises `KeyError` for an instance without an engine. `max_tokens` is the engine's KV capacity.
    """

    store: Store
    endpoint: str
    kill: Callable[[str], None]
    max_tokens: int


class Session:
    """One run, from the first request to the figures. `frame` may be called at any time.

    The load ends after its duration, with the last request of a trace, when the user quits, or, without a
    duration, when all forced flips were made or none is possible any more.
    """

    def __init__(
        self, options: PlayOptions, service_handle: ServiceHandle, observer: Observer, load: LoadGenerator
    ) -> None:
        self._options, self._service_handle, self._observer, self._load = (
            options,
            service_handle,
            observer,
            load,
        )
        meta = options.service.metadata
        self._flips = ForcedFlips(service_handle.store, observer, meta.name, meta.namespace)
        self._limit = LengthLimit(service_handle.max_tokens)
        self._seeds = itertools.count(options.seed)
        self._shape, self._shape_started_s = options.load, 0.0
        self._generated: GeneratedWorkload | None = None
        self._sending_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._load_ended, self._quit_requested = asyncio.Event(), asyncio.Event()
        self._selected = 0
        self._flips_failure = ""
        self._notice, self._notice_until_s = "", 0.0
        self._started_at_s, self._started_s = time.time(), 0.0
        self.started = self._draining = False
        self.last_frame: Frame | None = None
        """Frame at the end of the load."""

    def quit(self) -> None:
        """End the run without waiting for unfinished requests."""
        self._load_ended.set()
        self._quit_requested.set()

    async def run(self) -> RunFigures:
        """Send the load for its duration, wait for unfinished requests, and return the figures."""
        self._started_at_s, self._started_s, self.started = time.time(), self._clock_s(), True
        self._start_load(self._options.load)
        if self._options.kill_every_s:
            self._start_task(
                kill_engines_in_turn(
                    self._observer, self._kill_with_notice, every_s=self._options.kill_every_s
                )
            )
        if self._options.flips:
            self._start_task(self._force_flips())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.duration_s):
                await self._load_ended.wait()
        duration_s, self.last_frame = self.elapsed_s, self.frame()
        self._draining = True
        await self._cancel(*self._tasks, *([self._sending_task] if self._sending_task else []))
        await self._drain()
        await self._observer.scrape()
        return self._figures(duration_s)

    def handle_key(self, key: Key) -> None:
        """Execute the command of a key."""
        names = list(self._observer.instances)
        if key in (Key.MOVING, Key.STEADY, Key.BURSTY, Key.TIERS):
            self._change_load_by_key(key.value)
        elif key is Key.FLOOD:  # on, and off again
            self._change_load_by_key(TIERS if self._shape == TIERS_FLOOD else TIERS_FLOOD)
        elif key is Key.QUIT:
            self.quit()
        elif names:
            self._handle_instance_key(key, names)

    def change_load(self, shape: str) -> None:
        """Replace the load by one of another shape.

        Raises:
            InvalidInput: if the load has not begun, is a trace, or needs tiers that the service lacks.
        """
        if not self.started:
            raise InvalidInput("load", shape, "cannot begin before the engines have started")
        if self._options.trace_requests is not None:
            raise InvalidInput("load", shape, "cannot replace a trace")
        if shape not in list_shapes(self._options.service.spec.qos_tiers):
            raise InvalidInput("load", shape, "needs QoS tiers: `fulcrum play --load tiers` has them")
        if self._sending_task:
            self._sending_task.cancel()
        self._start_load(shape)

    @property
    def load_name(self) -> str:
        """Shape of the load, or name of the trace."""
        return self._options.trace_name or self._shape

    @property
    def too_slow(self) -> bool:
        """Whether latencies are caused by this machine, not by the engine model."""
        return self._observer.lateness.too_slow

    def kill(self, instance: str) -> None:
        """Kill the engine of an instance; `KeyError` if it has none."""
        self._service_handle.kill(instance)

    def frame(self) -> Frame:
        """Build the frame for the current time."""
        options, observer = self._options, self._observer
        observation = ServiceObservation(
            service=options.service,
            instances=observer.instances,
            state=observer.state,
            recorder=observer.recorder,
            decisions=observer.decisions,
            lateness_p99_ms=observer.lateness.p99_ms(),
            unavailable=observer.unavailable,
        )
        return build_frame(
            observation, self._load.results, self._progress(),
            endpoint=self._service_handle.endpoint,
            duration_s=options.duration_s,
            seed=options.seed,
        )  # fmt: skip

    def _progress(self) -> RunProgress:
        clock_s = self._clock_s()
        phase = self._phase(clock_s - self._shape_started_s)
        return RunProgress(
            elapsed_s=self.elapsed_s,
            clock_s=clock_s,
            load=self.load_name,
            load_phase=self._phase_name(phase),
            rate_rps=phase.rate_rps if phase and not self._draining else None,
            selected=self._selected,
            notice=self._notice if clock_s < self._notice_until_s else "",
            started_at_s=self._started_at_s,
        )

    def _phase(self, at_s: float) -> WorkloadPhase | None:
        """Return the load's phase at a time; after the end of the load, the last one."""
        if self._generated is None or not self._generated.phases:
            return None
        return self._generated.phase_at(at_s) or self._generated.phases[-1]

    def _phase_name(self, phase: WorkloadPhase | None) -> str:
        if not self.started:
            return "waiting for the engines to start"
        if self._draining:
            return "ended, waiting for unfinished requests"
        return phase.name if phase else ""

    def _figures(self, duration_s: float) -> RunFigures:
        options = self._options
        overlong = self._limit.overlong
        forced = f"{self._flips.flips_made} of {format_count(options.flips, 'forced flip')} made"
        notes = [str(overlong)] if overlong else []
        notes += [forced] if options.flips else []
        return RunFigures(
            load=self.load_name,
            mode=options.service.spec.autoscaling.mode.value,
            seed=options.seed,
            instances=len(self._observer.instances),
            engine=options.service.spec.engine.type,
            started_at_s=self._started_at_s,
            duration_s=duration_s,
            requests=self._load.results.report(),
            recorder=self._observer.recorder,
            lateness_p99_ms=self._observer.lateness.p99_ms(),
            notes=tuple(notes),
            flips_failure=self._flips_failure,
        )

    # load

    def _start_load(self, shape: str) -> None:
        self._shape, self._shape_started_s = shape, self._clock_s()
        trace_requests, duration_s = self._options.trace_requests, self._options.duration_s
        if trace_requests is None:
            left_s = None if duration_s is None else max(0.0, duration_s - self.elapsed_s)
            after_s = FLOOD_AFTER_S if self._generated is None else 0.0
            self._generated = make_load(
                shape, duration_s=left_s, seed=next(self._seeds), flood_after_s=after_s
            )
        requests = self._limit.filter(self._generated or trace_requests or ())
        self._sending_task = asyncio.create_task(self._load.send(requests))
        if trace_requests is not None:
            self._sending_task.add_done_callback(lambda _task: self._load_ended.set())

    def _change_load_by_key(self, shape: str) -> None:
        try:
            self.change_load(shape)
        except InvalidInput as error:
            self._show_notice(str(error))
        else:
            self._show_notice(f"load changed to {shape}")

    async def _drain(self) -> None:
        """Wait for unfinished requests, until the user quits."""
        finish_task = asyncio.create_task(self._load.finish(timeout_s=DRAIN_S))
        quit_task = asyncio.create_task(self._quit_requested.wait())
        await asyncio.wait({finish_task, quit_task}, return_when=asyncio.FIRST_COMPLETED)
        await self._cancel(finish_task, quit_task)

    # flips and kills

    def _handle_instance_key(self, key: Key, names: list[str]) -> None:
        """Execute a key that selects an instance or changes the selected one."""
        self._selected %= len(names)
        match key:
            case Key.UP:
                self._selected = (self._selected - 1) % len(names)
            case Key.DOWN:
                self._selected = (self._selected + 1) % len(names)
            case Key.FLIP:
                self._start_task(self._flip(names[self._selected]))
            case Key.KILL:
                self._kill_with_notice(names[self._selected])

    async def _force_flips(self) -> None:
        try:
            await self._flips.run(self._options.flips)
        except NoFlipPossible as error:
            self._flips_failure = str(error)
            self._show_notice(self._flips_failure)
        else:
            self._show_notice(f"{format_count(self._options.flips, 'flip')} made")
        if self._options.duration_s is None:
            self._load_ended.set()

    async def _flip(self, instance: str) -> None:
        meta, role = self._options.service.metadata, self._observer.recorder.roles.get(instance)
        if role is None:
            return
        try:
            await flip_instance(
                self._service_handle.store,
                meta.name,
                instance,
                role.other,
                namespace=meta.namespace,
                reason="by key",
            )
        except FulcrumError as error:
            self._show_notice(str(error))

    def _kill_with_notice(self, instance: str) -> None:
        try:
            self._service_handle.kill(instance)
        except KeyError:
            self._show_notice(f"{instance} has no running engine")
        else:
            self._show_notice(f"{instance} killed")

    # helpers

    def _show_notice(self, notice: str) -> None:
        self._notice, self._notice_until_s = notice, self._clock_s() + _NOTICE_S

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _cancel(*tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _clock_s() -> float:
        """Return the time of the event loop, which is the load generator's clock."""
        return asyncio.get_running_loop().time()

    @property
    def elapsed_s(self) -> float:
        return self._clock_s() - self._started_s if self.started else 0.0
