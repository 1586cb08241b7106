"""The step loop: runs the engine model in real time, with absolute deadlines.

Model time follows `time.monotonic`. A step due at 10.000 s whose timer fires at 10.003 s has ended at 10.000
s: the next step starts there, so late wake-ups do not accumulate and slow the engine down. Events in between
(an arrival, a fetched block) keep their own time and take part in the next step that starts after them.
Lateness is measured. Beyond `LAG_MAX_S` the lost time is skipped: an engine that caught up on seconds of
steps would respond in bursts, unlike any real engine. `service` owns the loop; what runs in a step is decided
by the engine model.
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
"""Lateness up to which the engine catches up; time beyond it is skipped."""
TIMER_EARLY_S = 0.0005
"""uvloop rounds timers to milliseconds and may fire this early; ending a step this early is harmless."""
_STEPS_PER_FLUSH = 256
"""Steps between two moves of samples into the histograms."""


class TokenSink(Protocol):
    """Receives the tokens of one request. Called from the step loop, so the methods must not block."""

    def on_token(self, out: OutputToken) -> None:
        """Receive one token."""
        ...

    def on_finished(self, end: Finished | None) -> None:
        """Receive the end of the request; None if it was aborted before it reached the engine."""
        ...

    def on_engine_death(self) -> None:
        """The engine died; nothing follows."""
        ...


class KvPuller(Protocol):
    """Pulls the blocks of imports from prefill instances; reports to `complete_fetch` and `fail_fetch`."""

    def start_pull(self, fetch: KvFetch, *, own_digest: bytes) -> None:
        """Start pulling the blocks of a KV transfer.

        `own_digest` is the digest of the request's whole prompt. A block with another digest holds the KV of
        another prompt.
        """
        ...

    def cancel(self, request_id: str, source: KvImportRequest) -> None:
        """Stop pulling for a request that ended, and have the prefill instance free its blocks."""
        ...


class EngineRunner:
    """Owns the engine and its clock. All methods are called on the event loop's thread."""

    def __init__(
        self, engine: Engine, metrics: EngineMetrics, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`now_s` is the clock of engine and runner; it must run at the same rate as the event loop's."""
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
        """Number of requests that have not ended."""
        return len(self._sinks)

    @property
    def dead(self) -> bool:
        """Whether the engine died of an invalid request."""
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
        """End a request whose client disconnected; its sink is not called again."""
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
        """End every request with finish reason "abort"; clients get the tokens so far."""
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
        """Record that the blocks of a fetch arrived and hold the prompt with this digest."""
        self._imports.pop(request_id, None)
        self._schedule(self.now_s(), lambda now_s: self._end_fetch(request_id, digest, now_s))

    def fail_fetch(self, request_id: str) -> None:
        """Record that a fetch failed; the engine computes the prompt itself."""
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
        """Free the blocks of a lease, pulled or not; False if the lease has ended already."""
        freed = self.engine.release_lease(request_id, self.now_s())
        self._wake_if_idle()
        return freed

    def expire_all_leases(self) -> None:
        """Free all blocks pinned for decode instances, whatever time their leases have left."""
        self.engine.expire_leases(math.inf)
        self._wake_if_idle()

    def pause(self) -> None:
        """Stop stepping: requests get no more tokens."""
        self._paused = True
        self._cancel_timer()

    def resume(self) -> None:
        """Continue after `pause`. The pause does not count as time of the engine."""
        self._paused = False
        self._due_s = max(self._due_s, self.now_s())
        self._set_timer(0.0)

    def _schedule(self, at_s: float, action: Callable[[float], None]) -> None:
        """Run `action` on the engine at model time `at_s`: now if the engine is idle, else before the next
        step.
        """
        self._scheduled.append((at_s, action))
        self._wake_if_idle()

    def _wake_if_idle(self) -> None:
        """Let an idle engine check for work, after an arrival or after blocks were freed."""
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
        """End the step if it is due, and start the next one at that time; start one if the engine is idle."""
        if not self.engine.busy:
            started_s = self._scheduled[0][0] if self._scheduled else now_s
            self._start_step(max(started_s, self._due_s, now_s - LAG_MAX_S), now_s)
        elif now_s < self._due_s - TIMER_EARLY_S:
            self._set_timer(self._due_s - now_s)
        else:
            self._start_step(self._finish_step(now_s), now_s)

    def _finish_step(self, now_s: float) -> float:
        """End the step and pass its tokens on; returns the model time at which the next step may start."""
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
        """Start a step at `start_s`; if there is nothing to do then, at the time of the next scheduled
        action.
        """
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
        """Wake an idle engine when the next lease expires, to free its blocks."""
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
