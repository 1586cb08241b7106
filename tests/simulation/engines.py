"""Engine servers without sockets: the engine model on the virtual clock, their network and their runtime.

An `EngineProcess` is one life of a server; the runtime starts another after a crash, as the local one does.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fulcrum_core.api import PDInstance
from fulcrum_core.ports import EngineObservation, EngineState, InstanceKey
from fulcrum_core.profiles import EngineProfile
from fulcrum_simulator.engine import (
    Engine,
    EngineRequest,
    FetchStart,
    Finished,
    Handshakes,
    LinkEnd,
    TokenOut,
    held_digest,
    reserve_transfer,
    transfer_s,
)
from tests.simulation.history import History

LEASE_S = 6.0
RESTART_AFTER_S = 0.5


class LegBroken(Exception):
    """The engine is gone, or was never there."""


@dataclass(slots=True)
class Leg:
    """One request on one engine: its tokens go to `on_token`, its end to `ended`."""

    request: EngineRequest
    on_token: Callable[[TokenOut], None]
    ended: "asyncio.Future[Finished]" = field(init=False)
    tainted: bool = False
    """The giver says that the blocks were given up before they were read."""
    heard_s: float = 0.0
    """When its last token came."""

    def __post_init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: no warning


class EngineProcess:
    """A server's life, from serving to its death."""

    def __init__(
        self,
        name: str,
        life: int,
        port: int,
        profile: EngineProfile,
        network: "Network",
        noise: random.Random,
    ) -> None:
        self.name, self.port, self.life = name, port, life
        self.engine = Engine(
            profile,
            engine_id=f"{name}/{life}",
            lease_s=LEASE_S,
            step_noise=lambda: noise.uniform(0.95, 1.05),
        )
        self.egress, self.ingress = LinkEnd(), LinkEnd()
        self.alive = True
        self.fetches_to_fail = 0
        self.emitted = 0
        self._network = network
        self._handshakes = Handshakes(profile.handshake_s)
        self._legs: dict[str, Leg] = {}
        self._wake = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._tasks = {asyncio.get_running_loop().create_task(self._run())}

    @property
    def hung(self) -> bool:
        return not self._awake.is_set()

    def open(self, leg: Leg) -> None:
        """Take a request, or raise `LegBroken`: connection refused."""
        if not self.alive:
            raise LegBroken("refused")
        self._legs[leg.request.id] = leg
        self.engine.submit(leg.request)
        self._wake.set()

    def close(self, leg: Leg) -> None:
        """The client of a leg leaves."""
        if self._legs.pop(leg.request.id, None) is not None and self.alive:
            self.engine.abort(leg.request.id, self._now_s())
            self._wake.set()

    def hang(self, lasts_s: float) -> None:
        """Do nothing for a while, and answer nobody."""
        self._awake.clear()
        asyncio.get_running_loop().call_later(lasts_s, self._awake.set)

    def notify_pulled(self, request_id: str) -> bool:
        """A taker has read its blocks."""
        freed = self.engine.notify_pulled(request_id, self._now_s())
        self._wake.set()
        return freed

    def die(self) -> None:
        """The process is gone, with all it held."""
        self.alive = False
        for task in self._tasks:
            task.cancel()
        for leg in self._legs.values():
            if not leg.ended.done():
                leg.ended.set_exception(LegBroken("died"))
        self._legs.clear()

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            self._wake.clear()
            step = self.engine.start_step(self._now_s())
            for fetch in self.engine.take_fetches():
                self._start(self._fetch(fetch))
            if step is None:
                await self._idle()
                continue
            await asyncio.sleep(step.duration_s)
            await self._awake.wait()
            for event in self.engine.finish_step(self._now_s()):
                if isinstance(event, TokenOut):
                    self._emit(event)
                elif isinstance(event, Finished):
                    self._finish(event)

    def _emit(self, token: TokenOut) -> None:
        self.emitted += 1
        leg = self._legs.get(token.request_id)
        if leg is not None:
            leg.heard_s = self._now_s()
            leg.on_token(token)

    def _finish(self, end: Finished) -> None:
        leg = self._legs.pop(end.request_id, None)
        if leg is not None and not leg.ended.done():
            leg.ended.set_result(end)

    async def _idle(self) -> None:
        deadline_s = self.engine.next_deadline_s()
        wait_s = None if deadline_s is None else max(1e-6, deadline_s - self._now_s())
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            self.engine.expire_leases(self._now_s())

    async def _fetch(self, fetch: FetchStart) -> None:
        read = await self._pull(fetch)
        leg = self._legs.get(fetch.request_id)
        if leg is not None:
            if read is None:
                self.engine.kv_fetch_failed(fetch.request_id, self._now_s())
            else:
                self.engine.kv_fetch_done(
                    fetch.request_id, held_digest(read, own=leg.request.digest), self._now_s()
                )
        self._wake.set()

    async def _pull(self, fetch: FetchStart) -> tuple[bytes, ...] | None:
        """The blocks as the giver held them at the end of the transfer; None if they did not come."""
        if self.fetches_to_fail > 0:
            self.fetches_to_fail -= 1
            return None
        giver = self._network.reachable(fetch.source.port, fetch.source.engine_id)
        shaken = self._handshakes.shake(
            fetch.source.engine_id, reachable=giver is not None, now_s=self._now_s()
        )
        await asyncio.sleep(shaken.end_s - self._now_s())
        if giver is None or not shaken.ok:
            return None
        profile = self.engine.profile
        duration_s = transfer_s(
            fetch.kv_bytes, link_bytes_s=profile.link_bytes_s, link_setup_s=profile.link_setup_s
        )
        slot = reserve_transfer(giver.egress, self.ingress, duration_s, now_s=self._now_s())
        await asyncio.sleep(slot.end_s - self._now_s())
        if not giver.alive:
            return None
        read = giver.engine.read_blocks(fetch.remote_block_ids)
        leg = self._legs.get(fetch.request_id)
        if fetch.source.request_id and not giver.notify_pulled(fetch.source.request_id) and leg is not None:
            leg.tainted = True
        return read

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


class Network:
    """Who listens on which port."""

    def __init__(self) -> None:
        self._ports = itertools.count(9001)
        self._listening: dict[int, EngineProcess] = {}

    def listen(self, make: Callable[[int], EngineProcess]) -> EngineProcess:
        """A process on a port that nobody had before."""
        port = next(self._ports)
        self._listening[port] = make(port)
        return self._listening[port]

    def at(self, port: int) -> EngineProcess | None:
        """The process that listens there."""
        process = self._listening.get(port)
        return process if process is not None and process.alive else None

    def reachable(self, port: int, engine_id: str) -> EngineProcess | None:
        """The engine of that id, if it answers a handshake there."""
        process = self.at(port)
        right = process is not None and process.engine.engine_id == engine_id and not process.hung
        return process if right else None


class Runtime:
    """`EngineRuntime`: starts engines, and starts them again when they die."""

    def __init__(
        self, profile: EngineProfile, network: Network, history: History, rng: random.Random
    ) -> None:
        self._profile, self._network, self._history, self._rng = profile, network, history, rng
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, EngineObservation] = {}
        self.processes: dict[str, EngineProcess] = {}
        self.all_lives: list[EngineProcess] = []
        self._died: dict[str, asyncio.Event] = {}

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """See `EngineRuntime`."""
        del startup_s
        name = instance.metadata.name
        if name not in self._keepers:
            self._died[name] = asyncio.Event()
            self._keepers[name] = asyncio.get_running_loop().create_task(self._keep(name))

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:  # noqa: ARG002
        """See `EngineRuntime`."""
        name = key.name
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()
            self._seen.pop(name, None)
            process = self.processes.pop(name, None)
            if process is not None:
                process.die()

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """See `EngineRuntime`."""
        del namespace
        return tuple(self._seen[name] for name in sorted(self._seen))

    def kill(self, name: str) -> None:
        """Let the engine of that name die, if it lives."""
        process = self.processes.pop(name, None)
        if process is not None:
            self._history.say("engine died", instance=name, life=process.life)
            process.die()
            self._died[name].set()

    def close(self) -> None:
        """End everything."""
        for keeper in self._keepers.values():
            keeper.cancel()
        for process in self.processes.values():
            process.die()

    async def _keep(self, name: str) -> None:
        reason = None
        for life in itertools.count():
            self._seen[name] = EngineObservation(name, EngineState.STARTING, life, exit_reason=reason)
            await asyncio.sleep(self._profile.startup_s)
            noise = random.Random(self._rng.random())
            process = self._network.listen(
                lambda port, life=life, noise=noise: EngineProcess(  # type: ignore[misc]
                    name, life, port, self._profile, self._network, noise
                )
            )
            self.processes[name] = process
            self.all_lives.append(process)
            self._seen[name] = EngineObservation(name, EngineState.RUNNING, life, f"sim:{process.port}")
            self._history.say("engine serves", instance=name, life=life)
            await self._died[name].wait()
            self._died[name].clear()
            reason = "killed"
            self._seen[name] = EngineObservation(name, EngineState.EXITED, life, exit_reason=reason)
            await asyncio.sleep(RESTART_AFTER_S)
