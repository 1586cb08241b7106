"""The journey of one request, from its arrival to its end, as a state machine without I/O and clock.

    arrived ─► (waiting, flip requested) ─► prefill ─► transferring ─► decode ─► done
                        ▲                      │            │
                        └──────── retry ◄──────┴────────────┘   without KV transfer: arrived ─► transferring

Each method under *events* is one event; all but `first_byte` return the `Action` that the interpreter carries
out next. The details of the action are attributes. Reading, connecting, time-outs of legs and metrics are the
interpreter's: the data path is one, the simulation another. The journey writes the ledgers, and the waiting
room, retry budget, flip waits and pair records of its `JourneyContext`.

Retries. A leg that fails before the first byte is sent to another instance, at most `MAX_ATTEMPTS` in each
phase. After as many failed prefill legs, or without retry budget, the decode instance computes the prompt. A
request is a *query of death* if two engines closed the connection or died after they were sent it: it is not
tried again. A failure of an engine that is still alive is charged to the retry budget of all requests; a dead
engine costs no budget, because each of its legs fails only once. A re-run after an expired lease uses no KV,
so it happens once.
"""

import math

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.policy.dispatch import (
    NO_FLIP_PROPOSALS,
    Dispatch,
    DispatchDecision,
    DispatchReason,
    FlipProposal,
    FlipProposalRules,
    NoInstance,
    choose_decode,
    choose_prefill,
)
from fulcrum_router.policy.failures import Failure
from fulcrum_router.policy.journey.context import V
from fulcrum_router.policy.journey.protocols import NIXL_PULL, find_protocol
from fulcrum_router.policy.journey.record import RequestRecord
from fulcrum_router.policy.journey.states import Action, LocalPrefillReason, State, StopReason
from fulcrum_router.policy.prediction import predict_ttft

MAX_ATTEMPTS = 3
"""Instances tried for one phase of a request."""

_CHARGED = frozenset(
    {
        Failure.STATUS,
        Failure.TIMEOUT,
        Failure.ABORTED,
        Failure.MALFORMED,
        Failure.TOO_LARGE,
        Failure.NO_KV_TRANSFER_PARAMS,
    }
)
"""Failures after which the engine is still alive: their retries are charged to the retry budget."""

# An attribute of an enum is slow to read.
_WAITING, _FLIP_REQUESTED, _PREFILL, _TRANSFERRING, _DECODE, _ABORTING, _DONE = (
    State.WAITING,
    State.FLIP_REQUESTED,
    State.PREFILL,
    State.TRANSFERRING,
    State.DECODE,
    State.ABORTING,
    State.DONE,
)
_SEND_PREFILL, _SEND_DECODE, _WAIT, _END = Action.SEND_PREFILL, Action.SEND_DECODE, Action.WAIT, Action.END
_ROLE_BOTH, _CLOSED = Role.BOTH, Failure.CLOSED
_PREFILLED_HERE = DispatchReason.PREFILLED_HERE


class Journey(RequestRecord[V]):
    """One request, moved by its events. Times are seconds of one clock, the caller's."""

    __slots__ = ()

    # --- events ------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> Action:
        """The request was admitted at `now_s`."""
        context = self._context
        context.retry_budget.record_request(now_s)
        if context.waiting_room.members:
            context.waiting_room.reconsider(now_s)  # others have waited longer
        return self._seek_prefill(now_s, context.flip_rules)

    def prefill_answered(
        self,
        now_s: float,
        *,
        lease_from_s: float,
        has_params: bool,
        tokens: int | None = None,
        problem: LocalPrefillReason | None = None,
    ) -> Action:
        """The prefill leg was answered.

        Args:
            now_s: Time of the event.
            lease_from_s: Earliest time at which the lease on the KV may have begun.
            has_params: Whether the answer has usable KV transfer parameters.
            tokens: Length of the prompt as the engine counted it; None: not reported.
            problem: Why the KV of this answer cannot be used, if any prefill instance would answer so.
        """
        self._close_prefill(now_s)
        if self.state is _DONE or self.state is _ABORTING:
            return _END if self.state is _DONE else _WAIT
        instance, protocol = self.prefill_instance, self.protocol
        assert instance is not None
        if tokens is not None:
            self.work = self.work.with_prompt_tokens(tokens)
        self.source, self.local_prefill_reason = instance, problem
        if protocol.legs_at_once:
            return _WAIT
        if problem is None and (has_params or not protocol.params_in_response):
            self.has_kv, self._lease_from_s = True, lease_from_s
            self._transfer_entry = instance.ledger.add_pending_transfer()
        if protocol.decode_chosen_first and self.decode_instance is not None:
            if self.decode_instance.serving:
                return self._open_decode(now_s, self.decode_instance)
            self._drop_kv()
            return self._seek_prefill(now_s, NO_FLIP_PROPOSALS)
        return self._seek_decode(now_s, self._context.flip_rules)

    def prefill_rejected(self, now_s: float) -> Action:
        """An engine rejected the request (4xx): the interpreter forwards its answer."""
        self.prefill_open = False
        return self._end(now_s, _END)

    def prefill_failed(
        self, now_s: float, failure: Failure, *, status: int = 0, started: bool = True
    ) -> Action:
        """The prefill leg failed; `started`: the engine may have begun it."""
        instance = self.prefill_instance
        self._close_prefill(now_s)
        if self.state is _DECODE:
            return _WAIT  # legs at once: the client has the first byte, so the KV arrived
        if self.state is _DONE or self.state is _ABORTING or instance is None:
            return _END if self.state is _DONE else _WAIT
        self._failed_prefill += (instance.name,)
        stop = self._record_failure(now_s, failure, status, started=started)
        if stop is StopReason.RETRY_BUDGET:
            self._own_reason, stop = LocalPrefillReason.PREFILL_FAILED, None
        return self._retry_after_abort(now_s, stop)

    def first_byte(self, now_s: float) -> None:
        """The first byte was sent to the client: the KV was fetched, the prompt is computed."""
        if self.state is _TRANSFERRING or self.state is _PREFILL:
            self.state = _DECODE
            self._drop_kv()
            if self._local_entry is not None:
                self._release_local(now_s)

    def decode_ended(self, now_s: float) -> Action:
        """The response of the decode leg is complete."""
        self.decode_open = False
        return self._end(now_s, _END)

    def decode_failed(
        self,
        now_s: float,
        failure: Failure,
        *,
        status: int = 0,
        started: bool = True,
        kv_late: bool = False,
    ) -> Action:
        """The decode leg failed, or its response may not be used.

        Args:
            now_s: Time of the event.
            failure: The cause; `LEASE_EXPIRED` has the prompt computed again, on any instance.
            status: The engine's HTTP status; 0: none.
            started: Whether the engine may have begun the leg, and so may have fetched the KV.
            kv_late: Whether this leg's own KV may have been fetched too late.
        """
        instance, committed = self.decode_instance, self.state is _DECODE
        self.decode_open = False
        self._release_decode(now_s)
        if self.state is _DONE or self.state is _ABORTING or instance is None:
            return _END if self.state is _DONE else _WAIT
        if committed:
            self.failure, self.failed_status = failure, status
            return self._end(now_s, Action.BREAK)
        self._decode_attempts += 1
        if failure is Failure.LEASE_EXPIRED:
            self.failure, self.failed_status = failure, status
            if kv_late:
                self._record_miss(instance, now_s, conditions.LEASE_EXPIRED)
            self._discard_prefill(LocalPrefillReason.LEASE_EXPIRED)
            self.must_recompute = True
            stop = StopReason.ATTEMPTS if self._decode_attempts >= MAX_ATTEMPTS else None
            return self._retry_after_abort(now_s, stop)
        self._failed_decode += (instance.name,)
        if failure is Failure.STATUS and self.has_kv:  # an engine that cannot fetch the KV answers 5xx
            self._record_miss(instance, now_s, conditions.RECOMPUTED)
        if started:
            self._drop_kv()  # transfer parameters are used once
        stop = self._record_failure(now_s, failure, status, started=started)
        if stop is None and self._decode_attempts >= MAX_ATTEMPTS:
            stop = StopReason.ATTEMPTS
        return self._retry_after_abort(now_s, stop)

    def flip_done(self, now_s: float) -> Action:
        """A new assignment was applied while the request waited for its flip."""
        return self._leave_flip_wait(now_s) if self.state is _FLIP_REQUESTED else _WAIT

    def tick(self, now_s: float) -> Action:
        """The time `wait_until_s` has come."""
        proposal = self.proposal
        if self.state is not _FLIP_REQUESTED or proposal is None or now_s < self.wait_until_s:
            return _WAIT
        if self.wait_until_s > self._asked_at_s:
            self._context.flip_waits.record_timeout(proposal.role, now_s)
        return self._leave_flip_wait(now_s)

    def proceed(self, now_s: float) -> Action:
        """The legs in flight were aborted, as `ABORT_LEGS` asked."""
        if self.state is not _ABORTING:
            return _END if self.state is _DONE else _WAIT
        if self._last_action is None:
            return self._retry(now_s)
        self.state = _DONE
        return self._last_action

    def client_left(self, now_s: float) -> Action:
        """The client has disconnected: nothing is sent any more."""
        return self._end(now_s, _END)

    # --- choices -----------------------------------------------------------------------------------

    def _seek_prefill(self, now_s: float, rules: FlipProposalRules) -> Action:
        """Choose a prefill instance; without one, the decode instance computes the prompt."""
        context = self._context
        self.source = self.predicted_ttft = None
        self.local_prefill_reason = reason = self._own_reason
        if reason is None and len(self._failed_prefill) >= MAX_ATTEMPTS:
            reason = LocalPrefillReason.PREFILL_FAILED
        if reason is None:
            broken = context.pairs.broken_prefill_instances
            exclude = self._failed_prefill + broken
            if context.waiting_room.prefill_ahead_s < math.inf:
                able, full = self._list_able(now_s, exclude)
                if full and len(full) == len(able):
                    return self._wait_for_prefill(now_s, rules, exclude, able)
                exclude += full
            decision = choose_prefill(
                context.fleet.candidates,
                self.work,
                now_s=now_s,
                rules=rules,
                exclude=exclude,
                delays=context.pairs.prefill_delays,
            )
            if type(decision) is Dispatch:
                return self._take_prefill(now_s, decision)
            if type(decision) is FlipProposal:
                return self._ask_for_flip(now_s, decision)
            reason = self._explain_no_prefill(broken)
        self.local_prefill_reason = reason
        return self._seek_decode(now_s, context.flip_rules)

    def _explain_no_prefill(self, broken: tuple[str, ...]) -> LocalPrefillReason:
        if broken:
            return LocalPrefillReason.KV_TRANSFER_BROKEN
        failed = LocalPrefillReason.PREFILL_FAILED
        return failed if self._failed_prefill else LocalPrefillReason.NO_PREFILL_INSTANCE

    def _take_prefill(self, now_s: float, decision: Dispatch) -> Action:
        context = self._context
        instance = context.fleet[decision.instance]
        if instance.role is _ROLE_BOTH:  # it prefills within its decode leg
            return self._seek_decode(now_s, context.flip_rules)
        protocol = find_protocol(context.protocols, instance.identity) if context.protocols else NIXL_PULL
        self.protocol = protocol
        decode = self._reserve_decode(now_s, instance)
        if decode is None and protocol.decode_chosen_first:
            self.local_prefill_reason = LocalPrefillReason.UNREADABLE_KV
            return self._seek_decode(now_s, context.flip_rules)
        if protocol.fetches_cached:
            self.cached_on = self._find_cached(instance)
        self.dispatch_reason = decision.reason
        ledger, tokens = instance.ledger, self.work.prompt_tokens
        compute_s = instance.prefill_model.ttft_s(tokens)
        self._prefill_entry = ledger.add_prefill(tokens=tokens, predicted_s=compute_s, now_s=now_s)
        self.prefill_instance, self.prefill_open, self.state = instance, True, _PREFILL
        if not protocol.legs_at_once or decode is None:
            return _SEND_PREFILL
        self._release_reservation()
        self._open_decode(now_s, decode)
        return Action.SEND_BOTH

    def _find_cached(self, prefill: V) -> V | None:
        """Find the serving instance that holds most of the prompt, if it holds more than `prefill` does."""
        cached, candidates = self.work.cached_tokens, self._context.fleet.candidates
        able = [i for i in (*candidates.decode, *candidates.other_role) if cached.get(i.name)]
        best = max(able, key=lambda i: (cached[i.name], i.name), default=None)
        if best is None or cached[best.name] <= cached.get(prefill.name, 0):
            return None
        return best

    def _reserve_decode(self, now_s: float, source: V) -> V | None:
        """Reserve room for the decode leg before `source` computes the prompt, and predict the TTFT.

        None: no other instance can decode. Unless the protocol needs the choice now, it is made again when
        the prompt is computed: by then another instance may be better.
        """
        context, pairs = self._context, self._context.pairs.list_from(source.name)
        decision = choose_decode(
            context.fleet.candidates,
            self.work,
            now_s=now_s,
            prefilled_on=source,
            exclude=self._failed_decode,
            pairs=pairs,
        )
        if type(decision) is not Dispatch:
            self.predicted_ttft = None
            return None
        self.decode_instance = decode = context.fleet[decision.instance]
        self.predicted_ttft = predict_ttft(self.work, source, decode, now_s=now_s, pairs=pairs)
        self._reservation = decode.ledger.reserve(tokens=self.work.prompt_tokens)
        return decode

    def _seek_decode(self, now_s: float, rules: FlipProposalRules) -> Action:
        """Choose a decode instance, and send the decode leg to it."""
        decision = self._choose_decode(now_s, rules, source=self.source)
        if type(decision) is FlipProposal:
            return self._ask_for_flip(now_s, decision)
        if type(decision) is NoInstance and self.source is not None:
            self._discard_prefill(LocalPrefillReason.UNREADABLE_KV)
            decision = self._choose_decode(now_s, NO_FLIP_PROPOSALS, source=None)
        if type(decision) is not Dispatch:
            self.stop_reason = StopReason.NO_INSTANCE
            return self._end(now_s, Action.FAIL)
        self.dispatch_reason = decision.reason
        instance = self._context.fleet[decision.instance]
        if decision.reason is _PREFILLED_HERE:
            self._drop_kv()  # it is in the prefix cache of this instance
        elif self.has_kv and self._is_stale(now_s):
            self._record_miss(instance, now_s, conditions.LEASE_EXPIRED)
            self._drop_kv()
            self.local_prefill_reason = LocalPrefillReason.STALE_KV_TRANSFER
        return self._open_decode(now_s, instance)

    def _choose_decode(self, now_s: float, rules: FlipProposalRules, *, source: V | None) -> DispatchDecision:
        context = self._context
        return choose_decode(
            context.fleet.candidates,
            self.work,
            now_s=now_s,
            prefilled_on=source,
            rules=rules,
            exclude=self._failed_decode,
            pairs=None if source is None else context.pairs.list_from(source.name),
        )

    def _open_decode(self, now_s: float, instance: V) -> Action:
        ledger, tokens = instance.ledger, self.work.prompt_tokens
        self.decode_was_idle = not ledger.prefill_legs and not ledger.decode_legs
        self.decode_entry = ledger.add_decode(tokens=tokens)
        if not self.prefill_open and (self.source is None or self.local_prefill_reason is not None):
            compute_s = instance.prefill_model.ttft_s(tokens)
            self._local_entry = ledger.add_local_prefill(tokens=tokens, predicted_s=compute_s, now_s=now_s)
        self.decode_instance, self.decode_open, self.state = instance, True, _TRANSFERRING
        return _SEND_DECODE

    # --- the waiting room --------------------------------------------------------------------------

    def _list_able(self, now_s: float, exclude: tuple[str, ...]) -> tuple[list[V], tuple[str, ...]]:
        """The instances that may compute the prompt, and the names of those that have enough work."""
        context = self._context
        ahead_s = context.waiting_room.prefill_ahead_s
        able = [i for i in context.fleet.candidates.prefill if i.name not in exclude]
        full = [
            i.name
            for i in able
            if i.ledger.prefill_queued_s >= ahead_s and i.ledger.remaining_s(now_s) >= ahead_s
        ]
        return able, tuple(full)

    def _wait_for_prefill(
        self, now_s: float, rules: FlipProposalRules, exclude: tuple[str, ...], able: list[V]
    ) -> Action:
        """Join the waiting room; first ask for a flip if the objective is missed behind those who wait."""
        context, room, work = self._context, self._context.waiting_room, self.work
        if rules.enabled:
            backlog_s = room.prefill_s / len(able)
            decision = choose_prefill(
                context.fleet.candidates,
                work._replace(deadline_s=work.deadline_s - backlog_s),
                now_s=now_s,
                rules=rules,
                exclude=exclude,
                delays=context.pairs.prefill_delays,
            )
            if type(decision) is FlipProposal:
                return self._ask_for_flip(now_s, decision)
        prefill_s = able[0].prefill_model.ttft_s(work.prompt_tokens)
        if not room.join(self, size_bytes=self._body_bytes, prefill_s=prefill_s):
            self.stop_reason = StopReason.FULL
            return self._end(now_s, Action.FAIL)
        self.state = _WAITING
        return _WAIT

    @property
    def arrival_s(self) -> float:
        """See `waiting_room.Waiter`."""
        return self.work.arrival_s

    @property
    def is_picky(self) -> bool:
        """See `waiting_room.Waiter`."""
        return bool(self._failed_prefill)

    def reconsider(self, now_s: float) -> bool:
        """See `waiting_room.Waiter`."""
        context = self._context
        able, full = self._list_able(now_s, self._failed_prefill + context.pairs.broken_prefill_instances)
        if full and len(full) == len(able):
            return False
        context.waiting_room.leave(self)
        action = self._seek_prefill(now_s, NO_FLIP_PROPOSALS)
        if self.on_moved is not None:
            self.on_moved(action)
        return True

    # --- flips -------------------------------------------------------------------------------------

    def _ask_for_flip(self, now_s: float, proposal: FlipProposal) -> Action:
        self.proposal, self.state = proposal, _FLIP_REQUESTED
        self._asked_at_s, self.wait_until_s = now_s, self._context.flip_waits.end_s(proposal.role, now_s)
        return Action.ASK_FOR_FLIP

    def _leave_flip_wait(self, now_s: float) -> Action:
        """Choose again, with or without the flip."""
        proposal = self.proposal
        if proposal is not None and proposal.role is Role.PREFILL:
            return self._seek_prefill(now_s, NO_FLIP_PROPOSALS)
        return self._seek_decode(now_s, NO_FLIP_PROPOSALS)

    # --- failures and ends -------------------------------------------------------------------------

    def _record_failure(
        self, now_s: float, failure: Failure, status: int, *, started: bool
    ) -> StopReason | None:
        """Record why a leg failed; return why it may not be tried again, or None."""
        self.failure, self.failed_status = failure, status
        if not started:
            return None
        if failure is _CLOSED:
            self._deaths += 1
            return StopReason.QUERY_OF_DEATH if self._deaths > 1 else None
        if failure is Failure.TOO_LONG:
            return StopReason.TOO_LONG
        if failure in _CHARGED and not self._context.retry_budget.take_retry(now_s):
            return StopReason.RETRY_BUDGET
        return None

    def _retry_after_abort(self, now_s: float, stop: StopReason | None) -> Action:
        self.stop_reason = stop
        if not self.prefill_open and not self.decode_open:
            return self._retry(now_s)
        self._close_prefill(now_s)
        self.decode_open, self.state = False, _ABORTING
        return Action.ABORT_LEGS

    def _retry(self, now_s: float) -> Action:
        self._release_decode(now_s)
        if self.stop_reason is not None:
            return self._end(now_s, Action.FAIL)
        if self.has_kv or self.must_recompute:
            return self._seek_decode(now_s, self._context.flip_rules)
        return self._seek_prefill(now_s, self._context.flip_rules)

    def _end(self, now_s: float, action: Action) -> Action:
        """Release everything and end with `action`, after legs that are still in flight were aborted."""
        if self.state is _DONE:
            return _END
        aborts = self.prefill_open or self.decode_open
        if self.state is _WAITING:
            self._context.waiting_room.leave(self)
        if self._prefill_entry is not None:
            self._close_prefill(now_s)
        if self._transfer_entry is not None:
            self._drop_kv()
        self._release_decode(now_s)
        self.decode_open = False
        if not aborts:
            self.state = _DONE
            return action
        self.state, self._last_action = _ABORTING, action
        return Action.ABORT_LEGS
