"""One simulated engine instance on the event queue: its steps, its KV transfers, its failure and restart.

The legs that it serves come from `router`. KV is pulled as by the engine server: a handshake at the first
contact of two engines, then one transfer after another on the links of both ends, under the lease of the
prefill instance. `run` makes the instances, and `router` sends to them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import KV_LEASE_S
from fulcrum_router.policy.ledger import DecodeEntry
from fulcrum_simulator.engine import (
    Engine,
    EngineGauges,
    EngineRequest,
    Finished,
    HandshakeQueue,
    KvFetch,
    LinkEnd,
    OutputToken,
    Samples,
    estimate_transfer_s,
    reserve_transfer,
)
from fulcrum_simulator.fleet.event_queue import STEP_END, EventQueue, ScheduledAction
from fulcrum_simulator.fleet.stepped_engine import SteppedEngine


class EngineLeg(Protocol):
    """One request on one instance, to whose events its sender listens."""

    request: EngineRequest
    entry: DecodeEntry | None
    """Counts the tokens after the first one; None: the sender does not want to know."""

    def on_token(self, token: OutputToken) -> None:
        """The engine produced the first or the last token now, or one after a preemption."""

    def on_end(self, end: Finished) -> None:
        """The engine finished the request."""

    def on_late_kv(self) -> None:
        """The prefill engine freed the KV before it was read: the output would be wrong."""

    def on_engine_death(self) -> None:
        """The engine failed; nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """How engines behave: their profile, the relative noise of a step's duration."""

    profile: EngineProfile
    step_noise: float
    lookahead_steps: int


class SimulatedInstance:
    """An instance whose engine runs from the start of the simulation.

    `peers` are all instances by the id of their current engine; the instance keeps its own entry.
    """

    def __init__(
        self,
        name: str,
        options: InstanceOptions,
        events: EventQueue,
        peers: dict[str, "SimulatedInstance"],
        rng: random.Random,
    ) -> None:
        self.name, self.restarts, self.alive = name, 0, False
        self.failed_transfers = 0
        self.on_restart: Callable[[], None] = lambda: None
        self.on_tokens: Callable[[int], None] = lambda _count: None
        """Adds so many tokens to each request that shares the count of the ledger."""
        self._options, self._events, self._peers, self._rng = options, events, peers, rng
        self._busy_s, self._preemptions, self._down_s, self._failed_at_s = (0.0, 0.0), 0, 0.0, 0.0
        """Until the last failure of the engine."""
        self._start_engine()

    def _start_engine(self) -> None:
        options, noise = self._options, self._options.step_noise
        draw = random.Random(self._rng.getrandbits(64)).random  # its own: steps planned ahead draw ahead
        self.engine = Engine(
            options.profile,
            engine_id=f"{self.name}/{self.restarts}",
            lease_s=KV_LEASE_S,
            draw_step_factor=(lambda: 1.0 + noise * (2.0 * draw() - 1.0)) if noise else None,
            tracks_contents=False,  # KV that was read too late is detected by its lease
        )
        self.steps = SteppedEngine(self.engine, lookahead_steps=options.lookahead_steps)
        self._legs: dict[str, EngineLeg] = {}
        self._sharing: dict[str, DecodeEntry | None] = {}
        """Requests that got a token in the last step and still decode; their entries share the count."""
        self._step_end: ScheduledAction | None = None
        self._lease_timer: ScheduledAction | None = None
        self.egress, self.ingress = LinkEnd(), LinkEnd()
        self._handshakes = HandshakeQueue(options.profile.handshake_s)
        self.alive = True
        self._peers[self.engine.engine_id] = self

    @property
    def busy_s(self) -> tuple[float, float]:
        """Time of steps with a prompt chunk and of all other steps, since the start of the run."""
        if not self.alive:
            return self._busy_s
        prefill_s, decode_s = self.steps.measure_busy_s(self._events.now_s)
        return self._busy_s[0] + prefill_s, self._busy_s[1] + decode_s

    @property
    def down_s(self) -> float:
        """Time without an engine, since the start of the run."""
        return self._down_s + (0.0 if self.alive else self._events.now_s - self._failed_at_s)

    @property
    def preemptions(self) -> int:
        """Requests that an engine preempted, since the start of the run."""
        return self._preemptions + (self.engine.stats.preemptions if self.alive else 0)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the engine's KV cache holds."""
        return self._options.profile.kv_blocks * self._options.profile.block_size

    # Requests

    def submit(self, leg: EngineLeg) -> None:
        """Take a leg. It ends at once if the engine has failed since it was sent."""
        if not self.alive:
            leg.on_engine_death()
            return
        self._interrupt()
        self._legs[leg.request.id] = leg
        self.engine.submit(leg.request)
        self._start_if_idle()

    def abort(self, request_id: str) -> None:
        """End a leg without calling it again; no effect if it has ended."""
        if request_id in self._legs:
            self._interrupt()
            self._end_sharing(request_id)
            del self._legs[request_id]
            self.engine.abort(request_id, self._events.now_s)
            self._start_if_idle()

    def connect(self, source: "SimulatedInstance") -> None:
        """Have the handshake with this prefill instance done, as by a canary."""
        self._handshakes.assume_known(source.engine.engine_id)

    def advance(self) -> None:
        """Pass on the tokens of all steps that have ended by now."""
        ids, count = self.steps.advance(self._events.now_s)
        if count:
            self._count_tokens(ids, count)

    def _count_tokens(self, ids: list[str], count: int) -> None:
        """Add so many tokens to each of these requests.

        They are the same ones from step to step, until one of them ends, is aborted or is preempted. Those
        that have joined are among the last.
        """
        sharing = self._sharing
        if len(ids) != len(sharing):
            for request_id in reversed(ids):
                if request_id in sharing:
                    continue
                entry = sharing[request_id] = self._legs[request_id].entry
                if entry is not None:
                    entry.share_count()
                if len(ids) == len(sharing):
                    break
            assert len(ids) == len(sharing)
        self.on_tokens(count)

    def _end_sharing(self, request_id: str) -> None:
        entry = self._sharing.pop(request_id, None)
        if entry is not None:
            entry.end_sharing()

    def take_samples(self) -> Samples:
        """Return the engine's latency samples since the last call."""
        self._catch_up()
        return self.engine.stats.take_samples()

    def read_gauges(self) -> EngineGauges:
        """Return the engine's queue lengths and KV cache usage of now."""
        self._catch_up()
        return self.engine.gauges

    def _catch_up(self) -> None:
        """Bring the engine's state to the present."""
        self.advance()
        self.steps.apply()

    # Failure

    def fail(self, restart_after_s: float) -> None:
        """End the engine's process: all legs end; a new engine starts after a time."""
        if not self.alive:
            return
        self.advance()
        self._busy_s, self._preemptions, self._failed_at_s = self.busy_s, self.preemptions, self._events.now_s
        self.alive = False
        self.steps.truncate()
        del self._peers[self.engine.engine_id]
        for timer in (self._step_end, self._lease_timer):
            if timer is not None:
                timer.cancel()
        legs, self._legs = list(self._legs.values()), {}
        for leg in legs:
            leg.on_engine_death()
        self._events.schedule(self._events.now_s + restart_after_s, self._restart)

    def _restart(self) -> None:
        self._down_s = self.down_s
        self.restarts += 1
        self._start_engine()
        self.on_restart()

    # Steps

    def _interrupt(self) -> None:
        """Let the step under way be the last one planned; called before a change of the engine's work."""
        if self.engine.busy:
            self.advance()
            if self.steps.truncate():
                self._await_step_end()

    def _await_step_end(self) -> None:
        if self._step_end is not None:
            self._step_end.cancel()
        self._step_end = self._events.schedule(self.steps.due_s, self._end_step, rank=STEP_END)

    def _start_if_idle(self) -> None:
        if not self.engine.busy and self.alive:
            self._start_step()

    def _start_step(self) -> None:
        started = self.steps.start(self._events.now_s)
        for fetch in self.engine.take_kv_fetches():
            self._start_fetch(fetch)
        if started:
            self._step_end = self._events.schedule(self.steps.due_s, self._end_step, rank=STEP_END)
        elif self._legs:
            self._await_lease_expiry()

    def _await_lease_expiry(self) -> None:
        """Requests wait for KV blocks: try again when the next lease expires."""
        expiry_s = self.engine.next_lease_expiry_s()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        if expiry_s is not None:
            self._lease_timer = self._events.schedule(expiry_s, self._start_if_idle)

    def _end_step(self) -> None:
        self.advance()
        legs = self._legs
        events, continued = self.steps.finish()
        for event in events:
            self._end_sharing(event.request_id)
        if continued:
            self._count_tokens(continued, 1)
        for event in events:
            if isinstance(event, OutputToken):
                leg = legs.get(event.request_id)
                if leg is not None:
                    leg.on_token(event)
            elif isinstance(event, Finished):
                leg = legs.pop(event.request_id, None)
                if leg is not None:
                    leg.on_end(event)
        self._start_if_idle()

    # KV transfers

    def _start_fetch(self, fetch: KvFetch) -> None:
        source, now_s = self._peers.get(fetch.source.engine_id), self._events.now_s
        if source is self:  # the prompt's KV is here already: the real engine finds it in its prefix cache
            self._events.schedule(now_s, partial(self._end_fetch, fetch, self.engine, source.engine))
            return
        handshake = self._handshakes.reserve_handshake(
            fetch.source.engine_id, reachable=source is not None, now_s=now_s
        )
        if source is None or not handshake.ok:
            self._events.schedule(handshake.end_s, partial(self._end_fetch, fetch, self.engine, None))
            return
        self._renew_lease(fetch, self.engine, source.engine)
        self._events.schedule(handshake.end_s, partial(self._start_transfer, fetch, self.engine, source))

    def _start_transfer(self, fetch: KvFetch, engine: Engine, source: "SimulatedInstance") -> None:
        if engine is not self.engine or not self.alive:
            return
        profile = self._options.profile
        duration_s = estimate_transfer_s(
            fetch.kv_bytes, link_bytes_per_s=profile.link_bytes_per_s, link_setup_s=profile.link_setup_s
        )
        slot = reserve_transfer(source.egress, self.ingress, duration_s, now_s=self._events.now_s)
        self._events.schedule(slot.end_s, partial(self._end_fetch, fetch, engine, source.engine))

    def _renew_lease(self, fetch: KvFetch, engine: Engine, source: Engine) -> None:
        """Send a heartbeat, and the next one after a while if the blocks have not arrived by then."""
        if engine is not self.engine or fetch.request_id not in self._legs:
            return
        source_instance = self._peers.get(source.engine_id)
        if source_instance is not None:
            source_instance._catch_up()
        if fetch.source.request_id is not None and source.extend_lease(
            fetch.source.request_id, self._events.now_s
        ):
            self._events.schedule(
                self._events.now_s + engine.heartbeat_interval_s,
                partial(self._renew_lease, fetch, engine, source),
            )

    def _end_fetch(self, fetch: KvFetch, engine: Engine, source: Engine | None) -> None:
        """Take the blocks from the source's engine, which frees its own; None: they cannot be had."""
        reachable = source is not None and source.engine_id in self._peers
        in_time = source is not None and reachable and self._release_lease(fetch, source)
        leg = self._legs.get(fetch.request_id)
        if engine is not self.engine or not self.alive or leg is None:
            return
        self._interrupt()
        if reachable:
            if not in_time:
                leg.on_late_kv()
            engine.complete_kv_fetch(fetch.request_id, leg.request.digest, self._events.now_s)
        else:
            self.failed_transfers += 1
            engine.fail_kv_fetch(fetch.request_id, self._events.now_s)
        self._start_if_idle()

    def _release_lease(self, fetch: KvFetch, source: Engine) -> bool:
        instance = self._peers.get(source.engine_id)
        if instance is None or fetch.source.request_id is None:
            return False
        instance._interrupt()
        released = source.release_lease(fetch.source.request_id, self._events.now_s)
        instance._start_if_idle()
        return released
