"""The simulated router: the shipped journey of each request, over legs on the event queue.

`routing` carries out the journeys. This module sends their legs, gives up those that time out, reads the
engines' metrics and publishes flip requests.

Not simulated: the estimate of a prompt's tokens (the number is known), the load and the time of canaries, the
measurement of slow pairs, ejection by judgement, rate limits and several choices. `run` makes it and serves
the workload with it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.api.router import TimeoutsSpec
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import AdmissionMode, Slo
from fulcrum_router.policy import FlipProposal, FlipProposalRules, PairKey, TransferOutcome, TransferPairs
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.intervals import CANARY_IDLE_S, PROBE_INTERVAL_S
from fulcrum_router.policy.journey import JourneyContext
from fulcrum_router.policy.ledger import DecodeEntry
from fulcrum_router.policy.newest_flip_requests import NewestFlipRequests
from fulcrum_router.policy.predictions.batch_limit import BatchLimits
from fulcrum_router.policy.predictions.learned_models import collect_models, compute_suitability
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_router.policy.prefix_index import NO_PREFIX
from fulcrum_router.policy.tiers.admission import TierAdmission
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_simulator.engine import (
    EngineRequest,
    ExportedKv,
    Finished,
    KvImportRequest,
    NoKvTransfer,
    OutputToken,
)
from fulcrum_simulator.fleet.event_queue import EventQueue
from fulcrum_simulator.fleet.instance import SimulatedInstance
from fulcrum_simulator.fleet.prompt_blocks import PromptBlocks
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.routed_instance import RoutedFleet, RoutedInstance
from fulcrum_simulator.fleet.timeline import Sample, take_sample
from fulcrum_simulator.routing import (
    Outcome,
    RouteDispatch,
    RoutedRequests,
    SimulatedJourneys,
    SimulatedLeg,
    SimulatedRequest,
)

CANARY_INTERVAL_S = 10.0
"""Between two looks for pairs that are due; the shipped router looks every second and sends two at a time."""
TIMEOUTS = TimeoutsSpec()
"""Time-outs of a PDService with default settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipSettings:
    """When dispatch proposes flips; `cooldown_s` counts from the last flip to decode.

    A flipped instance serves nothing for `downtime_s`.
    """

    max_decode_load: float
    cooldown_s: float
    downtime_s: float = 0.0


class SimulatedRouter:
    """The router of one service; implements `routing.RoutingPort`.

    `flips` is None if dispatch proposes none. Requests wait in the router while every prefill instance has
    work for `prefill_ahead_s`; infinite: they wait in the engines. `deflects`: see `policy.deflection`.
    `blocks`: those of the prompts, which engines then keep in their prefix caches; with `prefix_aware`,
    dispatch asks where they are.
    """

    def __init__(
        self,
        events: EventQueue,
        instances: Sequence[RoutedInstance],
        *,
        slo: Slo,
        hop_s: float,
        flips: FlipSettings | None,
        prefill_ahead_s: float = math.inf,
        deflects: bool = False,
        blocks: PromptBlocks | None = None,
        prefix_aware: bool = False,
        priorities: Collection[int] = (),
        reserved: Mapping[str, Reserve] = MappingProxyType({}),
        weights: Mapping[str, int] = MappingProxyType({}),
        admission: AdmissionMode = AdmissionMode.OFF,
        tiers: Mapping[str, TierAdmission] = MappingProxyType({}),
        unjudged: Collection[int] = (),
    ) -> None:
        self.events, self.slo, self.hop_s = events, slo, hop_s
        self.fleet = RoutedFleet(instances)
        self.generation = 1
        self.flip_requests = NewestFlipRequests()
        self._batch_limits = BatchLimits()
        self.samples: list[Sample] = []
        """The fleet once a second."""
        self.on_flip_request: Callable[[], None] = lambda: None
        self._flips = flips
        self._applied_at_s = 0.0
        self._records: dict[str, RequestResult] = {}
        self._computed: dict[str, KvImportRequest] = {}
        self._context = JourneyContext(self.fleet, TransferPairs())
        self._context.waiting_room.prefill_ahead_s, self._context.deflects = prefill_ahead_s, deflects
        self._blocks, self._unjudged = blocks, unjudged
        self._context.set_prefix_aware(prefix_aware)
        self._context.decode_share.set_tiers(priorities, tpot_s=slo.tpot_s)
        self._context.tier_reserve.set_reserves(reserved)
        self._context.waiting_room.set_weights(weights)
        if prefill_ahead_s == math.inf:
            self._context.admission.limit_waits(priorities, ttft_s=slo.ttft_s)
        self._context.admission.mode, self._context.admission.tiers = admission, tiers
        self._journeys = SimulatedJourneys(self._context, self)
        self._routed: RoutedRequests | None = None
        if flips is not None:
            self._context.flip_rules = FlipProposalRules(enabled=True, max_decode_load=flips.max_decode_load)
            self._context.flip_waits.enabled = True

    def choose_routes_by(self, dispatch: RouteDispatch) -> None:
        """Have `dispatch` choose both instances of each request, in place of the shipped journey."""
        self._routed = RoutedRequests(dispatch, self)

    def run_canaries(self) -> None:
        """Have the pairs that are due connected, now and every `CANARY_INTERVAL_S`; it takes no time."""
        now_s = self.events.now_s
        pairs = self._context.pairs
        for key in pairs.list_due(self.fleet.records, now_s=now_s, interval_s=CANARY_IDLE_S):
            source, reader = (
                self.fleet.routed_by_name[key.prefill].instance,
                self.fleet.routed_by_name[key.decode].instance,
            )
            if source.alive and reader.alive:
                reader.connect(source)
                self._record_transfer(key.prefill, key.decode)
        self.events.schedule(now_s + CANARY_INTERVAL_S, self.run_canaries)

    def advance(self) -> None:
        """Count the tokens that engines have produced by now, before a decision reads the ledgers."""
        now_s = self.events.now_s
        for routed in self.fleet.instances:
            if routed.instance.steps.next_end_s <= now_s:
                routed.instance.advance()

    def start_probes(self) -> None:
        """Read the engines' metrics once a second from now on."""
        self.events.schedule(self.events.now_s + PROBE_INTERVAL_S, self._probe)

    def _probe(self) -> None:
        for routed in self.fleet.instances:
            routed.probe(self.events.now_s)
        self._batch_limits.observe(self.fleet.records, now_s=self.events.now_s)
        self._context.pairs.refresh(self.fleet.records, now_s=self.events.now_s)
        waiting = len(self._context.waiting_room.members)
        self.samples.append(take_sample(self.fleet.instances, waiting, self.events.now_s))
        self.start_probes()

    def set_serving(self, routed: RoutedInstance, serving: bool) -> None:
        """Take an instance out of service, or back; its transfer pairs and prefixes are forgotten.

        Its requests in flight go on, unless its engine has failed.
        """
        routed.record.serving = serving
        self._context.pairs.invalidate(routed.record.name)
        self._context.forget_prefixes(routed.record.name)
        self.fleet.refresh()
        self.advance()
        self._journeys.fleet_changed()

    def begin_start(self, routed: RoutedInstance, serves_s: float) -> None:
        """An instance starts, and will serve then; an earlier start took as long."""
        starts, now_s = self._context.starts, self.events.now_s
        name, role = routed.record.name, routed.record.role
        starts.learn(name, serves_s - now_s)
        starts.begin(name, pool=name, role=role, since_s=now_s)

        def serve() -> None:
            starts.end(name, serves_s)
            self.set_serving(routed, routed.instance.alive)

        self.events.schedule(serves_s, serve)

    # Roles

    def apply(self, assignment: PDAssignmentSpec, generation: int) -> None:
        """Dispatch by this assignment and its cooldown from now on; requests that waited for it go on.

        A flipped instance is out of service for the downtime of a flip.
        """
        for name, entry in assignment.roles.items():
            routed = self.fleet.routed_by_name[name]
            if routed.record.role is not entry.role:
                routed.record.role = entry.role
                self._take_out_of_service(routed)
        self.fleet.refresh()
        self.generation, self._applied_at_s = generation, self.events.now_s
        last_s = assignment.last_prefill_to_decode
        if self._flips is not None and last_s is not None:
            self._context.flip_rules = FlipProposalRules(
                enabled=True,
                max_decode_load=self._flips.max_decode_load,
                to_decode_cooldown_until_s=last_s + self._flips.cooldown_s,
            )
        self.advance()
        self._journeys.assignment_applied()

    def _take_out_of_service(self, routed: RoutedInstance) -> None:
        """Let a flipped instance serve nothing for the downtime of a flip; its legs in flight go on."""
        if self._flips is not None and self._flips.downtime_s:
            routed.record.serving = False
            self.events.schedule(
                self.events.now_s + self._flips.downtime_s,
                lambda: self.set_serving(routed, routed.instance.alive),
            )

    def report(self) -> RouterState:
        """Return the state that the autoscaler reads."""
        self.advance()
        request, now_s = self.flip_requests.last, self.events.now_s
        models = collect_models(self.fleet.instances, {})
        suits_prefill = {pool: compute_suitability(found) for pool, found in models.items()}
        return RouterState(
            service="simulated",
            generation=self.generation,
            acknowledged_at_s=self._applied_at_s,
            at_s=now_s,
            instances=tuple(
                routed.report(
                    now_s,
                    waiting_s=self._context.waiting_share_s(routed.record),
                    decode_is_full=self._context.waiting_room.waits_for_decode,
                    suits_prefill=suits_prefill.get(routed.pool),
                )
                for routed in self.fleet.instances
            ),
            flip_request_role=request.role if request else None,
            flip_request_seq=self.flip_requests.seq,
            prediction_error=None,
            local_prefills=0,
            tiers=(),
            demand=self._context.demand.snapshot(),
        )

    # Requests

    def serve(self, record: RequestResult, number: int, on_end: Callable[[], None]) -> None:
        """Serve a request that arrives now; the result is in its record when `on_end` is called."""
        workload, blocks = record.request, self._blocks
        request = SimulatedRequest(
            str(number),
            workload.input_tokens,
            workload.output_tokens,
            b"%d" % number,
            block_hashes=() if blocks is None else blocks.build_hashes(workload),
            prefix=NO_PREFIX if blocks is None else blocks.build_prefix(workload),
            tier=workload.tier,
            priority=workload.priority,
            tenant=workload.tenant or "",
            skips_admission=number in self._unjudged,
        )
        self._records[request.id] = record

        def take_token(_token: OutputToken) -> None:
            if record.first_token_s is None:
                record.first_token_s = self.events.now_s + self.hop_s

        def end(outcome: Outcome) -> None:
            record.outcome = outcome
            if outcome is Outcome.OK:
                record.last_token_s = self.events.now_s + self.hop_s
            del self._records[request.id]
            self._computed.pop(request.id, None)
            on_end()

        def take_refusal(retry_after_s: int) -> None:
            record.retry_after_s = retry_after_s

        self.advance()
        if self._routed is not None:
            self._routed.start(request, self.slo, on_token=take_token, on_end=end)
        else:
            self._journeys.start(request, self.slo, on_token=take_token, on_end=end, on_refused=take_refusal)

    def find_record(self, leg: SimulatedLeg) -> RequestResult | None:
        """Return the record of a leg's request; None if the request has ended."""
        return self._records.get(_get_request_id(leg))

    # RoutingPort

    def now_s(self) -> float:
        """See `RoutingPort`."""
        return self.events.now_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> None:
        """See `RoutingPort`."""

        def call() -> None:
            self.advance()
            callback()

        self.events.schedule(at_s, call)

    def open(self, leg: SimulatedLeg, instance: LearningInstance) -> bool:
        """See `RoutingPort`."""
        routed = self.fleet.routed_by_name[instance.name]
        if not routed.instance.alive:
            return False
        record = self.find_record(leg)
        if record is not None:
            if leg.is_prefill:
                record.prefill = instance.name
                if record.first_token_s is None:  # else the leg continues an answer
                    record.prefill_sent_s = self.events.now_s
            else:
                if not record.decode:  # else the leg continues an answer
                    record.output_tokens = leg.request.max_tokens
                record.decode = instance.name
        leg.request = self._reuse_kv(leg.request, routed.instance)
        _SentLeg(self, leg, routed.instance)
        return True

    def _reuse_kv(self, request: EngineRequest, instance: SimulatedInstance) -> EngineRequest:
        """Have an instance that computed the prompt fetch the KV from itself.

        The real engine finds the KV in its prefix cache. Without prefix caches, simulated prompts have no
        hashes: they would take longer than the rest of the simulation.
        """
        computed = self._computed.pop(request.id.partition("-")[0], None)
        if not isinstance(request.kv_transfer, NoKvTransfer) or computed is None:
            return request
        if computed.engine_id != instance.engine.engine_id:
            return request
        return replace(request, kv_transfer=computed)

    def abort(self, leg: SimulatedLeg, instance: LearningInstance) -> None:
        """See `RoutingPort`."""
        self.fleet.routed_by_name[instance.name].instance.abort(leg.request.id)

    def build_import(self, instance: LearningInstance, export: ExportedKv) -> KvImportRequest:
        """See `RoutingPort`."""
        transfer = KvImportRequest(
            engine_id=self.fleet.routed_by_name[instance.name].instance.engine.engine_id,
            request_id=export.request_id,
            block_ids=export.block_ids,
        )
        self._computed[export.request_id.partition("-")[0]] = transfer
        return transfer

    def ask_for_flip(self, proposal: FlipProposal) -> None:
        """See `RoutingPort`."""
        self.flip_requests.submit(proposal.role, proposal.reason)
        self.on_flip_request()

    def record_leg(self, leg: SimulatedLeg, instance: LearningInstance, failure: Failure | None) -> None:
        """See `RoutingPort`."""
        if failure is not None:
            if leg.is_prefill:
                instance.discard_prefill_samples()
        elif isinstance(leg.request.kv_transfer, KvImportRequest):
            source = leg.request.kv_transfer.engine_id.partition("/")[0]
            self._record_transfer(source, instance.name)

    def learn_prefill(
        self,
        leg: SimulatedLeg,
        instance: LearningInstance,
        *,
        cached_tokens: int,
        computed_for_s: float | None,
    ) -> None:
        """See `RoutingPort`."""
        record = self.find_record(leg)
        if record is not None:
            record.cached_tokens = cached_tokens
        instance.record_prefill(
            tokens=leg.request.prompt_tokens, cached_tokens=cached_tokens, computed_for_s=computed_for_s
        )

    def _record_transfer(self, source: str, reader: str) -> None:
        if source != reader:
            pair = self._context.pairs[PairKey(source, reader)]
            pair.record(TransferOutcome.VERIFIED, now_s=self.events.now_s)


class _SentLeg:
    """A leg on its way: it reaches the engine after a hop, and the prefill response the router after another.

    Implements `instance.EngineLeg`. A decode response counts at the engine; the client gets it a hop later.
    When it begins or ends, requests that wait may go on: the tokens of all engines are counted before.
    """

    __slots__ = ("_instance", "_leg", "_router", "_timeout", "entry", "request")

    def __init__(self, router: SimulatedRouter, leg: SimulatedLeg, instance: SimulatedInstance) -> None:
        self._router, self._leg, self._instance, self.request = router, leg, instance, leg.request
        self.entry: DecodeEntry | None = None
        events = router.events
        timeout_s = TIMEOUTS.prefill if leg.is_prefill else TIMEOUTS.first_byte
        self._timeout = events.schedule_timeout(timeout_s, self._time_out)
        events.schedule(events.now_s + router.hop_s, self._submit)

    def _submit(self) -> None:
        if not self._leg.ended:
            self._instance.submit(self)

    def on_token(self, token: OutputToken) -> None:
        if not self._leg.is_prefill:
            self._timeout.cancel()
            self._router.advance()
            self._leg.on_token(token)
            self.entry = self._leg.find_entry()

    def on_end(self, end: Finished) -> None:
        self._timeout.cancel()
        router = self._router
        if not self._leg.is_prefill:
            router.advance()
            self._leg.on_end(end)
            return
        record = router.find_record(self._leg)
        if record is not None and record.first_token_s is None:
            record.prefill_queue_s = end.queue_s
            record.prefill_end_s = router.events.now_s + router.hop_s
        router.call_at(router.events.now_s + router.hop_s, lambda: self._leg.on_end(end))

    def on_late_kv(self) -> None:
        self._leg.lease_expired = True

    def on_engine_death(self) -> None:
        self._timeout.cancel()
        self._router.advance()
        self._leg.on_failure(Failure.CLOSED)

    def _time_out(self) -> None:
        if not self._leg.ended:
            self._instance.abort(self.request.id)
            self._router.advance()
            self._leg.on_failure(Failure.TIMEOUT)


def _get_request_id(leg: SimulatedLeg) -> str:
    """The id of a leg is that of its request and a number."""
    return leg.request.id.partition("-")[0]
