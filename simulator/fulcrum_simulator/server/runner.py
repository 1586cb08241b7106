"""The step loop: the pure engine model in real time, on absolute deadlines.

Model time runs along `time.monotonic`. A step that should have ended at 10.000 s and is noticed at 10.003 s
ended at 10.000 s: its successor starts there and is due on time, so late wake-ups do not add up to a slower
engine. What happens in between (an arrival, a fetched block) keeps its own time and takes part in the next
step that starts after it, as it would have on a machine that is never late. How late the loop was is
measured; past `MAX_LAG_S` the lost time is given up, since an engine that owes seconds of steps would answer
in bursts that no engine shows.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fulcrum_simulator.engine import (
    Engine,
    EngineDead,
    EngineRequest,
    FetchStart,
    Finished,
    ImportKv,
    TokenOut,
)
from fulcrum_simulator.server.metrics import EngineMetrics

MAX_LAG_S = 0.1
# uvloop's timers count whole milliseconds and may fire that much early; ending a step so early does no harm.
EARLY_S = 0.0005
_STEPS_PER_ABSORB = 256


class Sink(Protocol):
    """Where one request's tokens go. Called from the step loop: must not block."""

    def token(self, out: TokenOut) -> None:
        """One more token."""
        ...

    def finished(self, end: Finished | None) -> None:
        """The request's end; nothing follows. None: aborted before the engine saw it."""
        ...

    def died(self) -> None:
        """The engine died; nothing follows."""
        ...


class Puller(Protocol):
    """The taker's side of hand-offs: told what to fetch, and what is no longer wanted."""

    def start(self, fetch: FetchStart, *, own: bytes) -> None:
        """Pull these blocks for the prompt with digest `own`; report to the runner."""
        ...

    def drop(self, request_id: str, source: ImportKv) -> None:
        """The request ended: stop pulling, and tell the giver that its blocks are free."""
        ...


class Runner:
    """Owns the engine and its clock; every call comes from the event loop's thread."""

    def __init__(
        self, engine: Engine, metrics: EngineMetrics, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`now_s` is the clock of engine and runner; it must run as fast as the event loop's."""
        self.engine, self.metrics, self.now_s = engine, metrics, now_s
        self.puller: Puller | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.slow_factor = 1.0
        self.lateness_max_s = 0.0
        self._sinks: dict[str, Sink] = {}
        self._imports: dict[str, EngineRequest] = {}
        self._inbox: deque[tuple[float, Callable[[float], None]]] = deque()
        self._due_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._halted = False
        self._steps_until_absorb = _STEPS_PER_ABSORB

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    @property
    def dead(self) -> bool:
        """Whether the engine died of what it was sent."""
        return self.engine.dead

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request; its tokens go to `sink`."""
        self._sinks[request.id] = sink
        if isinstance(request.handoff, ImportKv):
            self._imports[request.id] = request
        self._post(request.arrival_s, lambda _: self._submit(request))

    def _submit(self, request: EngineRequest) -> None:
        if request.id in self._sinks:
            self.engine.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request whose client left, at once; its sink hears nothing more."""
        if self._sinks.pop(request_id, None) is None:
            return
        try:
            end = self.engine.abort(request_id, self.now_s())
        except EngineDead:
            self._die()
            return
        self._forget(request_id, end)
        self._nudge()

    def abort_all(self) -> None:
        """End every request with reason "abort"; their clients get what there is."""
        for request_id in list(self._sinks):
            try:
                end = self.engine.abort(request_id, self.now_s())
            except EngineDead:
                self._die()
                return
            sink = self._sinks.pop(request_id)
            self._forget(request_id, end)
            sink.finished(end)

    def _forget(self, request_id: str, end: Finished | None) -> None:
        if end is not None:
            self.metrics.finished(end)
        request = self._imports.pop(request_id, None)
        if request is not None and isinstance(request.handoff, ImportKv) and self.puller is not None:
            self.puller.drop(request_id, request.handoff)

    def fetch_done(self, request_id: str, digest: bytes) -> None:
        """The blocks of a fetch arrived and hold the prompt with this digest."""
        self._imports.pop(request_id, None)
        self._post(self.now_s(), lambda now_s: self._if_live(request_id, digest, now_s))

    def fetch_failed(self, request_id: str) -> None:
        """A fetch failed: the engine computes the prompt itself."""
        self._imports.pop(request_id, None)
        self._post(self.now_s(), lambda now_s: self._if_live(request_id, None, now_s))

    def _if_live(self, request_id: str, digest: bytes | None, now_s: float) -> None:
        if request_id not in self._sinks:
            return
        if digest is None:
            self.engine.kv_fetch_failed(request_id, now_s)
        else:
            self.engine.kv_fetch_done(request_id, digest, now_s)

    def pulled(self, request_id: str) -> bool:
        """A peer has read the blocks held for it, or will not; False if they were no longer held."""
        freed = self.engine.notify_pulled(request_id, self.now_s())
        self._nudge()
        return freed

    def expire_all_leases(self) -> None:
        """Give up every block held for peers, however fresh its lease."""
        self.engine.expire_leases(math.inf)
        self._nudge()

    def halt(self) -> None:
        """Stop stepping: what runs is never answered."""
        self._halted = True
        self._cancel_timer()

    def go_on(self) -> None:
        """Step again after `halt`; the time in between did not pass for the engine."""
        self._halted = False
        self._due_s = max(self._due_s, self.now_s())
        self._arm(0.0)

    def _post(self, at_s: float, act: Callable[[float], None]) -> None:
        """Have something happen to the engine at `at_s`: at once if it idles, else before the next step."""
        self._inbox.append((at_s, act))
        self._nudge()

    def _nudge(self) -> None:
        """Have an idle engine look for work: something arrived, or blocks became free."""
        if not self._halted and not self.engine.busy:
            self._arm(0.0)

    def _arm(self, delay_s: float) -> None:
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._wake) if delay_s > 0 else loop.call_soon(self._wake)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        try:
            self._advance(self.now_s())
        except EngineDead:
            self._die()

    def _advance(self, now_s: float) -> None:
        """End the step that is due and start the next where it ended; an idle engine's, when work came."""
        if not self.engine.busy:
            began_s = self._inbox[0][0] if self._inbox else now_s
            self._start_step(max(began_s, self._due_s, now_s - MAX_LAG_S), now_s)
        elif now_s < self._due_s - EARLY_S:
            self._arm(self._due_s - now_s)
        else:
            self._start_step(self._finish_step(now_s), now_s)

    def _finish_step(self, now_s: float) -> float:
        """Hand out what the step made; returns the model time at which the next may start."""
        late_s = max(0.0, now_s - self._due_s)
        self.metrics.lateness.observe(late_s)
        self.lateness_max_s = max(self.lateness_max_s, late_s)
        for event in self.engine.finish_step(self._due_s):
            if isinstance(event, TokenOut):
                sink = self._sinks.get(event.request_id)
                if sink is not None:
                    sink.token(event)
            elif isinstance(event, Finished):
                self._finish(event)
        self._absorb_now_and_then()
        return max(self._due_s, now_s - MAX_LAG_S)

    def _finish(self, end: Finished) -> None:
        self.metrics.finished(end)
        self._imports.pop(end.request_id, None)
        sink = self._sinks.pop(end.request_id, None)
        if sink is not None:
            sink.finished(end)

    def _absorb_now_and_then(self) -> None:
        self._steps_until_absorb -= 1
        if self._steps_until_absorb <= 0:
            self._steps_until_absorb = _STEPS_PER_ABSORB
            self.metrics.absorb(self.engine.stats)

    def _start_step(self, start_s: float, now_s: float) -> None:
        """Start a step at `start_s`, or, if there is nothing to do then, when the inbox's next happened."""
        while True:
            self._take_inbox(start_s)
            step = self.engine.start_step(start_s)
            self._start_fetches()
            if step is not None:
                self._due_s = start_s + step.duration_s * self.slow_factor
                self._arm(self._due_s - now_s)
                return
            if not self._inbox:
                self._wait_for_lease(now_s)
                return
            start_s = max(start_s, self._inbox[0][0])

    def _take_inbox(self, until_s: float) -> None:
        while self._inbox and self._inbox[0][0] <= until_s:
            at_s, act = self._inbox.popleft()
            act(at_s)

    def _start_fetches(self) -> None:
        for fetch in self.engine.take_fetches():
            request = self._imports.get(fetch.request_id)
            if self.puller is not None and request is not None:
                self.puller.start(fetch, own=request.digest)

    def _wait_for_lease(self, now_s: float) -> None:
        """Idle: wake when the next lease runs out, so that its blocks are free then."""
        self.engine.expire_leases(now_s)
        deadline_s = self.engine.next_deadline_s()
        if deadline_s is not None:
            self._arm(max(deadline_s - now_s, 0.001))

    def _die(self) -> None:
        self.halt()
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink.died()
        self.on_death()
