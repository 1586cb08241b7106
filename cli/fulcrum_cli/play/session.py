"""One run: the load, the trouble asked for and the person at the keys, around a running service."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.assignment.write import flip
from fulcrum_cli.play.drivers import ForcedFlips, Stuck, kill_in_turn
from fulcrum_cli.play.frame import Frame
from fulcrum_cli.play.loads import make_load
from fulcrum_cli.play.observer import Observer
from fulcrum_cli.play.options import PlayOptions
from fulcrum_cli.play.picture import Moment, Sight, take
from fulcrum_cli.play.report import RunFigures
from fulcrum_cli.play.screen import Key
from fulcrum_core.errors import FulcrumError
from fulcrum_core.ports import Store
from fulcrum_core.spelling import format_count
from fulcrum_simulator.client import LoadGenerator
from fulcrum_simulator.workload import GeneratedLoad, LengthLimit, LoadPhase

DRAIN_S = 120.0
"""Longest wait for the answers to what was sent."""

_NOTICE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a session needs of the service. `kill` raises `KeyError` for an instance without an engine."""

    store: Store
    endpoint: str
    kill: Callable[[str], None]
    max_tokens: int


class Session:
    """A run from its first request to its figures. `frame` may be asked for at any time in between."""

    def __init__(self, options: PlayOptions, stage: Stage, observer: Observer, load: LoadGenerator) -> None:
        self._options, self._stage, self._observer, self._load = options, stage, observer, load
        meta = options.service.metadata
        self._flips = ForcedFlips(stage.store, observer, meta.name, meta.namespace)
        self._limit = LengthLimit(stage.max_tokens)
        self._seeds = itertools.count(options.seed)
        self._shape, self._shape_began_s = options.load, 0.0
        self._generated: GeneratedLoad | None = None
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._end, self._quit = asyncio.Event(), asyncio.Event()
        self._selected = 0
        self._stuck = ""
        self._notice, self._notice_until_s = "", 0.0
        self._began_at_s, self._began_s = time.time(), 0.0
        self.begun = self._draining = False
        self.last_frame: Frame | None = None
        """The picture at the end of the load."""

    def quit(self) -> None:
        """Ends the run without waiting for answers."""
        self._end.set()
        self._quit.set()

    async def run(self) -> RunFigures:
        """Sends the load for as long as asked for, waits for the answers, and gives the figures."""
        self._began_at_s, self._began_s, self.begun = time.time(), self._clock_s(), True
        self._start_load(self._options.load)
        if self._options.kill_every_s:
            self._spawn(kill_in_turn(self._observer, self._kill, every_s=self._options.kill_every_s))
        if self._options.flips:
            self._spawn(self._force_flips())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.ends_s):
                await self._end.wait()
        lasted_s, self.last_frame = self.elapsed_s, self.frame()
        self._draining = True
        await self._stop(*self._tasks, *([self._sending] if self._sending else []))
        await self._drain()
        await self._observer.scrape()
        return self._figures(lasted_s)

    def press(self, key: Key) -> None:
        """Does what a key asks for."""
        names = list(self._observer.instances)
        if key in (Key.MOVING, Key.STEADY, Key.BURSTY):
            self._change_load(key.value)
        elif key is Key.QUIT:
            self.quit()
        elif names:
            self._press_on(key, names)

    def frame(self) -> Frame:
        """The picture of now."""
        options, observer = self._options, self._observer
        sight = Sight(
            service=options.service,
            instances=observer.instances,
            state=observer.state,
            recorder=observer.recorder,
            decisions=observer.decisions,
            lateness_p99_ms=observer.lateness.p99_ms(),
            away=observer.away,
        )
        return take(
            sight, self._load.tally, self._moment(), endpoint=self._stage.endpoint, ends_s=options.ends_s,
            seed=options.seed,
        )  # fmt: skip

    def _moment(self) -> Moment:
        clock_s = self._clock_s()
        phase = self._phase(clock_s - self._shape_began_s)
        return Moment(
            elapsed_s=self.elapsed_s,
            clock_s=clock_s,
            load=self._options.recording_name or self._shape,
            load_phase=self._phase_name(phase),
            rate_rps=phase.rate_rps if phase and not self._draining else None,
            selected=self._selected,
            notice=self._notice if clock_s < self._notice_until_s else "",
            began_at_s=self._began_at_s,
        )

    def _phase(self, at_s: float) -> LoadPhase | None:
        """The load's phase, at its end the last one."""
        if self._generated is None or not self._generated.phases:
            return None
        return self._generated.phase_at(at_s) or self._generated.phases[-1]

    def _phase_name(self, phase: LoadPhase | None) -> str:
        if not self.begun:
            return "waits for the engines to start"
        if self._draining:
            return "is over, waits for the last answers"
        return phase.name if phase else ""

    def _figures(self, lasted_s: float) -> RunFigures:
        options = self._options
        too_long = self._limit.too_long
        forced = f"{self._flips.done} of {format_count(options.flips, 'forced flip')} made"
        notes = [str(too_long)] if too_long else []
        notes += [forced] if options.flips else []
        return RunFigures(
            load=options.recording_name or self._shape,
            mode=options.service.spec.autoscaling.mode.value,
            seed=options.seed,
            instances=len(self._observer.instances),
            began_at_s=self._began_at_s,
            lasted_s=lasted_s,
            requests=self._load.tally.report(),
            recorder=self._observer.recorder,
            lateness_p99_ms=self._observer.lateness.p99_ms(),
            notes=tuple(notes),
            stuck=self._stuck,
        )

    # the load

    def _start_load(self, shape: str) -> None:
        self._shape, self._shape_began_s = shape, self._clock_s()
        recording, ends_s = self._options.recording, self._options.ends_s
        if recording is None:
            left_s = None if ends_s is None else max(0.0, ends_s - self.elapsed_s)
            self._generated = make_load(shape, duration_s=left_s, seed=next(self._seeds))
        requests = self._limit.keep(self._generated or recording or ())
        self._sending = asyncio.create_task(self._load.play(requests))
        if recording is not None:
            self._sending.add_done_callback(lambda _task: self._end.set())

    def _change_load(self, shape: str) -> None:
        if self._options.recording is not None:
            self._say("a recording is played: its shape cannot be changed")
            return
        if self._sending:
            self._sending.cancel()
        self._start_load(shape)
        self._say(f"load changed to {shape}")

    async def _drain(self) -> None:
        """Waits for the answers, unless somebody has no time for that."""
        finish = asyncio.create_task(self._load.finish(timeout_s=DRAIN_S))
        quit_first = asyncio.create_task(self._quit.wait())
        await asyncio.wait({finish, quit_first}, return_when=asyncio.FIRST_COMPLETED)
        await self._stop(finish, quit_first)

    # flips and kills

    def _press_on(self, key: Key, names: list[str]) -> None:
        """Keys that concern the selected instance."""
        self._selected %= len(names)
        match key:
            case Key.UP:
                self._selected = (self._selected - 1) % len(names)
            case Key.DOWN:
                self._selected = (self._selected + 1) % len(names)
            case Key.FLIP:
                self._spawn(self._flip(names[self._selected]))
            case Key.KILL:
                self._kill(names[self._selected])

    async def _force_flips(self) -> None:
        try:
            await self._flips.run(self._options.flips)
        except Stuck as error:
            self._stuck = str(error)
            self._say(self._stuck)
        else:
            self._say(f"{format_count(self._options.flips, 'flip')} made, as asked")
        if self._options.ends_s is None:
            self._end.set()

    async def _flip(self, instance: str) -> None:
        meta, role = self._options.service.metadata, self._observer.recorder.roles.get(instance)
        if role is None:
            return
        try:
            await flip(
                self._stage.store, meta.name, instance, role.other, namespace=meta.namespace, reason="by key"
            )
        except FulcrumError as error:
            self._say(str(error))

    def _kill(self, instance: str) -> None:
        try:
            self._stage.kill(instance)
        except KeyError:
            self._say(f"{instance} has no engine now")
        else:
            self._say(f"{instance} killed")

    # small things

    def _say(self, notice: str) -> None:
        self._notice, self._notice_until_s = notice, self._clock_s() + _NOTICE_S

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _stop(*tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _clock_s() -> float:
        """The load generator's clock."""
        return asyncio.get_running_loop().time()

    @property
    def elapsed_s(self) -> float:
        return self._clock_s() - self._began_s if self.begun else 0.0
