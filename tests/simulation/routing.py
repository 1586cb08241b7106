"""A router without sockets: the shipped dispatch policy, ledger and health, around in-memory legs.

Roles come from watches of the store and are accepted by `may_apply`. Both legs, retries, ejection, local
prefill and the wait for a requested flip follow the router's data path. An expired lease is detected
directly, in place of the engine's counter of expired requests.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fulcrum_cluster.informer import Informer
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import AssignmentRules, may_apply, resolve_effective_roles
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.ports import Clock
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.router_state import FlipRequest, InstanceState, RouterState
from fulcrum_core.values import AutoscalingMode, EngineIdentity, Phase, Role, Slo
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_router.fleet.health import Health
from fulcrum_router.flip_requests import FLIP_WAIT_BACKOFF_S, FLIP_WAIT_S
from fulcrum_router.observe.objects import TYPICAL_REQUEST_TOKENS
from fulcrum_router.policy import (
    Candidates,
    Dispatch,
    FlipProposal,
    FlipProposalRules,
    Ledger,
    NoInstance,
    Work,
    choose_decode,
    choose_prefill,
)
from fulcrum_router.policy.estimate import DecodePredictor, PrefillPredictor
from fulcrum_simulator.engine import (
    EngineRequest,
    Finished,
    FinishReason,
    KvExportRequest,
    KvImportRequest,
    KvTransfer,
    NoKvTransfer,
    OutputToken,
)
from tests.simulation.engines import ConnectionRefused, EngineProcess, Leg, LegBroken, Network
from tests.simulation.history import History
from tests.waiting import advance

LEG_TIMEOUT_S = 8.0
"""Time without a token after which a leg is given up, in seconds."""
PREFILL_ATTEMPTS_MAX = 2
DECODE_ATTEMPTS_MAX = 3
PROBE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A client request."""

    id: str
    prompt_tokens: int
    output_tokens: int
    digest: bytes


@dataclass(slots=True)
class RoutedInstance:
    """The router's view of one instance; implements `policy.InstanceView`."""

    name: str
    prefill: PrefillPredictor
    decode: DecodePredictor
    role: Role = Role.DECODE
    assigned: bool = False
    process: EngineProcess | None = None
    identity: EngineIdentity | None = None
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


class SimulatedRouter:
    """Serves requests; implements the autoscaler's `RouterClient` and the operator's `RouterView`."""

    def __init__(self, history: History, network: Network, profile: EngineProfile, clock: Clock) -> None:
        self._history, self._network, self._clock = history, network, clock
        self._prefill_model = profile.step_model.prefill_model(profile.token_budget)
        self._decode_model = profile.step_model.decode_model(TYPICAL_REQUEST_TOKENS)
        self.instances: dict[str, RoutedInstance] = {}
        self.generation = 0
        self.accepted: PDAssignmentSpec | None = None
        self.state_available = True
        self.clock_error_s = 0.0
        self.refused_assignments = 0
        self._acknowledged_at_s = 0.0
        self._desired: PDAssignment | None = None
        self._service: PDService | None = None
        self._informers: tuple[Informer[PDAssignment], Informer[PDInstance], Informer[PDService]] | None = (
            None
        )
        self._flip_request: FlipRequest | None = None
        self._no_wait_until_s: dict[Role, float] = {}
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # Watches

    def make_informers(self, make: Callable[..., Informer]) -> list[Informer]:  # type: ignore[type-arg]
        """Create the informers that the router needs with `make(kind, on_change)`. The caller runs them."""
        self._informers = (
            make(PDAssignment, lambda _old, new: self._on_assignment(new)),
            make(PDInstance, lambda _old, _new: self._apply()),
            make(PDService, lambda _old, new: self._on_service(new)),
        )
        return list(self._informers)

    def _on_service(self, service: PDService | None) -> None:
        self._service = service or self._service

    def _on_assignment(self, desired: PDAssignment | None) -> None:
        self._desired = desired or self._desired
        self._apply()

    def _apply(self) -> None:
        """Accept the desired assignment if `may_apply` allows it, and update every instance from it."""
        assert self._informers is not None
        objects = self._informers[1].objects
        ready = {name for name, o in objects.items() if o.status.phase is Phase.SERVING}
        self._accept_assignment(ready)
        if self.accepted is None:
            return
        roles = resolve_effective_roles(self.accepted.roles, ready)
        for name, obj in objects.items():
            known = self.instances.get(name) or RoutedInstance(
                name, PrefillPredictor(self._prefill_model), DecodePredictor(self._decode_model)
            )
            self.instances[name] = known
            entry = self.accepted.roles.get(name)
            known.assigned = name in ready and entry is not None and not entry.cordoned
            known.role = roles.get(name, known.role)
            self._update_process(known, obj)

    def _accept_assignment(self, ready: set[str]) -> None:
        desired = self._desired
        if desired is None or desired.metadata.generation <= self.generation:
            return
        if self.accepted is not None:
            verdict = may_apply(self.accepted, desired.spec, ready, self._rules(), now_s=self._clock.now_s())
            if not verdict.allowed:
                self.refused_assignments += 1
                return
        self.accepted, self.generation = desired.spec, desired.metadata.generation
        self._acknowledged_at_s = self._clock.now_s()
        roles = {name: (str(entry.role), entry.cordoned) for name, entry in desired.spec.roles.items()}
        self._history.record(
            "acknowledged", generation=self.generation, roles=roles, ready=tuple(sorted(ready))
        )
        self._notify_change()

    def _update_process(self, known: RoutedInstance, obj: PDInstance) -> None:
        endpoint = obj.status.endpoint
        process = self._network.find(int(endpoint.partition(":")[2])) if endpoint else None
        if process is not known.process:
            known.process, known.health, known.missed_probes, known.itl_s = process, Health(), 0, None
        known.identity = obj.status.identity.to_identity() if obj.status.identity else None

    def _rules(self) -> AssignmentRules:
        assert self._service is not None
        return AssignmentRules(self._service.spec.autoscaling.flip.prefill_to_decode_cooldown)

    # State port

    def endpoint(self, key: ServiceKey) -> str:
        """See `RouterView`."""
        del key
        return "sim:8000"

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """See `RouterView`."""
        del key
        return await self.get_state() if self.state_available else None

    async def get_state(self, *, min_generation: int = 0, timeout_s: float = 0.0) -> RouterState:
        """See `RouterClient`."""
        if not self.state_available:
            raise RouterUnavailable("injected fault")
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self.generation < min_generation and await self._wait_for_change(deadline_s):
            pass
        return RouterState(
            service="chat",
            generation=self.generation,
            acknowledged_at_s=self._acknowledged_at_s,
            at_s=self._clock.now_s() + self.clock_error_s,
            instances=tuple(self._state_of(self.instances[name]) for name in sorted(self.instances)),
            flip_request_role=self._flip_request.role if self._flip_request else None,
            flip_request_seq=self._flip_request.seq if self._flip_request else 0,
            prediction_error=None,
            local_prefills=0,
            tiers=(),
        )

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """See `RouterClient`."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while self._flip_request is None or self._flip_request.seq <= after:
            if not await self._wait_for_change(deadline_s):
                return None
        return self._flip_request

    def _state_of(self, instance: RoutedInstance) -> InstanceState:
        ledger = instance.ledger
        return InstanceState(
            name=instance.name,
            role=instance.role,
            serving=instance.serving,
            prefill_queued_s=ledger.remaining_s(self._clock.monotonic_s()),
            prefill_tokens=ledger.prefill_tokens,
            decode_tokens=ledger.decode_tokens,
            decode_legs=ledger.decode_legs,
            legs=ledger.legs,
            pending_transfers=ledger.pending_transfers,
            itl_s=instance.itl_s,
            missed_probes=instance.missed_probes,
        )

    async def _wait_for_change(self, deadline_s: float) -> bool:
        """Wait for a new generation or flip request; False at the deadline."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.monotonic_s())):
                await asyncio.shield(self._changed)
        except TimeoutError:
            return False
        return True

    def _notify_change(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    # Probes

    async def run_probes(self) -> None:
        """Check every engine's health and read its inter-token latency, once a second."""
        while True:
            await advance(PROBE_INTERVAL_S)
            for name in sorted(self.instances):
                self._probe(self.instances[name])

    def _probe(self, instance: RoutedInstance) -> None:
        process = instance.process
        if process is None:
            return
        if not process.alive or process.hung:
            instance.missed_probes += 1
            instance.health.record_failure(self._clock.monotonic_s())
            instance.itl_s = None
            return
        instance.missed_probes = 0
        instance.health.record_success()
        samples = process.engine.stats.take_samples().itl_s
        instance.itl_s = sum(samples) / len(samples) if samples else None
        ledger = instance.ledger
        before, now = instance.batch_tokens, 0 if ledger.prefill_tokens else ledger.decode_tokens
        instance.batch_tokens = now
        if instance.itl_s and before and now:
            instance.decode.learn(tokens=(before + now) // 2, itl_s=instance.itl_s)

    # Requests

    async def serve(self, request: SimulatedRequest, on_token: Callable[[OutputToken], None]) -> str:
        """Serve one request to its end; returns "ok", "failed" (before the first token) or "broken" (after
        it).
        """
        slo = self._slo()
        work = Work(request.prompt_tokens, slo, deadline_s=self._clock.monotonic_s() + slo.ttft_s)
        source, kv_transfer = await self._prefill(request, work)
        started = False

        def forward(token: OutputToken) -> None:
            nonlocal started
            started = True
            on_token(token)

        exclude: set[str] = set()
        for attempt in range(DECODE_ATTEMPTS_MAX):
            instance = await self._choose_decode(work, source, exclude)
            if instance is None:
                break
            if await self._decode(f"{request.id}-d{attempt}", request, instance, kv_transfer, forward):
                return "ok"
            if started:
                return "broken"
            exclude.add(instance.name)
            kv_transfer = NoKvTransfer()
        return "failed"

    async def _prefill(
        self, request: SimulatedRequest, work: Work
    ) -> tuple[RoutedInstance | None, KvTransfer]:
        exclude: set[str] = set()
        for attempt in range(PREFILL_ATTEMPTS_MAX):
            instance = await self._choose_prefill(work, exclude)
            if instance is None:
                break
            end = await self._prefill_leg(f"{request.id}-p{attempt}", request, instance)
            process = instance.process
            if end is not None and end.export is not None and process is not None:
                export = end.export
                return instance, KvImportRequest(
                    engine_id=process.engine.engine_id,
                    request_id=export.request_id,
                    block_ids=export.block_ids,
                    host="sim",
                    port=process.port,
                )
            exclude.add(instance.name)
        self._history.record("local prefill", request=request.id)
        return None, NoKvTransfer()

    async def _prefill_leg(
        self, leg_id: str, request: SimulatedRequest, instance: RoutedInstance
    ) -> Finished | None:
        seconds = instance.prefill_model.ttft_s(request.prompt_tokens)
        unloaded, sent_s = not instance.ledger.legs, self._clock.monotonic_s()
        entry = instance.ledger.add_prefill(tokens=request.prompt_tokens, predicted_s=seconds, now_s=sent_s)
        try:
            end = await self._run_leg(
                self._engine_request(leg_id, request, KvExportRequest(), max_tokens=1),
                instance,
                lambda _: None,
            )
        finally:
            entry.release(self._clock.monotonic_s())
        if unloaded and end is not None:
            took_s = self._clock.monotonic_s() - sent_s
            instance.prefill.learn(tokens=request.prompt_tokens, duration_s=took_s)
        return end

    async def _decode(
        self,
        leg_id: str,
        request: SimulatedRequest,
        instance: RoutedInstance,
        kv_transfer: KvTransfer,
        on_token: Callable[[OutputToken], None],
    ) -> bool:
        entry = instance.ledger.add_decode(tokens=request.prompt_tokens)
        local = None
        if isinstance(kv_transfer, NoKvTransfer):
            seconds = instance.prefill_model.ttft_s(request.prompt_tokens)
            local = instance.ledger.add_local_prefill(
                tokens=request.prompt_tokens, predicted_s=seconds, now_s=self._clock.monotonic_s()
            )

        def count(token: OutputToken) -> None:
            if local is not None:
                local.release(self._clock.monotonic_s())
            entry.add_tokens(1)
            on_token(token)

        try:
            end = await self._run_leg(
                self._engine_request(leg_id, request, kv_transfer, max_tokens=request.output_tokens),
                instance,
                count,
            )
        finally:
            entry.release()
            if local is not None:
                local.release(self._clock.monotonic_s())
        return end is not None and end.reason is FinishReason.LENGTH

    async def _run_leg(
        self, request: EngineRequest, instance: RoutedInstance, on_token: Callable[[OutputToken], None]
    ) -> Finished | None:
        """Run one leg; returns None if it broke, timed out, or read blocks whose lease had expired."""
        process = instance.process
        if process is None:
            return None
        leg = Leg(request, on_token=lambda token: self._forward_token(leg, token, on_token))
        try:
            process.open(leg)
            end = await self._wait_for_end(leg)
        except LegBroken as broken:
            self._record_failure(instance, eject_now=isinstance(broken, ConnectionRefused))
            return None
        except TimeoutError:
            self._record_failure(instance, eject_now=False)
            return None
        finally:
            process.close(leg)
        instance.health.record_success()
        return end

    async def _wait_for_end(self, leg: Leg) -> Finished:
        """Return the end of the leg.

        Raises:
            TimeoutError: if no token arrived for `LEG_TIMEOUT_S`.
        """
        last_token_s = self._clock.monotonic_s()
        while not leg.ended.done():
            last_token_s = max(last_token_s, leg.last_token_s)
            left_s = last_token_s + LEG_TIMEOUT_S - self._clock.monotonic_s()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait({leg.ended}, timeout=left_s)
        return leg.ended.result()

    @staticmethod
    def _forward_token(leg: Leg, token: OutputToken, on_token: Callable[[OutputToken], None]) -> None:
        if leg.lease_expired:  # wrong KV may have been read: no token of it may reach the client
            if not leg.ended.done():
                leg.ended.set_exception(LegBroken("the lease expired"))
            return
        on_token(token)

    def _record_failure(self, instance: RoutedInstance, *, eject_now: bool) -> None:
        instance.health.record_failure(self._clock.monotonic_s(), eject_now=eject_now)

    def _engine_request(
        self, leg_id: str, request: SimulatedRequest, kv_transfer: KvTransfer, *, max_tokens: int
    ) -> EngineRequest:
        return EngineRequest(
            id=leg_id,
            arrival_s=asyncio.get_running_loop().time(),
            prompt_tokens=request.prompt_tokens,
            max_tokens=max_tokens,
            digest=request.digest,
            kv_transfer=kv_transfer,
        )

    # Dispatch

    async def _choose_prefill(self, work: Work, exclude: set[str]) -> RoutedInstance | None:
        def choose(rules: FlipProposalRules) -> Dispatch | FlipProposal | NoInstance:
            return choose_prefill(
                Candidates(self._all_instances()),
                work,
                now_s=self._clock.monotonic_s(),
                rules=rules,
                exclude=exclude,
            )

        return await self._choose(choose)

    async def _choose_decode(
        self, work: Work, source: RoutedInstance | None, exclude: set[str]
    ) -> RoutedInstance | None:
        def choose(rules: FlipProposalRules) -> Dispatch | FlipProposal | NoInstance:
            return choose_decode(
                Candidates(self._all_instances()),
                work,
                now_s=self._clock.monotonic_s(),
                prefilled_on=source,
                rules=rules,
                exclude=exclude,
            )

        return await self._choose(choose)

    async def _choose(
        self, choose: Callable[[FlipProposalRules], Dispatch | FlipProposal | NoInstance]
    ) -> RoutedInstance | None:
        decision = choose(self._flip_rules())
        if isinstance(decision, FlipProposal):
            await self._request_flip(decision)
            decision = choose(FlipProposalRules())
        return self.instances[decision.instance] if isinstance(decision, Dispatch) else None

    async def _request_flip(self, proposal: FlipProposal) -> None:
        """Publish a flip request and wait for a new generation, as the shipped `FlipRequests` does."""
        seq = self._flip_request.seq if self._flip_request else 0
        self._flip_request = FlipRequest(seq=seq + 1, role=proposal.role, reason=proposal.reason)
        self._notify_change()
        generation, now_s = self.generation, self._clock.monotonic_s()
        if now_s < self._no_wait_until_s.get(proposal.role, 0.0):
            return
        while self.generation == generation:
            if not await self._wait_for_change(now_s + FLIP_WAIT_S):
                self._no_wait_until_s[proposal.role] = now_s + FLIP_WAIT_BACKOFF_S
                return

    def _flip_rules(self) -> FlipProposalRules:
        assert self._service is not None
        scaling = self._service.spec.autoscaling
        last_s = self.accepted.last_prefill_to_decode if self.accepted else None
        return FlipProposalRules(
            enabled=scaling.mode is not AutoscalingMode.OFF,
            max_decode_load=scaling.arrow.shrink,
            to_decode_cooldown_until_s=-math.inf
            if last_s is None
            else last_s
            + scaling.flip.prefill_to_decode_cooldown
            + (self._clock.monotonic_s() - self._clock.now_s()),
        )

    def _all_instances(self) -> tuple[RoutedInstance, ...]:
        return tuple(self.instances[name] for name in sorted(self.instances))

    def _slo(self) -> Slo:
        assert self._service is not None
        return self._service.spec.slo.to_slo()
