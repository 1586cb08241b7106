"""Which instances may take a request now, whether decode has room for it, and whether it may ask for a flip.

This is the second layer of `Journey`. It changes nothing: `choices` decides by it where a request goes and
whether it waits. It also finds the decode instance that may compute a prompt (`policy.deflection`). It is not
used by itself.
"""

import math
from dataclasses import replace

from fulcrum_router.policy.candidates import V
from fulcrum_router.policy.deflection import Deflection, can_deflect_in_time, choose_deflection, is_at_risk
from fulcrum_router.policy.dispatch import (
    Dispatch,
    DispatchDecision,
    DispatchReason,
    FlipProposal,
    FlipProposalRules,
    choose_prefill,
    compute_decode_cost,
)
from fulcrum_router.policy.journey.record import JourneyRecord
from fulcrum_router.policy.journey.states import State
from fulcrum_router.policy.overflow import choose_overflow
from fulcrum_router.policy.tiers.admission import predict_prefill
from fulcrum_router.policy.tiers.tier_reserve import SPARE_S

# An attribute of an enum is slow to read.
_WITHIN_SLO = DispatchReason.WITHIN_SLO
_ARRIVED, _WAITING, _BEFORE_THE_ROOM = State.ARRIVED, State.WAITING, (State.ARRIVED, State.FLIP_REQUESTED)


class EligibleInstances(JourneyRecord[V]):
    """The instances for one request. Times are seconds of one clock, the caller's."""

    __slots__ = ()

    def _list_eligible(self, now_s: float, exclude: tuple[str, ...]) -> tuple[list[V], tuple[str, ...]]:
        """The instances that may compute the prompt, and the names of those that get no more now.

        These have enough work, or a prompt would queue in them that must not (`_find_crowded`).

        Without a serving prefill instance, and for a request without a prefill leg, the decode instances are
        eligible. They get no more work than prefill instances would.
        """
        context = self._context
        candidates, ahead_s = context.fleet.candidates, context.waiting_room.prefill_ahead_s
        eligible: list[V] = []
        if self._no_prefill_leg is None:
            eligible = list(candidates.prefill)
            if exclude:
                eligible = [i for i in eligible if i.name not in exclude]
        if not eligible:
            eligible = [i for i in candidates.decode if i.name not in self._failed_decode]
        shed_until_s = context.shed_until_s
        full = [
            i.name
            for i in eligible
            if (i.ledger.prefill_queued_s >= ahead_s and i.ledger.remaining_s(now_s) >= ahead_s)
            or (shed_until_s and shed_until_s.get(i.name, now_s) > now_s)
        ]
        if full and self.work.cached_tokens:
            full = [name for name in full if not self._saves_the_wait(name, now_s)]
        if not self._is_due:
            crowded = self._find_crowded(now_s, eligible).difference(full)
            full += [i.name for i in eligible if i.name in crowded]
        return eligible, tuple(full)

    def _find_crowded(self, now_s: float, eligible: list[V]) -> set[str]:
        """The names of the instances in which the prompt may not queue, for the sake of other tiers."""
        context, work = self._context, self.work
        crowded: set[str] = set()
        if context.decode_share.is_used_by_higher(work.priority, now_s):
            crowded.update(i.name for i in eligible if self._would_delay_higher(i))
        if not context.tier_reserve.is_empty and self._no_prefill_leg is None:
            usable, tokens = self._list_usable(now_s), work.prompt_tokens
            crowded.update(context.tier_reserve.list_lent(usable, work.tier, tokens=tokens, now_s=now_s))
        return crowded

    def _list_usable(self, now_s: float) -> list[V]:
        """The prefill instances that get prompts: a reserve on any other one would be none."""
        context = self._context
        broken, shed_until_s = context.pairs.broken_prefill_instances, context.shed_until_s
        return [
            i
            for i in context.fleet.candidates.prefill
            if i.name not in broken and shed_until_s.get(i.name, now_s) <= now_s
        ]

    def _would_delay_higher(self, instance: V) -> bool:
        """Whether this prompt of a lower tier would queue in the engine behind another prompt.

        A prompt of a higher tier cannot pass prompts that the engine already has: the engine computes them
        together, as far as they fit into a step. Prompts that take at most `SPARE_S` together are allowed.
        """
        queued_s, model = instance.ledger.prefill_queued_s, instance.prefill_model
        return queued_s > 0.0 and queued_s + model.ttft_s(self.work.count_computed(instance.name)) > SPARE_S

    def _saves_the_wait(self, name: str, now_s: float) -> bool:
        """Whether the prefix cache of an instance saves more time than its work above the limit takes.

        Only at the turn of the request: it must not pass others that wait.
        """
        context, work = self._context, self.work
        cached = work.cached_tokens.get(name)
        if not cached or (context.waiting_room.members and self.state is not _WAITING):
            return False
        if context.shed_until_s.get(name, now_s) > now_s:
            return False
        instance = context.fleet[name]
        model, excess_s = instance.prefill_model, -context.waiting_room.prefill_ahead_s
        excess_s += instance.ledger.remaining_s(now_s)
        return excess_s < model.ttft_s(work.prompt_tokens) - model.ttft_s(work.count_computed(name))

    def _list_kept(self, now_s: float, eligible: list[V], full: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the other eligible instances that are kept for prompts of other tiers."""
        work, reserve = self.work, self._context.tier_reserve
        if reserve.is_empty:
            return ()
        usable = self._list_usable(now_s)
        kept = reserve.list_kept(usable, work.tier, tokens=work.prompt_tokens, now_s=now_s)
        others = frozenset(kept).difference(full)
        return tuple(i.name for i in eligible if i.name in others)

    def _can_be_in_time(self, now_s: float, exclude: tuple[str, ...], eligible: list[V]) -> bool:
        """Whether an instance that can take work would compute the prompt in time."""
        context, work = self._context, self.work
        if self._no_prefill_leg is not None:
            ends_s = (
                i.ledger.remaining_s(now_s) + i.prefill_model.ttft_s(work.prompt_tokens) for i in eligible
            )
            return now_s + min(ends_s, default=0.0) <= work.deadline_s
        decision = choose_prefill(
            context.fleet.candidates,
            work,
            now_s=now_s,
            exclude=exclude,
            delays=context.pairs.prefill_delays,
        )
        if type(decision) is Dispatch:
            return decision.reason is _WITHIN_SLO
        return now_s < work.deadline_s

    def _is_held(self, now_s: float) -> bool:
        """Whether decode has no room for a request of this tier."""
        context, work = self._context, self.work
        share = context.decode_share
        if share.highest is None or work.priority >= share.highest:
            return False
        output_tokens = context.demand.lengths.predict(work.tenant, work.prompt_tokens)
        tokens = work.context_tokens + work.choices * output_tokens
        decode = context.fleet.candidates.decode
        kept = context.find_kept_decode(work, output_tokens, now_s)
        return share.must_wait(decode, priority=work.priority, tokens=tokens, kept=kept)

    def _must_join_the_held(self, now_s: float) -> bool:
        """Whether decode has no room for a request that has not waited yet, or for one that came before."""
        context = self._context
        room = context.waiting_room
        if context.decode_share.highest is None and not room.members:  # the usual case
            return False
        is_new = self.state in _BEFORE_THE_ROOM and not self.continues
        return is_new and (room.is_held(self.work.priority) or self._is_held(now_s))

    def _must_wait_for_decode(self, now_s: float) -> bool:
        """Whether a request without a prefill leg waits: it passes nobody who came before."""
        room = self._context.waiting_room
        if room.prefill_ahead_s == math.inf:
            return False
        eligible, full = self._list_eligible(now_s, ())
        is_behind = self.state is _ARRIVED and bool(room.members)
        return bool(eligible) and (is_behind or len(full) == len(eligible) or self._must_join_the_held(now_s))

    # --- flips -------------------------------------------------------------------------------------

    def _restrain_flips(self, now_s: float, rules: FlipProposalRules) -> FlipProposalRules:
        """Return the rules by which this request may ask for a flip to prefill.

        While a higher tier sends requests, the measured load of decode must keep to its limit with one
        instance fewer. What the measurement does not show yet, `_may_flip` asks the ledgers.
        """
        decode = len(self._context.fleet.candidates.decode)
        if not rules.enabled or not decode or not self._is_below_a_sender(now_s):
            return rules
        return replace(rules, max_decode_load=rules.max_decode_load * (decode - 1) / decode)

    def _may_flip(self, now_s: float) -> bool:
        """Whether decode can spare an instance for this request.

        While a higher tier sends requests, the tokens in use must fit the other instances: a burst of a lower
        tier would flip several before a measured load shows the first.
        """
        candidates = self._context.fleet.candidates
        return not self._is_below_a_sender(now_s) or self._context.decode_share.can_spare_one(
            candidates.decode, candidates.other_role
        )

    def _is_below_a_sender(self, now_s: float) -> bool:
        """Whether a higher tier than that of this request sends requests."""
        return self._context.decode_share.is_used_by_higher(self.work.priority, now_s)

    # --- overflow ------------------------------------------------------------------------------------

    def _find_overflow(self, now_s: float, exclude: tuple[str, ...]) -> V | None:
        """Find a CPU instance for a prompt that accelerators would compute too late.

        None if decode has no room: a prompt more would make the answers of others late.
        """
        context, work = self._context, self.work
        candidates, room, slo = context.fleet.candidates, context.waiting_room, work.slo
        tokens = work.context_tokens
        if all(compute_decode_cost(i, tokens, slo.tpot_s, now_s)[1] > 0.0 for i in candidates.decode):
            return None
        prefill = [i for i in candidates.prefill if i.name not in exclude]
        ends_at_s = math.inf
        if prefill:
            backlog_s = room.find_backlog_s(work.priority) if room.members else 0.0
            delays = context.pairs.prefill_delays
            prefill_s, _ = predict_prefill(prefill, work, now_s=now_s, backlog_s=backlog_s, delays=delays)
            ends_at_s = now_s + prefill_s
        steps = (
            i.ledger.remaining_s(now_s) + i.decode_model.itl_s(i.ledger.decode_tokens)
            for i in candidates.decode
        )
        highest = context.decode_share.highest
        return choose_overflow(
            candidates.overflow,
            work,
            now_s=now_s,
            ends_at_s=ends_at_s,
            start_s=min(steps, default=0.0),
            is_lower_tier=highest is not None and work.priority < highest,
            exclude=exclude + self._failed_decode,
        )

    # --- deflection --------------------------------------------------------------------------------

    def _find_deflection(self, now_s: float, decision: DispatchDecision) -> Deflection | None:
        """Find a decode instance for a prompt that the chosen prefill instance might end too late."""
        if type(decision) is FlipProposal:
            decision = decision.fallback
        return self._deflect_at_risk(now_s, now_s + decision.cost[1]) if type(decision) is Dispatch else None

    def _predict_first_end(self, now_s: float, eligible: list[V]) -> float:
        """When the first of these instances would end the prompt if it were the next one there."""
        work = self.work
        return now_s + min(
            i.ledger.remaining_s(now_s) + i.prefill_model.ttft_s(work.count_computed(i.name))
            for i in eligible
        )

    def _may_be_deflected_yet(self, now_s: float) -> bool:
        """Whether some decode instance will have time to compute the prompt before its deadline."""
        work = self.work
        if self._no_prefill_leg is not None:
            return False
        output_tokens = self._context.demand.lengths.mean_served
        return any(
            can_deflect_in_time(i, work, now_s=now_s, output_tokens=output_tokens)
            for i in self._context.fleet.candidates.decode
            if i.name not in self._failed_decode
        )

    def _deflect_at_risk(self, now_s: float, ends_at_s: float) -> Deflection | None:
        """Find a decode instance, unless `ends_at_s`, when a prefill instance ends the prompt, is early."""
        context, work = self._context, self.work
        if self._no_prefill_leg is not None or not is_at_risk(work, ends_at_s=ends_at_s):
            return None
        if context.decode_share.is_used_by_higher(work.priority, now_s):
            return None
        exclude = self._failed_decode + context.list_shedding(now_s)
        by_s = min(work.deadline_s, ends_at_s)
        return choose_deflection(
            context.fleet.candidates.decode,
            work,
            now_s=now_s,
            by_s=by_s,
            output_tokens=context.demand.lengths.mean_served,
            exclude=exclude,
        )
