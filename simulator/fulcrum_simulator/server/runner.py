"""The step loop: the pure engine model in real time, on absolute deadlines.

Model time runs along `time.monotonic`. A step that should have ended at 10.000 s and is noticed at 10.003 s
ended at 10.000 s: its successor starts there and is due on time, so late wake-ups do not add up to a slower
engine. What happens in between (an arrival, a fetched block) keeps its own time and takes part in the next
step that starts after it, as it would have on a machine that is never late. How late the loop was is
measured; past `LAG_MAX_S` the lost time is given up, since an engine that owes seconds of steps would answer
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
    Finished,
    KvFetch,
    KvImportRequest,
    OutputToken,
)
from fulcrum_simulator.server.metrics import EngineMetrics

LAG_MAX_S = 0.1
# uvloop's timers count whole milliseconds and may fire that much early; ending a step so early does no harm.
TIMER_EARLY_S = 0.0005
_STEPS_PER_FLUSH = 256


class TokenSink(Protocol):
    """Where one request's tokens go. Called from the step loop: must not block."""

    def on_token(self, out: OutputToken) -> None:
        """One more token."""
        ...

    def on_finished(self, end: Finished | None) -> None:
        """The request's end; nothing follows. None: aborted before the engine saw it."""
        ...

    def on_engine_death(self) -> None:
        """The engine died; nothing follows."""
        ...


class KvPuller(Protocol):
    """The taker's side of hand-offs: told what to fetch, and what is no longer wanted."""

    def start_pull(self, fetch: KvFetch, *, own_digest: bytes) -> None:
        """Pull these blocks for the prompt with digest `own_digest`; report to the runner."""
        ...

    def cancel(self, request_id: str, source: KvImportRequest) -> None:
        """The request ended: stop pulling, and tell the giver that its blocks are free."""
        ...


class EngineRunner:
    """Owns the engine and its clock; every call comes from the event loop's thread."""

    def __init__(
        self, engine: Engine, metrics: EngineMetrics, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`now_s` is the clock of engine and runner; it must run as fast as the event loop's."""
        self.engine, self.metrics, self.now_s = engine, metrics, now_s
        self.puller: KvPuller | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.slow_factor = 1.0
        self.lateness_max_s = 0.0
        self._sinks: dict[str, TokenSink] = {}
        self._imports: dict[str, EngineRequest] = {}
        self._scheduled: deque[tuple[float, Callable[[float], None]]] = deque()
        self._due_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._paused = False
        self._steps_until_flush = _STEPS_PER_FLUSH

    @property
    def live_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    @property
    def dead(self) -> bool:
        """Whether the engine died of what it was sent."""
        return self.engine.dead

    def submit(self, request: EngineRequest, sink: TokenSink) -> None:
        """Queue a request; its tokens go to `sink`."""
        self._sinks[request.id] = sink
        if isinstance(request.kv_transfer, KvImportRequest):
            self._imports[request.id] = request
        self._schedule(request.arrival_s, lambda _: self._submit(request))

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
            self._handle_death()
            return
        self._end_import(request_id, end)
        self._wake_if_idle()

    def abort_all(self) -> None:
        """End every request with reason "abort"; their clients get what there is."""
        for request_id in list(self._sinks):
            try:
                end = self.engine.abort(request_id, self.now_s())
            except EngineDead:
                self._handle_death()
                return
            sink = self._sinks.pop(request_id)
            self._end_import(request_id, end)
            sink.on_finished(end)

    def _end_import(self, request_id: str, end: Finished | None) -> None:
        if end is not None:
            self.metrics.record_finished(end)
        request = self._imports.pop(request_id, None)
        if (
            request is not None
            and isinstance(request.kv_transfer, KvImportRequest)
            and self.puller is not None
        ):
            self.puller.cancel(request_id, request.kv_transfer)

    def complete_fetch(self, request_id: str, digest: bytes) -> None:
        """The blocks of a fetch arrived and hold the prompt with this digest."""
        self._imports.pop(request_id, None)
        self._schedule(self.now_s(), lambda now_s: self._end_fetch(request_id, digest, now_s))

    def fail_fetch(self, request_id: str) -> None:
        """A fetch failed: the engine computes the prompt itself."""
        self._imports.pop(request_id, None)
        self._schedule(self.now_s(), lambda now_s: self._end_fetch(request_id, None, now_s))

    def _end_fetch(self, request_id: str, digest: bytes | None, now_s: float) -> None:
        if request_id not in self._sinks:
            return
        if digest is None:
            self.engine.fail_kv_fetch(request_id, now_s)
        else:
            self.engine.complete_kv_fetch(request_id, digest, now_s)

    def release_lease(self, request_id: str) -> bool:
        """A peer has read the blocks held for it, or will not; False if they were no longer held."""
        freed = self.engine.release_lease(request_id, self.now_s())
        self._wake_if_idle()
        return freed

    def expire_all_leases(self) -> None:
        """Give up every block held for peers, however fresh its lease."""
        self.engine.expire_leases(math.inf)
        self._wake_if_idle()

    def pause(self) -> None:
        """Stop stepping: what runs is never answered."""
        self._paused = True
        self._cancel_timer()

    def resume(self) -> None:
        """Step again after `pause`; the time in between did not pass for the engine."""
        self._paused = False
        self._due_s = max(self._due_s, self.now_s())
        self._set_timer(0.0)

    def _schedule(self, at_s: float, action: Callable[[float], None]) -> None:
        """Have something happen to the engine at `at_s`: at once if it idles, else before the next step."""
        self._scheduled.append((at_s, action))
        self._wake_if_idle()

    def _wake_if_idle(self) -> None:
        """Have an idle engine look for work: something arrived, or blocks became free."""
        if not self._paused and not self.engine.busy:
            self._set_timer(0.0)

    def _set_timer(self, delay_s: float) -> None:
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._timer = (
            loop.call_later(delay_s, self._on_timer) if delay_s > 0 else loop.call_soon(self._on_timer)
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self._advance(self.now_s())
        except EngineDead:
            self._handle_death()

    def _advance(self, now_s: float) -> None:
        """End the step that is due and start the next where it ended; an idle engine's, when work came."""
        if not self.engine.busy:
            started_s = self._scheduled[0][0] if self._scheduled else now_s
            self._start_step(max(started_s, self._due_s, now_s - LAG_MAX_S), now_s)
        elif now_s < self._due_s - TIMER_EARLY_S:
            self._set_timer(self._due_s - now_s)
        else:
            self._start_step(self._finish_step(now_s), now_s)

    def _finish_step(self, now_s: float) -> float:
        """Hand out what the step made; returns the model time at which the next may start."""
        late_s = max(0.0, now_s - self._due_s)
        self.metrics.step_lateness.observe(late_s)
        self.lateness_max_s = max(self.lateness_max_s, late_s)
        for event in self.engine.finish_step(self._due_s):
            if isinstance(event, OutputToken):
                sink = self._sinks.get(event.request_id)
                if sink is not None:
                    sink.on_token(event)
            elif isinstance(event, Finished):
                self._finish_request(event)
        self._flush_samples_if_due()
        return max(self._due_s, now_s - LAG_MAX_S)

    def _finish_request(self, end: Finished) -> None:
        self.metrics.record_finished(end)
        self._imports.pop(end.request_id, None)
        sink = self._sinks.pop(end.request_id, None)
        if sink is not None:
            sink.on_finished(end)

    def _flush_samples_if_due(self) -> None:
        self._steps_until_flush -= 1
        if self._steps_until_flush <= 0:
            self._steps_until_flush = _STEPS_PER_FLUSH
            self.metrics.flush_samples(self.engine.stats)

    def _start_step(self, start_s: float, now_s: float) -> None:
        """Start a step at `start_s`, or, if there is nothing to do then, when the inbox's next happened."""
        while True:
            self._run_scheduled(start_s)
            step = self.engine.start_step(start_s)
            self._start_fetches()
            if step is not None:
                self._due_s = start_s + step.duration_s * self.slow_factor
                self._set_timer(self._due_s - now_s)
                return
            if not self._scheduled:
                self._set_lease_timer(now_s)
                return
            start_s = max(start_s, self._scheduled[0][0])

    def _run_scheduled(self, until_s: float) -> None:
        while self._scheduled and self._scheduled[0][0] <= until_s:
            at_s, action = self._scheduled.popleft()
            action(at_s)

    def _start_fetches(self) -> None:
        for fetch in self.engine.take_kv_fetches():
            request = self._imports.get(fetch.request_id)
            if self.puller is not None and request is not None:
                self.puller.start_pull(fetch, own_digest=request.digest)

    def _set_lease_timer(self, now_s: float) -> None:
        """Idle: wake when the next lease runs out, so that its blocks are free then."""
        self.engine.expire_leases(now_s)
        deadline_s = self.engine.next_lease_expiry_s()
        if deadline_s is not None:
            self._set_timer(max(deadline_s - now_s, 0.001))

    def _handle_death(self) -> None:
        self.pause()
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink.on_engine_death()
        self.on_death()
