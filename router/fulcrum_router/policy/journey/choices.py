"""The choices of a journey: which instances take its legs, whether it waits, and which flip it asks for.

This is the third layer of `Journey`: `machine` calls it where an event leaves something to choose. Each
choice is carried out in the ledgers at once, and the returned `Action` tells the interpreter what to send.
The layer also implements `waiter.Waiter`, by which the waiting room asks a request to leave.
"""

import math
from collections.abc import Hashable

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.policy.candidates import V
from fulcrum_router.policy.deflection import Deflection
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
from fulcrum_router.policy.journey.eligible import EligibleInstances
from fulcrum_router.policy.journey.protocols import NIXL_PULL, find_protocol
from fulcrum_router.policy.journey.states import Action, LocalPrefillReason, State, StopReason
from fulcrum_router.policy.predictions.prediction import predict_ttft
from fulcrum_router.policy.tiers.admission import ADMITTED, Admitted, Refusal
from fulcrum_router.policy.waiting.waiter import LeaveResult

MAX_ATTEMPTS = 3
"""Instances tried for one phase of a request."""

# An attribute of an enum is slow to read.
_ARRIVED, _WAITING, _FLIP_REQUESTED, _PREFILL, _DECODE_SENT, _ABORTING, _DONE = (
    State.ARRIVED,
    State.WAITING,
    State.FLIP_REQUESTED,
    State.PREFILL,
    State.DECODE_SENT,
    State.ABORTING,
    State.DONE,
)
_SEND_PREFILL, _SEND_DECODE, _WAIT, _END = Action.SEND_PREFILL, Action.SEND_DECODE, Action.WAIT, Action.END
_ROLE_BOTH, _ROLE_PREFILL = Role.BOTH, Role.PREFILL
_PREFILLED_HERE, _WITHIN_SLO, _OTHER_ROLE = (
    DispatchReason.PREFILLED_HERE,
    DispatchReason.WITHIN_SLO,
    DispatchReason.OTHER_ROLE,
)


class JourneyChoices(EligibleInstances[V]):
    """The choices of one request. Times are seconds of one clock, the caller's."""

    __slots__ = ()

    def _seek_prefill(self, now_s: float, rules: FlipProposalRules) -> Action:
        """Choose a prefill instance; without one, the decode instance computes the prompt."""
        context, rules = self._context, self._restrain_flips(now_s, rules)
        self.source = self.predicted_ttft = None
        self.local_prefill_reason = reason = self._no_prefill_leg
        if reason is None and len(self._failed_prefill) >= MAX_ATTEMPTS:
            reason = LocalPrefillReason.PREFILL_FAILED
        if reason is None:
            broken = context.pairs.broken_prefill_instances
            exclude = self._failed_prefill + broken
            if context.fleet.candidates.overflow:
                overflow = self._find_overflow(now_s, exclude)
                if overflow is not None:
                    return self._overflow(now_s, overflow)
            if context.waiting_room.prefill_ahead_s < math.inf:
                eligible, full = self._list_eligible(now_s, exclude)
                full += self._list_kept(now_s, eligible, full)
                if full and len(full) == len(eligible):
                    return self._wait_for_prefill(now_s, rules, exclude, eligible)
                if eligible and self._must_join_the_held(now_s):
                    prefill_s = context.fleet.candidates.predict_prefill_s(self.work.least_computed)
                    return self._join_room(now_s, prefill_s)
                exclude += full
            decision = self._choose_prefill(now_s, rules, exclude)
            if context.deflects:
                deflection = self._find_deflection(now_s, decision)
                if deflection is not None:
                    return self._deflect(now_s, deflection)
            if type(decision) is Dispatch:
                return self._take_prefill(now_s, decision)
            if type(decision) is FlipProposal:
                return self._ask_for_flip(now_s, decision)
            reason = self._explain_no_prefill(broken)
        elif reason.is_expected and self._must_wait_for_decode(now_s):
            return self._join_room(now_s, 0.0)
        self.local_prefill_reason = reason
        return self._seek_decode(now_s, context.flip_rules)

    def _choose_prefill(
        self, now_s: float, rules: FlipProposalRules, exclude: tuple[str, ...]
    ) -> DispatchDecision:
        """Choose among the instances that have not just shed a request, if there is one.

        A flip that decode cannot spare is not proposed.
        """
        context = self._context
        shedding = context.list_shedding(now_s) if context.shed_until_s else ()
        if shedding:
            excluded = frozenset(exclude + shedding)
            if any(i.name not in excluded for i in context.fleet.candidates.prefill):
                exclude += shedding
        decision = choose_prefill(
            context.fleet.candidates,
            self.work,
            now_s=now_s,
            rules=rules,
            exclude=exclude,
            delays=context.pairs.prefill_delays,
        )
        if type(decision) is FlipProposal and not self._may_flip(now_s):
            return decision.fallback
        return decision

    def _admit(self, now_s: float) -> None:
        """Admit the request without a forecast: it does not wait for prefill instances."""
        if not self._is_judged:
            self._is_judged = True
            self._context.admission.record(self.work.tier, ADMITTED)
            self._counted = self._context.record_admitted(self.work, now_s)
        self._forecast_s = 0.0  # it was for prefill instances

    def _overflow(self, now_s: float, instance: V) -> Action:
        """Have a CPU instance compute the prompt, and also decode if nobody can read its KV.

        The request is admitted, since it is in time there.
        """
        context = self._context
        self._admit(now_s)
        context.prompts.record_overflow(self.work.prompt_tokens)
        if instance.role is _ROLE_PREFILL and context.fleet.candidates.list_fetchers(instance.identity)[0]:
            return self._take_prefill(now_s, Dispatch(instance.name, DispatchReason.OVERFLOW, (0.0, 0.0)))
        self.local_prefill_reason, self.dispatch_reason = LocalPrefillReason.CPU_POOL, DispatchReason.OVERFLOW
        return self._open_decode(now_s, instance)

    def _deflect(self, now_s: float, deflection: Deflection) -> Action:
        """Have a decode instance compute the prompt. The request is admitted, since it is in time there."""
        context = self._context
        self._admit(now_s)
        instance = context.fleet[deflection.instance]
        instance.ledger.deflect(recovery_s=deflection.recovery_s, now_s=now_s)
        self._recovery_s = deflection.recovery_s
        self.source = self.predicted_ttft = None
        self.local_prefill_reason, self.dispatch_reason = LocalPrefillReason.DEFLECTED, _WITHIN_SLO
        return self._open_decode(now_s, instance)

    def _explain_no_prefill(self, broken: tuple[str, ...]) -> LocalPrefillReason:
        if broken:
            return LocalPrefillReason.KV_TRANSFER_BROKEN
        failed = LocalPrefillReason.PREFILL_FAILED
        return failed if self._failed_prefill else LocalPrefillReason.NO_PREFILL_INSTANCE

    def _take_prefill(self, now_s: float, decision: Dispatch) -> Action:
        if not self._is_judged and self._is_refused(now_s):
            return self._end(now_s, Action.FAIL)
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
        self._charge_tenant()
        if context.prefix_index is not None:
            self._record_prefix(instance)
        context.prompts.record(self.work.prompt_tokens)
        ledger, tokens = instance.ledger, self.work.count_computed(instance.name)
        compute_s = instance.prefill_model.ttft_s(tokens)
        self._prefill_entry = ledger.add_prefill(tokens=tokens, predicted_s=compute_s, now_s=now_s)
        self.prefill_instance, self.prefill_open, self.state = instance, True, _PREFILL
        if context.tier_reserve.begin(self.work.tier, instance.name):
            self._reserved_on = instance.name
        if not protocol.legs_at_once or decode is None:
            return _SEND_PREFILL
        self._release_reservation()
        self._open_decode(now_s, decode)
        return Action.SEND_BOTH

    def _find_cached(self, prefill: V) -> V | None:
        """Find the serving instance that holds most of the prompt, if it holds more than `prefill` does."""
        cached, candidates = self.work.cached_tokens, self._context.fleet.candidates
        eligible = [i for i in (*candidates.decode, *candidates.other_role) if cached.get(i.name)]
        best = max(eligible, key=lambda i: (cached[i.name], i.name), default=None)
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
        if not self._is_judged and self._is_refused(now_s):
            return self._end(now_s, Action.FAIL)
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
        pairs = None if source is None else context.pairs.list_from(source.name)
        shedding = context.list_shedding(now_s) if context.shed_until_s else ()
        if shedding:
            decision = choose_decode(
                context.fleet.candidates,
                self.work,
                now_s=now_s,
                prefilled_on=source,
                exclude=self._failed_decode + shedding,
                pairs=pairs,
            )
            if type(decision) is Dispatch and decision.reason is not _OTHER_ROLE:
                return decision
        return choose_decode(
            context.fleet.candidates,
            self.work,
            now_s=now_s,
            prefilled_on=source,
            rules=rules,
            exclude=self._failed_decode,
            pairs=pairs,
        )

    def _open_decode(self, now_s: float, instance: V) -> Action:
        ledger, work, tokens = instance.ledger, self.work, self.work.prompt_tokens
        self.decode_was_idle = not ledger.prefill_legs and not ledger.decode_legs
        computes = not self.prefill_open and (self.source is None or self.local_prefill_reason is not None)
        self.decode_entry = ledger.add_decode(tokens=work.context_tokens)
        if work.is_streamed and not computes:
            self.decode_entry.await_first_token(work.deadline_s, work.priority)
        if work.choices == 1 and not self.continues:
            self._context.demand.lengths.follow(work.tenant, tokens, self.decode_entry)
        if self._charge is None:
            self._charge_tenant()
        if self._account is not None:
            self._account.follow(self.decode_entry)
        if computes:
            self._context.prompts.record(tokens)
            compute_s = instance.prefill_model.ttft_s(work.count_computed(instance.name))
            self._local_entry = ledger.add_local_prefill(tokens=tokens, predicted_s=compute_s, now_s=now_s)
        self.decode_instance, self.decode_open, self.state = instance, True, _DECODE_SENT
        return _SEND_DECODE

    def _is_refused(self, now_s: float) -> bool:
        """Decide once whether the request is admitted, after a flip that it asked for: that may make room."""
        self._is_judged = True
        is_known = self._no_prefill_leg is not LocalPrefillReason.PASSED_THROUGH
        outcome, self._forecast_s = self._context.judge(self.work, now_s, can_limit_output=is_known)
        if type(outcome) is Admitted:
            _, self._give_up_at_s, self.output_limit = outcome
        elif type(outcome) is Refusal:
            self.refusal, self.stop_reason = outcome, StopReason.REFUSED
            return True
        self._counted = self._context.record_admitted(self.work, now_s)
        return False

    # --- the waiting room --------------------------------------------------------------------------

    def _wait_for_prefill(
        self, now_s: float, rules: FlipProposalRules, exclude: tuple[str, ...], eligible: list[V]
    ) -> Action:
        """Join the waiting room; first ask for a flip if the objective is missed behind those who wait.

        Unless a flip would be of no use: the request waits for decode, or is hopeless.
        """
        context, room, work = self._context, self._context.waiting_room, self.work
        own_s = context.fleet.candidates.predict_prefill_s(work.least_computed)
        is_useful = not room.is_held(work.priority) and not context.is_hopeless(
            work, own_s=own_s, eligible=len(eligible)
        )
        if rules.enabled and is_useful:
            backlog_s = room.find_backlog_s(work.priority) / len(eligible)
            decision = choose_prefill(
                context.fleet.candidates,
                work._replace(deadline_s=work.deadline_s - backlog_s),
                now_s=now_s,
                rules=rules,
                exclude=exclude,
                delays=context.pairs.prefill_delays,
            )
            if type(decision) is FlipProposal and self._may_flip(now_s):
                return self._ask_for_flip(now_s, decision)
        return self._join_room(now_s, own_s)

    def _join_room(self, now_s: float, prefill_s: float) -> Action:
        """Wait; `prefill_s` is the work of prefill instances that the request brings."""
        if not self._is_judged and self._is_refused(now_s):
            return self._end(now_s, Action.FAIL)
        context = self._context
        work_s = context.fleet.candidates.predict_prefill_s(self.work.least_computed)
        if not context.waiting_room.join(
            self, prefill_s=prefill_s, work_s=work_s, give_up_at_s=self._give_up_at_s
        ):
            self.stop_reason = StopReason.FULL
            return self._end(now_s, Action.FAIL)
        self.state = _WAITING
        return _WAIT

    @property
    def arrival_s(self) -> float:
        """See `waiter.Waiter`."""
        return self.work.arrival_s

    @property
    def deadline_s(self) -> float:
        """See `waiter.Waiter`."""
        return self.work.deadline_s

    def give_way(self) -> None:
        """See `waiter.Waiter`."""
        self.stop_reason = StopReason.FULL
        action = self._end(self.work.arrival_s, Action.FAIL)  # no leg is open; buckets ignore the past
        self._report_move(action)

    def give_up(self, now_s: float) -> None:
        """See `waiter.Waiter`."""
        self.stop_reason = StopReason.REFUSED
        self.refusal = self._context.refuse_waiting(self.work, now_s)
        self._report_move(self._end(now_s, Action.FAIL))

    @property
    def priority(self) -> int:
        """See `waiter.Waiter`."""
        return self.work.priority

    @property
    def tenant(self) -> str:
        """See `waiter.Waiter`."""
        return self.work.tenant

    @property
    def tier(self) -> str:
        """See `waiter.Waiter`."""
        return self.work.tier

    @property
    def exclusion(self) -> Hashable:
        """See `waiter.Waiter`."""
        has_leg = self._no_prefill_leg is None
        failed_prefill = frozenset(self._failed_prefill if has_leg else ())
        failed_decode = frozenset(self._failed_decode)
        return (
            None
            if has_leg and not failed_prefill | failed_decode
            else (has_leg, failed_prefill, failed_decode)
        )

    def try_to_leave(
        self, now_s: float, *, late: bool, held_for_long: bool, due: bool, only_deflected: bool
    ) -> LeaveResult:
        """See `waiter.Waiter`."""
        context = self._context
        if context.deflects and not late and now_s > self.work.deadline_s:
            return LeaveResult.LATE  # without a look at the instances: thousands may come to this at once
        self._is_due = due
        self._find_hits()
        exclude = self._failed_prefill + context.pairs.broken_prefill_instances
        eligible, full = self._list_eligible(now_s, exclude)
        if eligible and (only_deflected or len(full) == len(eligible)):
            if not context.deflects:
                return LeaveResult.BLOCKED
            if late:
                return LeaveResult.LATE_BLOCKED
            return self._try_to_deflect(now_s, eligible, held_for_long=held_for_long)
        if not late and not self._can_be_in_time(now_s, exclude + full, eligible):
            return LeaveResult.LATE
        kept = self._list_kept(now_s, eligible, full)
        if kept and len(full) + len(kept) == len(eligible):
            return LeaveResult.RESERVED
        if not held_for_long and self._is_held(now_s):
            return LeaveResult.HELD
        context.waiting_room.leave(self)
        self._report_move(self._seek_prefill(now_s, NO_FLIP_PROPOSALS))
        return LeaveResult.LEFT

    def _try_to_deflect(self, now_s: float, eligible: list[V], *, held_for_long: bool) -> LeaveResult:
        """Leave for a decode instance, since no prefill instance takes work now.

        A request that no instance will compute in time becomes late at once. Otherwise it would keep those
        behind it from being deflected until a prefill instance can take work, and make them late.
        """
        ends_at_s = self._predict_first_end(now_s, eligible)
        if held_for_long or not self._is_held(now_s):
            deflection = self._deflect_at_risk(now_s, ends_at_s)
            if deflection is not None:
                self._context.waiting_room.leave(self)
                self._report_move(self._deflect(now_s, deflection))
                return LeaveResult.DEFLECTED
        if ends_at_s <= self.work.deadline_s or self._may_be_deflected_yet(now_s):
            return LeaveResult.BLOCKED
        return LeaveResult.LATE

    def _report_move(self, action: Action) -> None:
        if self.on_moved is not None:
            self.on_moved(action)

    # --- flips -------------------------------------------------------------------------------------

    def _ask_for_flip(self, now_s: float, proposal: FlipProposal) -> Action:
        self.proposal, self.state = proposal, _FLIP_REQUESTED
        self._asked_at_s, self.wait_until_s = (
            now_s,
            self._context.flip_waits.wait_until_s(proposal.role, now_s),
        )
        return Action.ASK_FOR_FLIP

    def _leave_flip_wait(self, now_s: float) -> Action:
        """Choose again, with or without the flip."""
        proposal = self.proposal
        if proposal is not None and proposal.role is Role.PREFILL:
            return self._seek_prefill(now_s, NO_FLIP_PROPOSALS)
        return self._seek_decode(now_s, NO_FLIP_PROPOSALS)

    # --- the end -------------------------------------------------------------------------------------

    def _end(self, now_s: float, action: Action) -> Action:
        """Release everything and end with `action`; if legs are in flight, first have them aborted."""
        if self.state is _DONE:
            return _END
        if self.continues and action is Action.FAIL:
            action = Action.BREAK
        aborts = self.prefill_open or self.decode_open
        if self.state is _WAITING:
            self._context.waiting_room.leave(self)
        if self._prefill_entry is not None:
            self._close_prefill(now_s)
        if self._transfer_entry is not None:
            self._drop_kv()
        if self._account is not None:
            self._settle(now_s, self._account, action)
        self._release_decode(now_s)
        self.decode_open = False
        if not aborts:
            self.state = _DONE
            return action
        self.state, self._last_action = _ABORTING, action
        return Action.ABORT_LEGS
