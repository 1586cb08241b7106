"""The router of the simulated control loop: watches, state port and probes around the shipped journeys.

Roles come from watches of the store and are accepted by `may_apply`. Requests are
`fulcrum_simulator.routing`'s; legs go to engine processes in memory. `control_loop` starts it.
"""

import asyncio
import math
from collections.abc import Callable

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
from fulcrum_core.values import AutoscalingMode, DispatchMode, Phase
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_router.fleet.health import Health
from fulcrum_router.policy import Candidates, FlipProposal, FlipProposalRules, TransferPairs
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.intervals import PROBE_INTERVAL_S
from fulcrum_router.policy.journey import JourneyContext
from fulcrum_router.policy.predictions.estimate import TYPICAL_REQUEST_TOKENS
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_simulator.engine import ExportedKv, KvImportRequest, OutputToken
from fulcrum_simulator.routing import Outcome, SimulatedJourneys, SimulatedLeg, SimulatedRequest
from tests.simulation.engines import LEASE_S, EngineProcess, Network
from tests.simulation.history import History
from tests.waiting import advance

LEG_TIMEOUT_S = 8.0
"""Time without a token after which a leg is given up, in seconds."""


class RoutedInstance(LearningInstance):
    """The router's record of one instance, with its engine process."""

    def __init__(self, name: str, prefill: PrefillModel, decode: DecodeModel) -> None:
        super().__init__(name, prefill, decode)
        self.assigned = False
        self.process: EngineProcess | None = None
        self.health = Health()
        self.batch_tokens = self.missed_probes = 0
        self.kv_lease_s = LEASE_S

    def update_serving(self) -> None:
        """Recompute `serving` after a change of assignment, process or health."""
        self.serving = self.assigned and self.process is not None and not self.health.ejected


class RoutedFleet:
    """The instances by name, as `policy.journey.FleetView`."""

    def __init__(self, by_name: dict[str, RoutedInstance]) -> None:
        self._by_name = by_name
        self._candidates = Candidates[RoutedInstance](())
        self._candidates_of: list[object] = []

    def __getitem__(self, name: str) -> RoutedInstance:
        return self._by_name[name]

    @property
    def candidates(self) -> Candidates[RoutedInstance]:
        instances = [self._by_name[name] for name in sorted(self._by_name)]
        of: list[object] = [(i.name, i.role, i.serving, id(i.identity)) for i in instances]
        if of != self._candidates_of:
            self._candidates, self._candidates_of = Candidates(instances), of
        return self._candidates


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
        self.most_waiting_requests = 0
        self._acknowledged_at_s = 0.0
        self._desired: PDAssignment | None = None
        self._service: PDService | None = None
        self._informers: tuple[Informer[PDAssignment], Informer[PDInstance], Informer[PDService]] | None = (
            None
        )
        self._flip_request: FlipRequest | None = None
        self._journeys = SimulatedJourneys(JourneyContext(RoutedFleet(self.instances), TransferPairs()), self)
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
        serving = {name for name, o in objects.items() if o.status.phase is Phase.SERVING}
        self._accept_assignment(serving)
        if self.accepted is None:
            return
        roles = resolve_effective_roles(self.accepted.roles, serving)
        for name, obj in objects.items():
            known = self.instances.get(name) or RoutedInstance(name, self._prefill_model, self._decode_model)
            self.instances[name] = known
            entry = self.accepted.roles.get(name)
            known.assigned = name in serving and entry is not None and not entry.cordoned
            known.role = roles.get(name, known.role)
            self._update_process(known, obj)

    def _accept_assignment(self, serving: set[str]) -> None:
        desired = self._desired
        if desired is None or desired.metadata.generation <= self.generation:
            return
        if self.accepted is not None:
            verdict = may_apply(
                self.accepted, desired.spec, serving, self._rules(), now_s=self._clock.now_s()
            )
            if not verdict.allowed:
                self.refused_assignments += 1
                return
        self.accepted, self.generation = desired.spec, desired.metadata.generation
        self._acknowledged_at_s = self._clock.now_s()
        roles = {name: (str(entry.role), entry.cordoned) for name, entry in desired.spec.roles.items()}
        self._history.record(
            "acknowledged", generation=self.generation, roles=roles, serving=tuple(sorted(serving))
        )
        self._notify_change()
        asyncio.get_running_loop().call_soon(self._journeys.assignment_applied)  # roles change meanwhile

    def _update_process(self, known: RoutedInstance, obj: PDInstance) -> None:
        endpoint = obj.status.endpoint
        process = self._network.find(int(endpoint.partition(":")[2])) if endpoint else None
        if process is not known.process:
            known.process, known.health, known.missed_probes, known.itl_s = process, Health(), 0, None
        known.update_serving()
        identity = obj.status.identity.to_identity() if obj.status.identity else None
        if identity != known.identity:  # an equal one stays the same object, as candidates compare it
            known.identity = identity

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
            demand=self._journeys.context.demand.snapshot(),
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
            prefill_queued_s=ledger.remaining_s(self.now_s())
            + self._journeys.context.waiting_share_s(instance),
            prefill_tokens=ledger.prefill_tokens,
            decode_tokens=ledger.decode_tokens,
            decode_legs=ledger.decode_legs,
            legs=ledger.legs,
            pending_transfers=ledger.pending_transfers,
            itl_s=instance.itl_s,
            reserved_tokens=ledger.reserved_tokens,
            kv_capacity_tokens=instance.kv_capacity_tokens,
            itl_intercept_s=instance.decode_model.intercept,
            itl_slope_s=instance.decode_model.slope,
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
            self._record_failure(instance, is_gone=False)
            instance.itl_s = None
            return
        instance.missed_probes = 0
        instance.health.record_success()
        instance.update_serving()
        samples = process.engine.stats.take_samples().itl_s
        instance.itl_s = sum(samples) / len(samples) if samples else None
        ledger = instance.ledger
        before, now = instance.batch_tokens, 0 if ledger.prefill_tokens else ledger.decode_tokens
        instance.batch_tokens = now
        if instance.itl_s and before and now:
            instance.learn_decode(tokens=(before + now) // 2, itl_s=instance.itl_s)

    def _record_failure(self, instance: RoutedInstance, *, is_gone: bool) -> None:
        now_s = self._clock.monotonic_s()
        if instance.health.record_failure(now_s=now_s) or is_gone:
            instance.health.eject(now_s=now_s, judged=False)
        instance.update_serving()

    # Requests

    def serve(
        self,
        request: SimulatedRequest,
        on_token: Callable[[OutputToken], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        """Serve one request; `on_end` is called once."""
        assert self._service is not None
        scaling, context = self._service.spec.autoscaling, self._journeys.context
        context.flip_rules = self._flip_rules()
        context.flip_waits.enabled = scaling.mode is AutoscalingMode.AUTO
        dispatch = self._service.spec.router.dispatch
        ahead_s = dispatch.prefill_ahead if dispatch.mode is DispatchMode.QUEUE else math.inf
        context.waiting_room.prefill_ahead_s, context.deflects = ahead_s, dispatch.deflect
        self._journeys.start(request, self._service.spec.slo.to_slo(), on_token=on_token, on_end=on_end)
        self.most_waiting_requests = max(self.most_waiting_requests, self.waiting_requests)

    @property
    def waiting_requests(self) -> int:
        """Requests in the waiting room."""
        return len(self._journeys.context.waiting_room)

    # RoutingPort

    def now_s(self) -> float:
        """See `RoutingPort`."""
        return self._clock.monotonic_s()

    def call_at(self, at_s: float, callback: Callable[[], None]) -> None:
        """See `RoutingPort`."""
        loop = asyncio.get_running_loop()
        loop.call_later(at_s - self.now_s(), callback)

    def open(self, leg: SimulatedLeg, instance: RoutedInstance) -> bool:
        """See `RoutingPort`."""
        process = instance.process
        if process is None or not process.open(leg):
            return False
        self._check_silence(leg, process)
        return True

    def abort(self, leg: SimulatedLeg, instance: RoutedInstance) -> None:
        """See `RoutingPort`."""
        if instance.process is not None:
            instance.process.close(leg)

    def build_import(self, instance: RoutedInstance, export: ExportedKv) -> KvImportRequest:
        """See `RoutingPort`."""
        process = instance.process
        return KvImportRequest(
            engine_id=process.engine.engine_id if process else "",
            request_id=export.request_id,
            block_ids=export.block_ids,
            host="sim",
            port=process.port if process else 0,
        )

    def ask_for_flip(self, proposal: FlipProposal) -> None:
        """See `RoutingPort`."""
        seq = self._flip_request.seq if self._flip_request else 0
        self._flip_request = FlipRequest(seq=seq + 1, role=proposal.role, reason=proposal.reason)
        self._notify_change()

    def record_leg(self, leg: SimulatedLeg, instance: RoutedInstance, failure: Failure | None) -> None:
        """See `RoutingPort`."""
        if failure is None:
            instance.health.record_success()
            instance.update_serving()
            return
        self._record_failure(instance, is_gone=failure is Failure.REFUSED)
        if leg.is_prefill:
            instance.discard_prefill_samples()

    def learn_prefill(
        self, leg: SimulatedLeg, instance: RoutedInstance, *, cached_tokens: int, computed_for_s: float | None
    ) -> None:
        """See `RoutingPort`."""
        instance.record_prefill(
            tokens=leg.request.prompt_tokens, cached_tokens=cached_tokens, computed_for_s=computed_for_s
        )

    def _check_silence(self, leg: SimulatedLeg, process: EngineProcess) -> None:
        """Give the leg up if no token came for `LEG_TIMEOUT_S`, now or later."""
        if leg.ended:
            return
        due_s = leg.last_token_s + LEG_TIMEOUT_S
        if due_s > self.now_s():
            self.call_at(due_s, lambda: self._check_silence(leg, process))
            return
        process.close(leg)
        leg.on_failure(Failure.TIMEOUT)

    def _flip_rules(self) -> FlipProposalRules:
        assert self._service is not None
        scaling = self._service.spec.autoscaling
        last_s = self.accepted.last_prefill_to_decode if self.accepted else None
        return FlipProposalRules(
            enabled=scaling.mode is not AutoscalingMode.OFF,
            max_decode_load=scaling.arrow.shrink,
            to_decode_cooldown_until_s=-math.inf
            if last_s is None
            else last_s + scaling.flip.prefill_to_decode_cooldown - self._clock.now_s() + self.now_s(),
        )
