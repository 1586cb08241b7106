"""One engine with its runner and its KV puller: what requests, faults and shutdown do to it.

Fault DIE ends this process with `os._exit`: never inject it into a service within a test's own process. `app`
calls it for each request, and `__main__` starts and ends it.
"""

import asyncio
import os
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

from fulcrum_simulator.engine import Engine, EngineRequest
from fulcrum_simulator.server.faults import Fault, FaultKind
from fulcrum_simulator.server.log import log
from fulcrum_simulator.server.metrics import CacheConfig, EngineMetrics
from fulcrum_simulator.server.options import Options
from fulcrum_simulator.server.runner import EngineRunner, TokenSink
from fulcrum_simulator.server.side_channel_puller import SideChannelPuller

STEP_NOISE = 0.05
"""Largest relative deviation of a step's duration."""
_DIE_DELAY_S = 0.02
"""Time for the response to leave before the process exits."""
_DRAIN_POLL_S = 0.02


class EngineService:
    """The engine, its runner, its puller, and the faults that are active."""

    def __init__(self, options: Options, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is the engine's clock; it must run at the same rate as the event loop's."""
        profile = options.profile
        cache_config = CacheConfig(
            block_tokens=profile.block_size,
            num_blocks=profile.kv_blocks,
            kv_bytes=profile.kv_blocks * profile.block_size * profile.kv_bytes_per_token,
            max_model_tokens=options.max_model_tokens,
        )
        engine = Engine(
            profile,
            engine_id=str(uuid.uuid4()),
            lease_s=options.lease_s,
            draw_step_factor=_make_step_factors(options.seed),
        )
        self.options = options
        self.runner = EngineRunner(
            engine,
            EngineMetrics(model=options.model, cache=cache_config, created_s=time.time()),
            now_s=now_s,
        )
        self.puller = SideChannelPuller(self.runner, model=options.model, lease_s=options.lease_s)
        self.runner.puller = self.puller
        self.side_channel_port = 0
        self.refusing = False
        """Fault REFUSE is active: the HTTP server refuses requests."""
        self._aborting = False
        self._not_hung = asyncio.Event()
        self._not_hung.set()

    async def wait_while_hung(self) -> None:
        """Return once the engine is not hung."""
        await self._not_hung.wait()

    def submit(self, request: EngineRequest, sink: TokenSink) -> None:
        """Run a request.

        While draining, or with fault ABORT_DRAINING, end it at once with finish reason "abort" and no tokens.
        """
        if self._aborting:
            sink.on_finished(None)
        else:
            self.runner.submit(request, sink)

    async def drain(self, timeout_s: float) -> bool:
        """End new requests at once (see `submit`) and wait for running requests and leases to end.

        After `timeout_s` the engine is paused and the result is False. With 0 all running requests are
        aborted at once.
        """
        self._aborting = True
        if timeout_s == 0:
            self.runner.abort_all()
            return True
        deadline_s = self.runner.now_s() + timeout_s
        while self.runner.live_requests or self.runner.engine.gauges.leases:
            if self.runner.now_s() >= deadline_s:
                self.runner.pause()
                return False
            await asyncio.sleep(_DRAIN_POLL_S)
        return True

    async def wait_for_clients(self) -> None:
        """Return once all clients with unfinished requests have disconnected."""
        while self.runner.live_requests:
            await asyncio.sleep(_DRAIN_POLL_S)

    def inject_fault(self, fault: Fault) -> None:
        """Activate a fault; NONE deactivates all, and also lets a draining engine take requests again."""
        log("info", "fault injected", at_s=time.time(), instance=self.options.name, **_fault_fields(fault))
        match fault.kind:
            case FaultKind.DIE:
                asyncio.get_running_loop().call_later(_DIE_DELAY_S, os._exit, 1)
            case FaultKind.HANG:
                self._not_hung.clear()
                self.runner.pause()
            case FaultKind.SLOW:
                self.runner.slow_factor = fault.factor
            case FaultKind.REFUSE:
                self.refusing = True
            case FaultKind.ABORT_DRAINING:
                self._aborting = True
            case FaultKind.EXPIRE_LEASES:
                self.runner.expire_all_leases()
            case FaultKind.FAIL_TRANSFERS:
                self.puller.fail_next_pulls(fault.count)
            case FaultKind.SLOW_TRANSFERS:
                self.puller.slow_factor = fault.factor
            case FaultKind.NONE:
                self._clear_faults()

    def _clear_faults(self) -> None:
        self.refusing = self._aborting = False
        self.runner.slow_factor = self.puller.slow_factor = 1.0
        self.puller.fail_next_pulls(0)
        if not self._not_hung.is_set():
            self._not_hung.set()
            self.runner.resume()

    def read_stats(self) -> dict[str, Any]:
        """Return the figures for `/simulator/stats`; step lateness in milliseconds."""
        gauges, lateness = self.runner.engine.gauges, self.runner.metrics.step_lateness
        return {
            "name": self.options.name,
            "engine_id": self.runner.engine.engine_id,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "kv_usage": gauges.kv_usage,
            "leases": gauges.leases,
            "steps": self.runner.engine.stats.steps,
            "lateness_ms": {
                "p50": lateness.quantile(0.50) * 1000,
                "p99": lateness.quantile(0.99) * 1000,
                "max": self.runner.lateness_max_s * 1000,
            },
        }


def _fault_fields(fault: Fault) -> dict[str, Any]:
    return {"fault": fault.kind.value, "factor": fault.factor, "count": fault.count}


def _make_step_factors(seed: int) -> Callable[[], float] | None:
    """Return a function that draws a factor within ± 5 % for each step; None for seed 0."""
    if seed == 0:
        return None
    rng = random.Random(seed)
    return lambda: rng.uniform(1 - STEP_NOISE, 1 + STEP_NOISE)
