"""A router without sockets: the shipped dispatch policy and books, around in-memory legs.

Roles come from the store by watch and are judged by `may_apply`; the two legs, retries, ejection, local
prefill, and the wait for a wanted flip follow the shipped data path. The check of a hand-off's lease stands
in for the engine's own counter of expired blocks.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fulcrum_autoscaler.routers import RouterAway
from fulcrum_cluster.watching import Mirror
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import AssignmentRules, effective_roles, may_apply
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.ports import Clock
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.state import FlipWanted as WantedNotice
from fulcrum_core.state import InstanceState, RouterState
from fulcrum_core.values import AutoscalingMode, Identity, Phase, Role, Slo
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_router.fleet.health import Health
from fulcrum_router.flip_requests import FLIP_PATIENCE_S, FLIP_SILENCE_S
from fulcrum_router.observe.objects import TYPICAL_TOKENS
from fulcrum_router.policy import (
    Dispatch,
    FlipRules,
    FlipWanted,
    Ledger,
    NoInstance,
    choose_decode,
    choose_prefill,
)
from fulcrum_router.policy.estimate import DecodePredictor, PrefillPredictor
from fulcrum_simulator.engine import (
    EngineRequest,
    ExportKv,
    Finished,
    FinishReason,
    Handoff,
    ImportKv,
    NoHandoff,
    TokenOut,
)
from tests.simulation.engines import EngineProcess, Leg, LegBroken, Network
from tests.simulation.history import History

SILENCE_S = 8.0
"""A leg on which nothing comes for so long is given up."""
PREFILL_TRIES = 2
DECODE_TRIES = 3
PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client sends."""

    id: str
    prompt_tokens: int
    output_tokens: int
    digest: bytes


@dataclass(slots=True)
class Instance:
    """What the router knows of one instance: `policy.InstanceView`."""

    name: str
    prefill: PrefillPredictor
    decode: DecodePredictor
    role: Role = Role.DECODE
    assigned: bool = False
    process: EngineProcess | None = None
    identity: Identity | None = None
    ledger: Ledger = field(default_factory=Ledger)
    health: Health = field(default_factory=Health)
    itl_s: float | None = None
    batch_tokens: int = 0
    missed_probes: int = 0

    @property
    def prefill_model(self) -> PrefillModel:
        return self.prefill.model

    @property
    def decode_model(self) -> DecodeModel:
        return self.decode.model

    @property
    def serving(self) -> bool:
        return self.assigned and self.process is not None and not self.health.ejected


class Router:
    """Serves requests, and is the autoscaler's `RouterPort` and the operator's `RouterView`."""

    def __init__(
        self, world_history: History, network: Network, profile: EngineProfile, clock: Clock
    ) -> None:
        self._history, self._network, self._clock = world_history, network, clock
        self._prefill_model = profile.step_model.prefill_model(profile.token_budget)
        self._decode_model = profile.step_model.decode_model(TYPICAL_TOKENS)
        self.instances: dict[str, Instance] = {}
        self.generation = 0
        self.accepted: PDAssignmentSpec | None = None
        self.answers_state = True
        self.clock_error_s = 0.0
        self.refused_wishes = 0
        self._acknowledged_at_s = 0.0
        self._wish: PDAssignment | None = None
        self._service: PDService | None = None
        self._mirrors: tuple[Mirror[PDAssignment], Mirror[PDInstance], Mirror[PDService]] | None = None
        self._wanted: WantedNotice | None = None
        self._silent_until_s: dict[Role, float] = {}
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What it is told

    def follow(self, make: Callable[..., Mirror]) -> list[Mirror]:  # type: ignore[type-arg]
        """The watches it lives by; `make(kind, on_change)` gives a mirror, to be run by the caller."""
        self._mirrors = (
            make(PDAssignment, lambda _old, new: self._on_assignment(new)),
            make(PDInstance, lambda _old, _new: self._apply()),
            make(PDService, lambda _old, new: self._on_service(new)),
        )
        return list(self._mirrors)

    def _on_service(self, service: PDService | None) -> None:
        self._service = service or self._service

    def _on_assignment(self, wish: PDAssignment | None) -> None:
        self._wish = wish or self._wish
        self._apply()

    def _apply(self) -> None:
        """Take the wish over if it may be applied, and draw the conclusions from it and the instances."""
        assert self._mirrors is not None
        objects = self._mirrors[1].objects
        ready = {name for name, o in objects.items() if o.status.phase is Phase.SERVING}
        self._judge(ready)
        if self.accepted is None:
            return
        roles = effective_roles(self.accepted.roles, ready)
        for name, obj in objects.items():
            known = self.instances.get(name) or Instance(
                name, PrefillPredictor(self._prefill_model), DecodePredictor(self._decode_model)
            )
            self.instances[name] = known
            entry = self.accepted.roles.get(name)
            known.assigned = name in ready and entry is not None and not entry.cordoned
            known.role = roles.get(name, known.role)
            self._place(known, obj)

    def _judge(self, ready: set[str]) -> None:
        wish = self._wish
        if wish is None or wish.metadata.generation <= self.generation:
            return
        if self.accepted is not None:
            verdict = may_apply(self.accepted, wish.spec, ready, self._rules(), now_s=self._clock.now_s())
            if not verdict.allowed:
                self.refused_wishes += 1
                return
        self.accepted, self.generation = wish.spec, wish.metadata.generation
        self._acknowledged_at_s = self._clock.now_s()
        roles = {name: (str(entry.role), entry.cordoned) for name, entry in wish.spec.roles.items()}
        self._history.say("acknowledged", generation=self.generation, roles=roles, ready=tuple(sorted(ready)))
        self._tell_change()

    def _place(self, known: Instance, obj: PDInstance) -> None:
        endpoint = obj.status.endpoint
        process = self._network.at(int(endpoint.partition(":")[2])) if endpoint else None
        if process is not known.process:
            known.process, known.health, known.missed_probes, known.itl_s = process, Health(), 0, None
        known.identity = obj.status.identity.value() if obj.status.identity else None

    def _rules(self) -> AssignmentRules:
        assert self._service is not None
        return AssignmentRules(self._service.spec.autoscaling.flip.prefill_to_decode_cooldown)

    # What it tells

    def endpoint(self, key: ServiceKey) -> str:
        """See `RouterView`."""
        del key
        return "sim:8000"

    async def ledger(self, key: ServiceKey) -> RouterState | None:
        """See `RouterView`."""
        del key
        return await self.state() if self.answers_state else None

    async def state(self, *, min_generation: int = 0, timeout_s: float = 0.0) -> RouterState:
        """See `RouterPort`."""
        if not self.answers_state:
            raise RouterAway("told to be away")
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self.generation < min_generation and await self._change(deadline_s):
            pass
        return RouterState(
            service="chat",
            generation=self.generation,
            acknowledged_at_s=self._acknowledged_at_s,
            at_s=self._clock.now_s() + self.clock_error_s,
            instances=tuple(self._state_of(self.instances[name]) for name in sorted(self.instances)),
            flip_wanted=self._wanted.role if self._wanted else None,
            flip_wanted_seq=self._wanted.seq if self._wanted else 0,
            prediction_error=None,
            local_prefills=0,
            tiers=(),
        )

    async def flip_wanted(self, *, after: int, timeout_s: float) -> WantedNotice | None:
        """See `RouterPort`."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self._wanted is None or self._wanted.seq <= after:
            if not await self._change(deadline_s):
                return None
        return self._wanted

    def _state_of(self, instance: Instance) -> InstanceState:
        ledger = instance.ledger
        return InstanceState(
            name=instance.name,
            role=instance.role,
            serving=instance.serving,
            prefill_queued_s=ledger.prefill_s,
            prefill_tokens=ledger.prefill_tokens,
            decode_tokens=ledger.decode_tokens,
            decode_requests=ledger.decode_requests,
            legs=ledger.legs,
            open_handoffs=ledger.open_handoffs,
            itl_s=instance.itl_s,
            missed_probes=instance.missed_probes,
        )

    async def _change(self, deadline_s: float) -> bool:
        """Wait for a new generation or wish; False at the deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.monotonic_s())):
                await asyncio.shield(self._changed)
        except TimeoutError:
            return False
        return True

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    # Probes

    async def probe_for_ever(self) -> None:
        """Once a second: does each engine answer, and how long do its tokens take?"""
        while True:
            await asyncio.sleep(PROBE_S)
            for name in sorted(self.instances):
                self._probe(self.instances[name])

    def _probe(self, instance: Instance) -> None:
        process = instance.process
        if process is None:
            return
        if not process.alive or process.hung:
            instance.missed_probes += 1
            instance.health.failed(self._clock.monotonic_s())
            instance.itl_s = None
            return
        instance.missed_probes = 0
        instance.health.succeeded()
        samples = process.engine.stats.take_samples().itl_s
        instance.itl_s = sum(samples) / len(samples) if samples else None
        ledger = instance.ledger
        before, now = instance.batch_tokens, 0 if ledger.prefill_tokens else ledger.decode_tokens
        instance.batch_tokens = now
        if instance.itl_s and before and now:
            instance.decode.learn(tokens=(before + now) // 2, itl_s=instance.itl_s)

    # Requests

    async def serve(self, request: ClientRequest, on_token: Callable[[TokenOut], None]) -> str:
        """Serve one request to its end: ok, failed (before the first token) or broken (after it)."""
        source, handoff = await self._prefill(request)
        started = False

        def relay(token: TokenOut) -> None:
            nonlocal started
            started = True
            on_token(token)

        avoid: set[str] = set()
        for attempt in range(DECODE_TRIES):
            instance = await self._choose_decode(request, source, avoid)
            if instance is None:
                break
            if await self._decode(f"{request.id}-d{attempt}", request, instance, handoff, relay):
                return "ok"
            if started:
                return "broken"
            avoid.add(instance.name)
            handoff = NoHandoff()
        return "failed"

    async def _prefill(self, request: ClientRequest) -> tuple[Instance | None, Handoff]:
        avoid: set[str] = set()
        for attempt in range(PREFILL_TRIES):
            instance = await self._choose_prefill(request, avoid)
            if instance is None:
                break
            end = await self._prefill_leg(f"{request.id}-p{attempt}", request, instance)
            process = instance.process
            if end is not None and end.export is not None and process is not None:
                export = end.export
                return instance, ImportKv(
                    engine_id=process.engine.engine_id,
                    request_id=export.request_id,
                    block_ids=export.block_ids,
                    host="sim",
                    port=process.port,
                )
            avoid.add(instance.name)
        self._history.say("local prefill", request=request.id)
        return None, NoHandoff()

    async def _prefill_leg(self, leg_id: str, request: ClientRequest, instance: Instance) -> Finished | None:
        seconds = instance.prefill_model.ttft_s(request.prompt_tokens)
        alone, sent_s = not instance.ledger.legs, self._clock.monotonic_s()
        entry = instance.ledger.open_prefill(tokens=request.prompt_tokens, seconds=seconds)
        try:
            end = await self._leg(
                self._engine_request(leg_id, request, ExportKv(), max_tokens=1), instance, lambda _: None
            )
        finally:
            entry.release()
        if alone and end is not None:
            took_s = self._clock.monotonic_s() - sent_s
            instance.prefill.learn(tokens=request.prompt_tokens, seconds=took_s)
        return end

    async def _decode(
        self,
        leg_id: str,
        request: ClientRequest,
        instance: Instance,
        handoff: Handoff,
        on_token: Callable[[TokenOut], None],
    ) -> bool:
        entry = instance.ledger.open_decode(tokens=request.prompt_tokens)
        local = None
        if isinstance(handoff, NoHandoff):
            seconds = instance.prefill_model.ttft_s(request.prompt_tokens)
            local = instance.ledger.open_local_prefill(tokens=request.prompt_tokens, seconds=seconds)

        def count(token: TokenOut) -> None:
            if local is not None:
                local.release()
            entry.grow(1)
            on_token(token)

        try:
            end = await self._leg(
                self._engine_request(leg_id, request, handoff, max_tokens=request.output_tokens),
                instance,
                count,
            )
        finally:
            entry.release()
            if local is not None:
                local.release()
        return end is not None and end.reason is FinishReason.LENGTH

    async def _leg(
        self, request: EngineRequest, instance: Instance, on_token: Callable[[TokenOut], None]
    ) -> Finished | None:
        """One leg to its end; None if it broke, was too late, or read blocks that had been given up."""
        process = instance.process
        if process is None:
            return None
        leg = Leg(request, on_token=lambda token: self._pass_on(leg, token, on_token))
        try:
            process.open(leg)
            end = await self._while_it_speaks(leg)
        except LegBroken as broken:
            self._blame(instance, at_once=str(broken) == "refused")
            return None
        except TimeoutError:
            self._blame(instance, at_once=False)
            return None
        finally:
            process.close(leg)
        instance.health.succeeded()
        return end

    async def _while_it_speaks(self, leg: Leg) -> Finished:
        """Its end, or `TimeoutError` once nothing came for `SILENCE_S`."""
        heard_s = self._clock.monotonic_s()
        while not leg.ended.done():
            heard_s = max(heard_s, leg.heard_s)
            left_s = heard_s + SILENCE_S - self._clock.monotonic_s()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait({leg.ended}, timeout=left_s)
        return leg.ended.result()

    @staticmethod
    def _pass_on(leg: Leg, token: TokenOut, on_token: Callable[[TokenOut], None]) -> None:
        if leg.tainted:  # blocks that had been given up were read: nothing of it may reach the client
            if not leg.ended.done():
                leg.ended.set_exception(LegBroken("the lease ran out"))
            return
        on_token(token)

    def _blame(self, instance: Instance, *, at_once: bool) -> None:
        instance.health.failed(self._clock.monotonic_s(), at_once=at_once)

    def _engine_request(
        self, leg_id: str, request: ClientRequest, handoff: Handoff, *, max_tokens: int
    ) -> EngineRequest:
        return EngineRequest(
            id=leg_id,
            arrival_s=asyncio.get_running_loop().time(),
            prompt_tokens=request.prompt_tokens,
            max_tokens=max_tokens,
            digest=request.digest,
            handoff=handoff,
        )

    # Dispatch

    async def _choose_prefill(self, request: ClientRequest, avoid: set[str]) -> Instance | None:
        def choose(rules: FlipRules) -> Dispatch | FlipWanted | NoInstance:
            return choose_prefill(self._all(), request.prompt_tokens, self._slo(), rules=rules, avoid=avoid)

        return await self._chosen(choose)

    async def _choose_decode(
        self, request: ClientRequest, source: Instance | None, avoid: set[str]
    ) -> Instance | None:
        def choose(rules: FlipRules) -> Dispatch | FlipWanted | NoInstance:
            return choose_decode(
                self._all(),
                request.prompt_tokens,
                self._slo(),
                prefilled_on=source,
                rules=rules,
                now_s=self._clock.now_s(),
                avoid=avoid,
            )

        return await self._chosen(choose)

    async def _chosen(
        self, choose: Callable[[FlipRules], Dispatch | FlipWanted | NoInstance]
    ) -> Instance | None:
        decision = choose(self._flip_rules())
        if isinstance(decision, FlipWanted):
            await self._ask_for_flip(decision)
            decision = choose(FlipRules())
        return self.instances[decision.instance] if isinstance(decision, Dispatch) else None

    async def _ask_for_flip(self, wanted: FlipWanted) -> None:
        """Publish the wish and give it a moment, as the shipped `FlipBoard` does."""
        seq = self._wanted.seq if self._wanted else 0
        self._wanted = WantedNotice(seq=seq + 1, role=wanted.role, reason=wanted.reason)
        self._tell_change()
        generation, now_s = self.generation, self._clock.monotonic_s()
        if now_s < self._silent_until_s.get(wanted.role, 0.0):
            return
        while self.generation == generation:
            if not await self._change(now_s + FLIP_PATIENCE_S):
                self._silent_until_s[wanted.role] = now_s + FLIP_SILENCE_S
                return

    def _flip_rules(self) -> FlipRules:
        assert self._service is not None
        scaling = self._service.spec.autoscaling
        last_s = self.accepted.last_prefill_to_decode if self.accepted else None
        return FlipRules(
            enabled=scaling.mode is not AutoscalingMode.OFF,
            shrink=scaling.arrow.shrink,
            to_decode_after_s=0.0 if last_s is None else last_s + scaling.flip.prefill_to_decode_cooldown,
        )

    def _all(self) -> tuple[Instance, ...]:
        return tuple(self.instances[name] for name in sorted(self.instances))

    def _slo(self) -> Slo:
        assert self._service is not None
        return self._service.spec.slo.slo()
