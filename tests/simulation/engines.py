"""Engine servers without sockets: the engine model on the virtual clock, its network and its runtime.

An `EngineProcess` is one process of an engine server. `SimulatedRuntime` starts another one after a crash,
like the runtime of a local run.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

from fulcrum_core.api import PDInstance
from fulcrum_core.ports import EngineObservation, EngineState, InstanceKey
from fulcrum_core.profiles import EngineProfile
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_simulator.engine import (
    Engine,
    Finished,
    HandshakeQueue,
    KvFetch,
    LinkEnd,
    OutputToken,
    estimate_transfer_s,
    pulled_digest,
    reserve_transfer,
)
from fulcrum_simulator.routing import SimulatedLeg
from tests.simulation.history import History
from tests.waiting import advance

LEASE_S = 6.0
"""Lease on exported KV cache, in seconds."""
RESTART_AFTER_S = 0.5
"""Time from an engine's death to its restart, in seconds."""


class EngineProcess:
    """One process of an engine server, from serving to its death."""

    def __init__(
        self,
        name: str,
        restarts: int,
        port: int,
        profile: EngineProfile,
        network: "Network",
        noise_rng: random.Random,
    ) -> None:
        self.name, self.port, self.restarts = name, port, restarts
        self.engine = Engine(
            profile,
            engine_id=f"{name}/{restarts}",
            lease_s=LEASE_S,
            draw_step_factor=lambda: noise_rng.uniform(0.95, 1.05),
        )
        self.egress, self.ingress = LinkEnd(), LinkEnd()
        self.alive = True
        self.fetches_to_fail = 0
        self.emitted_tokens = 0
        self._network = network
        self._handshakes = HandshakeQueue(profile.handshake_s)
        self._legs: dict[str, SimulatedLeg] = {}
        self._work_arrived = asyncio.Event()
        self._not_hung = asyncio.Event()
        self._not_hung.set()
        self._tasks = {asyncio.get_running_loop().create_task(self._run())}

    @property
    def hung(self) -> bool:
        return not self._not_hung.is_set()

    def open(self, leg: SimulatedLeg) -> bool:
        """Accept a request; False if the process is dead."""
        if not self.alive:
            return False
        self._legs[leg.request.id] = leg
        self.engine.submit(leg.request)
        self._work_arrived.set()
        return True

    def close(self, leg: SimulatedLeg) -> None:
        """Abort a leg whose client disconnected."""
        if self._legs.pop(leg.request.id, None) is not None and self.alive:
            self.engine.abort(leg.request.id, self._now_s())
            self._work_arrived.set()

    def hang(self, duration_s: float) -> None:
        """Stop stepping and responding for a time."""
        self._not_hung.clear()
        asyncio.get_running_loop().call_later(duration_s, self._not_hung.set)

    def release_lease(self, request_id: str) -> bool:
        """Free the blocks that a decode instance has read; False if the lease had expired."""
        freed = self.engine.release_lease(request_id, self._now_s())
        self._work_arrived.set()
        return freed

    def die(self) -> None:
        """End the process; all its legs break."""
        self.alive = False
        for task in self._tasks:
            task.cancel()
        legs, self._legs = self._legs, {}
        for leg in legs.values():
            leg.on_failure(Failure.CLOSED)

    async def _run(self) -> None:
        while True:
            await self._not_hung.wait()
            self._work_arrived.clear()
            step = self.engine.start_step(self._now_s())
            for fetch in self.engine.take_kv_fetches():
                self._start_task(self._fetch(fetch))
            if step is None:
                await self._wait_for_work()
                continue
            await advance(step.duration_s)
            await self._not_hung.wait()
            for event in self.engine.finish_step(self._now_s()):
                if isinstance(event, OutputToken):
                    self._emit(event)
                elif isinstance(event, Finished):
                    self._finish(event)

    def _emit(self, token: OutputToken) -> None:
        self.emitted_tokens += 1
        leg = self._legs.get(token.request_id)
        if leg is not None:
            leg.on_token(token)

    def _finish(self, end: Finished) -> None:
        leg = self._legs.pop(end.request_id, None)
        if leg is not None:
            leg.on_end(end)

    async def _wait_for_work(self) -> None:
        deadline_s = self.engine.next_lease_expiry_s()
        wait_s = None if deadline_s is None else max(1e-6, deadline_s - self._now_s())
        try:
            async with asyncio.timeout(wait_s):
                await self._work_arrived.wait()
        except TimeoutError:
            self.engine.expire_leases(self._now_s())

    async def _fetch(self, fetch: KvFetch) -> None:
        read = await self._pull(fetch)
        leg = self._legs.get(fetch.request_id)
        if leg is not None:
            if read is None:
                self.engine.fail_kv_fetch(fetch.request_id, self._now_s())
            else:
                self.engine.complete_kv_fetch(
                    fetch.request_id, pulled_digest(read, own_digest=leg.request.digest), self._now_s()
                )
        self._work_arrived.set()

    async def _pull(self, fetch: KvFetch) -> tuple[bytes, ...] | None:
        """Return what the blocks hold at the end of the transfer; None if the transfer failed."""
        if self.fetches_to_fail > 0:
            self.fetches_to_fail -= 1
            return None
        source = self._network.find_reachable(fetch.source.port, fetch.source.engine_id)
        handshake = self._handshakes.reserve_handshake(
            fetch.source.engine_id, reachable=source is not None, now_s=self._now_s()
        )
        await advance(handshake.end_s - self._now_s())
        if source is None or not handshake.ok:
            return None
        profile = self.engine.profile
        duration_s = estimate_transfer_s(
            fetch.kv_bytes, link_bytes_per_s=profile.link_bytes_per_s, link_setup_s=profile.link_setup_s
        )
        slot = reserve_transfer(source.egress, self.ingress, duration_s, now_s=self._now_s())
        await advance(slot.end_s - self._now_s())
        if not source.alive:
            return None
        read = source.engine.read_blocks(fetch.remote_block_ids)
        leg = self._legs.get(fetch.request_id)
        if fetch.source.request_id and not source.release_lease(fetch.source.request_id) and leg is not None:
            leg.lease_expired = True
        return read

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


class Network:
    """The engine processes by the port on which they listen."""

    def __init__(self) -> None:
        self._ports = itertools.count(9001)
        self._listening: dict[int, EngineProcess] = {}

    def listen(self, make: Callable[[int], EngineProcess]) -> EngineProcess:
        """Start a process on a port that was never used before."""
        port = next(self._ports)
        self._listening[port] = make(port)
        return self._listening[port]

    def find(self, port: int) -> EngineProcess | None:
        """Return the living process on this port."""
        process = self._listening.get(port)
        return process if process is not None and process.alive else None

    def find_reachable(self, port: int, engine_id: str) -> EngineProcess | None:
        """Return the process on this port if it has that engine id and does not hang."""
        process = self.find(port)
        matches = process is not None and process.engine.engine_id == engine_id and not process.hung
        return process if matches else None


class SimulatedRuntime:
    """An `EngineRuntime` that starts simulated engines and restarts them when they die."""

    def __init__(
        self, profile: EngineProfile, network: Network, history: History, rng: random.Random
    ) -> None:
        self._profile, self._network, self._history, self._rng = profile, network, history, rng
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._observations: dict[str, EngineObservation] = {}
        self.processes: dict[str, EngineProcess] = {}
        self.all_processes: list[EngineProcess] = []
        self._died: dict[str, asyncio.Event] = {}

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """See `EngineRuntime`."""
        del startup_s
        name = instance.metadata.name
        if name not in self._supervisors:
            self._died[name] = asyncio.Event()
            self._supervisors[name] = asyncio.get_running_loop().create_task(self._supervise(name))

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:  # noqa: ARG002
        """See `EngineRuntime`."""
        name = key.name
        supervisor = self._supervisors.pop(name, None)
        if supervisor is not None:
            supervisor.cancel()
            self._observations.pop(name, None)
            process = self.processes.pop(name, None)
            if process is not None:
                process.die()

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """See `EngineRuntime`."""
        del namespace
        return tuple(self._observations[name] for name in sorted(self._observations))

    def kill(self, name: str) -> None:
        """Kill the engine of this name, if it runs."""
        process = self.processes.pop(name, None)
        if process is not None:
            self._history.record("engine died", instance=name, restarts=process.restarts)
            process.die()
            self._died[name].set()

    def close(self) -> None:
        """Stop all engines."""
        for supervisor in self._supervisors.values():
            supervisor.cancel()
        for process in self.processes.values():
            process.die()

    async def _supervise(self, name: str) -> None:
        reason = None
        for restarts in itertools.count():
            self._observations[name] = EngineObservation(
                name, EngineState.STARTING, restarts, exit_reason=reason
            )
            await advance(self._profile.startup_s)
            noise_rng = random.Random(self._rng.random())
            process = self._network.listen(
                lambda port, restarts=restarts, noise_rng=noise_rng: EngineProcess(  # type: ignore[misc]
                    name, restarts, port, self._profile, self._network, noise_rng
                )
            )
            self.processes[name] = process
            self.all_processes.append(process)
            self._observations[name] = EngineObservation(
                name, EngineState.RUNNING, restarts, f"sim:{process.port}"
            )
            self._history.record("engine serves", instance=name, restarts=restarts)
            await self._died[name].wait()
            self._died[name].clear()
            reason = "killed"
            self._observations[name] = EngineObservation(
                name, EngineState.EXITED, restarts, exit_reason=reason
            )
            await advance(RESTART_AFTER_S)
