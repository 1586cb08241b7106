"""Carry out the journeys of simulated requests: the second interpreter of `router.policy.journey`.

Which leg goes where, what is retried and when a request fails is the journey's; sending legs, timers and
probes are the caller's, behind `RoutingPort`. A lease that expired is detected by the caller directly
(`SimulatedLeg.lease_expired`), in place of the engine's counter of expired transfers. The simulated fleet and
the simulated control loop of the tests are such callers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from fulcrum_core.values import Slo
from fulcrum_router.policy.candidates import V
from fulcrum_router.policy.dispatch import FlipProposal
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.intervals import SWEEP_INTERVAL_S
from fulcrum_router.policy.journey import Action, Journey, JourneyContext
from fulcrum_router.policy.ledger import DecodeEntry
from fulcrum_router.policy.prefix_index import NO_PREFIX, PromptPrefix
from fulcrum_router.policy.work import Work
from fulcrum_simulator.engine import (
    EngineRequest,
    ExportedKv,
    Finished,
    FinishReason,
    KvExportRequest,
    KvImportRequest,
    KvTransfer,
    NoKvTransfer,
    OutputToken,
)


class Outcome(Enum):
    """How a request ended for its client."""

    OK = "ok"
    FAILED = "failed"
    """The request failed before its first token."""
    BROKEN = "broken"
    """The request failed after its first token."""
    REFUSED = "refused"
    """Admission refused the request, because it would have missed its objectives."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A client request; `digest` identifies its prompt."""

    id: str
    prompt_tokens: int
    output_tokens: int
    digest: bytes
    block_hashes: tuple[bytes, ...] = ()
    tier: str = ""
    priority: int = 0
    tenant: str = ""
    prefix: PromptPrefix = NO_PREFIX
    skips_admission: bool = False


V_contra = TypeVar("V_contra", bound=InstanceRecord, contravariant=True)


class RoutingPort(Protocol[V_contra]):
    """What the caller does for its journeys."""

    def now_s(self) -> float:
        """The time, in seconds of the simulation's clock."""

    def call_at(self, at_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` at `at_s`."""

    def open(self, leg: "SimulatedLeg", instance: V_contra) -> bool:
        """Send a leg; False: no engine listens. The leg's events are its methods, never within this call."""

    def abort(self, leg: "SimulatedLeg", instance: V_contra) -> None:
        """End a leg whose result is not wanted any more."""

    def build_import(self, instance: V_contra, export: ExportedKv) -> KvImportRequest:
        """The KV transfer parameters that this prefill instance answers with."""

    def ask_for_flip(self, proposal: FlipProposal) -> None:
        """Publish a flip request."""

    def record_leg(self, leg: "SimulatedLeg", instance: V_contra, failure: Failure | None) -> None:
        """A leg ended with a response (None) or a failure: health and transfer pairs learn from it."""

    def learn_prefill(
        self, leg: "SimulatedLeg", instance: V_contra, *, cached_tokens: int, computed_for_s: float | None
    ) -> None:
        """A prefill leg was answered: predictors learn from it as from `LearningInstance.record_prefill`."""


class LegOwner:
    """A request in progress, which gets the events of its legs. Base class of the two kinds of requests."""

    __slots__ = ()

    def on_token(self, leg: "SimulatedLeg", token: OutputToken) -> None:
        """The engine of a leg produced a token."""
        raise NotImplementedError

    def on_end(self, leg: "SimulatedLeg", end: Finished) -> None:
        """The engine finished a leg."""
        raise NotImplementedError

    def on_failure(self, leg: "SimulatedLeg", failure: Failure) -> None:
        """A leg broke, was never accepted or took too long."""
        raise NotImplementedError

    def find_decode_entry(self) -> DecodeEntry | None:
        """Return the ledger's entry of the decode leg, which counts all of its tokens."""
        raise NotImplementedError


class SimulatedLeg:
    """One request to one engine. The engine's side calls `on_token`, then `on_end` or `on_failure`, once."""

    __slots__ = ("_owner", "ended", "is_prefill", "last_token_s", "lease_expired", "request")

    def __init__(self, owner: LegOwner, request: EngineRequest, *, is_prefill: bool) -> None:
        self._owner, self.request, self.is_prefill = owner, request, is_prefill
        self.last_token_s = request.arrival_s
        """Time of the last token; before the first, when the leg was sent."""
        self.ended = False
        self.lease_expired = False
        """Whether the prefill engine freed the KV before it was read: no token may reach the client."""

    def on_token(self, token: OutputToken) -> None:
        """The engine produced a token."""
        if not self.ended:
            self._owner.on_token(self, token)

    def find_entry(self) -> DecodeEntry | None:
        """Return the ledger's entry of a decode leg, which counts all of its tokens."""
        return None if self.ended else self._owner.find_decode_entry()

    def on_end(self, end: Finished) -> None:
        """The engine finished the request."""
        if not self.ended:
            self.ended = True
            self._owner.on_end(self, end)

    def on_failure(self, failure: Failure) -> None:
        """The leg broke, was never accepted or took too long."""
        if not self.ended:
            self.ended = True
            self._owner.on_failure(self, failure)


class SimulatedJourneys(Generic[V]):
    """Starts requests and holds those that wait for a flip."""

    def __init__(self, context: JourneyContext[V], port: RoutingPort[V]) -> None:
        self.context, self.port = context, port
        self._waiting_for_flip: dict[_Run, None] = {}
        self._checks_waiting_room = False

    def start(
        self,
        request: SimulatedRequest,
        slo: Slo,
        *,
        on_token: Callable[[OutputToken], None],
        on_end: Callable[[Outcome], None],
        on_refused: Callable[[int], None] = lambda _retry_after_s: None,
    ) -> None:
        """Serve a request that arrives now.

        `on_end` is called once, at once or later; after it no further token comes. If the request is refused,
        `on_refused` is called before it with the seconds of `Retry-After`.
        """
        run = _Run(self, request, slo, on_token, on_end, on_refused)
        run.act(run.journey.begin(self.port.now_s()))

    def assignment_applied(self) -> None:
        """Have the requests that wait for a flip choose again."""
        waiting, self._waiting_for_flip = self._waiting_for_flip, {}
        for run in waiting:
            run.act(run.journey.flip_done(self.port.now_s()))
        self.fleet_changed()

    def fleet_changed(self) -> None:
        """Let requests leave the waiting room: an instance came or went, or time has passed."""
        self.context.waiting_room.tick(self.port.now_s())

    def check_waiting_room(self) -> None:
        """Check again after `SWEEP_INTERVAL_S`, as long as requests wait."""
        if not self._checks_waiting_room and self.context.waiting_room.members:
            self._checks_waiting_room = True
            self.port.call_at(self.port.now_s() + SWEEP_INTERVAL_S, self._end_waiting_room_check)

    def _end_waiting_room_check(self) -> None:
        self._checks_waiting_room = False
        self.fleet_changed()
        self.check_waiting_room()

    def wait_for_flip(self, run: "_Run") -> None:
        """Publish a run's flip request; the run goes on at the next assignment or at the end of its wait."""
        journey = run.journey
        if journey.proposal is not None:
            self.port.ask_for_flip(journey.proposal)
        if journey.wait_until_s > self.port.now_s():
            self._waiting_for_flip[run] = None
            self.port.call_at(journey.wait_until_s, lambda: self._end_flip_wait(run))
        else:
            run.act(journey.flip_wait_ended(self.port.now_s()))

    def _end_flip_wait(self, run: "_Run") -> None:
        if run in self._waiting_for_flip:
            del self._waiting_for_flip[run]
            run.act(run.journey.flip_wait_ended(self.port.now_s()))


class _Run(LegOwner):
    """One request in progress."""

    __slots__ = (
        "_decode_leg",
        "_legs_sent",
        "_on_end",
        "_on_refused",
        "_on_token",
        "_prefill_leg",
        "_request",
        "_routing",
        "_tokens_before",
        "_transfer",
        "journey",
    )

    def __init__(
        self,
        routing: SimulatedJourneys,  # type: ignore[type-arg]  # a generic run would only repeat V
        request: SimulatedRequest,
        slo: Slo,
        on_token: Callable[[OutputToken], None],
        on_end: Callable[[Outcome], None],
        on_refused: Callable[[int], None],
    ) -> None:
        self._routing, self._request = routing, request
        self._on_token, self._on_end, self._on_refused = on_token, on_end, on_refused
        deadline_s = routing.port.now_s() + slo.ttft_s
        work = Work(
            request.prompt_tokens,
            slo,
            deadline_s=deadline_s,
            tier=request.tier,
            priority=request.priority,
            tenant=request.tenant,
            prefix=request.prefix,
            is_streamed=True,
        )
        self.journey: Journey[InstanceRecord] = Journey(routing.context, work)
        if request.skips_admission:
            self.journey.skip_admission()
        self.journey.on_moved = self.act
        self._prefill_leg: SimulatedLeg | None = None
        self._decode_leg: SimulatedLeg | None = None
        self._transfer: KvTransfer = NoKvTransfer()
        self._legs_sent = 0
        self._tokens_before = 0
        """Tokens of the decode legs that broke."""

    def act(self, action: Action) -> None:
        """Carry out the next action, and those that follow from it at once."""
        while action is Action.ABORT_LEGS:
            self._abort_legs()
            action = self.journey.proceed(self._routing.port.now_s())
        if action is Action.SEND_PREFILL:
            self._send_prefill()
        elif action is Action.SEND_DECODE:
            self._send_decode()
        elif action is Action.ASK_FOR_FLIP:
            self._routing.wait_for_flip(self)
        elif action is Action.FAIL:
            refusal = self.journey.refusal
            if refusal is not None:
                self._on_refused(refusal.retry_after_s)
            self._end(Outcome.FAILED if refusal is None else Outcome.REFUSED)
        elif action is Action.BREAK:
            self._end(Outcome.BROKEN)
        elif action is Action.END:
            self._end(Outcome.OK)
        elif action is Action.WAIT:
            self._routing.check_waiting_room()
        else:
            raise NotImplementedError(f"the engine model has no protocol with {action}")

    def _end(self, outcome: Outcome) -> None:
        """Report the outcome, and break the reference cycle, which only the garbage collector would free."""
        self.journey.on_moved = self._prefill_leg = self._decode_leg = None
        self._on_end(outcome)

    # --- legs --------------------------------------------------------------------------------------

    def _send_prefill(self) -> None:
        self._prefill_leg = leg = self._build_leg(KvExportRequest(), max_tokens=1, is_prefill=True)
        self._open(leg, self.journey.prefill_instance)

    def _send_decode(self) -> None:
        transfer = self._transfer if self.journey.has_kv else NoKvTransfer()
        limit, output_tokens = self.journey.output_limit, self._request.output_tokens
        output_tokens = output_tokens if limit is None else min(output_tokens, limit)
        tokens = output_tokens - self._tokens_before
        self._decode_leg = leg = self._build_leg(transfer, max_tokens=tokens, is_prefill=False)
        self._open(leg, self.journey.decode_instance)

    def _build_leg(self, transfer: KvTransfer, *, max_tokens: int, is_prefill: bool) -> SimulatedLeg:
        request, self._legs_sent = self._request, self._legs_sent + 1
        sent = EngineRequest(
            id=f"{request.id}-{self._legs_sent}",
            arrival_s=self._routing.port.now_s(),
            prompt_tokens=request.prompt_tokens + self._tokens_before,
            max_tokens=max_tokens,
            digest=request.digest,
            block_hashes=() if self.journey.must_recompute else request.block_hashes,
            kv_transfer=transfer,
        )
        return SimulatedLeg(self, sent, is_prefill=is_prefill)

    def _open(self, leg: SimulatedLeg, instance: InstanceRecord | None) -> None:
        assert instance is not None
        if not self._routing.port.open(leg, instance):
            leg.on_failure(Failure.REFUSED)

    def _abort_legs(self) -> None:
        journey, port = self.journey, self._routing.port
        legs = (self._prefill_leg, journey.prefill_instance), (self._decode_leg, journey.decode_instance)
        for leg, instance in legs:
            if leg is not None and instance is not None and not leg.ended:
                leg.ended = True
                port.abort(leg, instance)
        self._prefill_leg = self._decode_leg = None

    # --- events of legs ------------------------------------------------------------------------------

    def on_token(self, leg: SimulatedLeg, token: OutputToken) -> None:
        """Forward a token of the decode leg to the client; fail the leg if its lease had expired."""
        leg.last_token_s = self._routing.port.now_s()
        if leg.is_prefill:
            return
        if leg.lease_expired:
            instance = self.journey.decode_instance
            assert instance is not None
            leg.ended = True
            self._routing.port.abort(leg, instance)
            self._fail_decode(Failure.LEASE_EXPIRED)
            return
        if not self._count_leg_tokens():
            self.journey.first_byte(leg.last_token_s)
        entry = self.journey.decode_entry
        if entry is not None:
            entry.add_tokens(1)
        self._on_token(token._replace(index=token.index + self._tokens_before))

    def _count_leg_tokens(self) -> int:
        """Return the tokens of the decode leg so far; the ledger's entry counts them."""
        entry = self.journey.decode_entry
        return 0 if entry is None else entry.output_tokens

    def find_decode_entry(self) -> DecodeEntry | None:
        """See `LegOwner`."""
        return self.journey.decode_entry

    def on_end(self, leg: SimulatedLeg, end: Finished) -> None:
        """Go on after a leg whose engine finished it."""
        if leg.is_prefill:
            self._take_prefill_response(leg, end)
        elif end.reason is FinishReason.LENGTH:
            self._record(leg, None)
            self.act(self.journey.decode_ended(leg.last_token_s))
        else:
            self.on_failure(leg, Failure.ABORTED)

    def _take_prefill_response(self, leg: SimulatedLeg, end: Finished) -> None:
        instance, port = self.journey.prefill_instance, self._routing.port
        assert instance is not None
        if end.export is None:
            self.on_failure(leg, Failure.NO_KV_TRANSFER_PARAMS)
            return
        self._record(leg, None)
        self._transfer = port.build_import(instance, end.export)
        now_s = port.now_s()
        action = self.journey.prefill_responded(
            now_s, lease_from_s=now_s, has_params=True, cached_tokens=end.cached_tokens
        )
        port.learn_prefill(
            leg,
            instance,
            cached_tokens=end.cached_tokens,
            computed_for_s=self.journey.prefill_computed_for_s,
        )
        self.act(action)

    def on_failure(self, leg: SimulatedLeg, failure: Failure) -> None:
        """Go on after a leg that failed."""
        self._record(leg, failure)
        if not leg.is_prefill:
            self._fail_decode(failure)
            return
        started = failure is not Failure.REFUSED
        self.act(self.journey.prefill_failed(self._routing.port.now_s(), failure, started=started))

    def _fail_decode(self, failure: Failure) -> None:
        """Go on after a decode leg that failed; what the client has becomes part of the prompt."""
        delivered = self._count_leg_tokens()
        self._tokens_before += delivered
        action = self.journey.decode_failed(
            self._routing.port.now_s(),
            failure,
            started=failure is not Failure.REFUSED,
            kv_late=failure is Failure.LEASE_EXPIRED,
            delivered_tokens=delivered,
        )
        self.act(action)

    def _record(self, leg: SimulatedLeg, failure: Failure | None) -> None:
        instance = self.journey.prefill_instance if leg.is_prefill else self.journey.decode_instance
        if instance is not None:
            self._routing.port.record_leg(leg, instance, failure)
