"""What is known of one request on its journey, and the entries that it holds in the ledgers.

This is the first layer of `Journey`; the others decide how its attributes change. Entries are released here,
in one place, so that nothing is left in a ledger whatever way the journey ends. The tenant's tokens are taken
and settled here, too (`policy.tiers.token_account`), and the prefix index is asked and updated.
"""

import math
from collections.abc import Callable
from typing import Generic

from fulcrum_core.values import AdmissionMode
from fulcrum_router.policy.candidates import V
from fulcrum_router.policy.demand import CountedWork
from fulcrum_router.policy.dispatch import DispatchReason, FlipProposal
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.journey.context import JourneyContext
from fulcrum_router.policy.journey.protocols import NIXL_PULL, TransferProtocol
from fulcrum_router.policy.journey.states import Action, LocalPrefillReason, State, StopReason
from fulcrum_router.policy.kv_pairs.kv_lease import max_usable_age_s
from fulcrum_router.policy.kv_pairs.pair_record import PairKey, TransferOutcome
from fulcrum_router.policy.ledger import DecodeEntry, PendingTransferEntry, PrefillEntry, Reservation
from fulcrum_router.policy.predictions.prediction import PredictedTtft
from fulcrum_router.policy.predictions.prompt_limit import ASSUMED_CONTEXT_TOKENS
from fulcrum_router.policy.prefix_index import NO_HITS, Hits
from fulcrum_router.policy.tiers.admission import Refusal
from fulcrum_router.policy.tiers.token_account import TokenAccount
from fulcrum_router.policy.waiting.waiting_room import Charge
from fulcrum_router.policy.work import Work

# An attribute of an enum is slow to read.
_ARRIVED, _LEAST_COST, _OFF = State.ARRIVED, DispatchReason.LEAST_COST, AdmissionMode.OFF
_PASSED_THROUGH, _FAIL, _TIMEOUT = LocalPrefillReason.PASSED_THROUGH, Action.FAIL, Failure.TIMEOUT

_FAULTS_OF_THE_REQUEST = (StopReason.TOO_LONG, StopReason.QUERY_OF_DEATH)
"""Reasons for which any engine would fail the request."""


class JourneyRecord(Generic[V]):
    """One request. Times are seconds of one clock, the caller's."""

    __slots__ = (
        "_account",
        "_asked_at_s",
        "_charge",
        "_context",
        "_counted",
        "_decode_attempts",
        "_failed_decode",
        "_failed_prefill",
        "_forecast_s",
        "_give_up_at_s",
        "_hits",
        "_is_due",
        "_is_judged",
        "_is_limited",
        "_last_action",
        "_lease_from_s",
        "_local_entry",
        "_no_prefill_leg",
        "_prefill_entry",
        "_recovery_s",
        "_reservation",
        "_reserved_on",
        "_suspicions",
        "_transfer_entry",
        "cached_on",
        "continues",
        "decode_entry",
        "decode_instance",
        "decode_open",
        "decode_was_idle",
        "dispatch_reason",
        "failed_status",
        "failure",
        "has_kv",
        "local_prefill_reason",
        "must_recompute",
        "on_moved",
        "output_limit",
        "predicted_ttft",
        "prefill_computed_for_s",
        "prefill_instance",
        "prefill_open",
        "proposal",
        "protocol",
        "refusal",
        "source",
        "state",
        "stop_reason",
        "wait_until_s",
        "work",
    )

    refusal: Refusal | None
    """Why the request was not admitted."""
    on_moved: Callable[[Action], None] | None
    """Called with the next action when the request leaves the waiting room."""
    output_limit: int | None
    """Output tokens that admission allows; None: as many as the client asked for."""
    _give_up_at_s: float
    """When the request is refused if it still waits in the room."""
    _hits: Hits
    """What instances are predicted to have of the prompt in their prefix caches."""
    _account: TokenAccount | None
    """Tokens that were taken from the tenant; None: nobody counts them."""
    _counted: CountedWork | None
    """What the request has added to the demand, until its prompt is computed."""
    _is_limited: bool
    """Whether they were taken from the rate limit of the tenant."""
    _forecast_s: float
    """TTFT that admission has forecast, until it is measured; 0: none."""
    _recovery_s: float
    """Time that decode needs to catch up after the deflected prompt of this request; 0: none is."""
    _is_judged: bool
    """Whether admission has decided, or need not; then the request is not refused later."""
    _reserved_on: str | None
    """Instance that computes the prompt out of the reserve of its tier; None: none does."""
    must_recompute: bool
    """Whether the prompt must be computed again, without any KV that was computed before."""

    def __init__(
        self,
        context: JourneyContext[V],
        work: Work,
        local_prefill_reason: LocalPrefillReason | None = None,
    ) -> None:
        self._context = context
        self.work = work
        """The request; its prompt is an estimate until an engine has counted it."""
        self._charge: Charge | None = None
        """What its tenant was charged; None in mode Direct, and until it is sent."""
        self._no_prefill_leg = local_prefill_reason
        """Why the request gets no prefill leg; None: it gets one."""
        self.on_moved = None
        self.state, self.wait_until_s = _ARRIVED, 0.0
        self.protocol: TransferProtocol = NIXL_PULL
        self.prefill_instance: V | None = None
        """Target of the prefill leg that was sent last."""
        self.decode_instance: V | None = None
        """Target of the decode leg that was sent last; before it, the one that has a reservation."""
        self.cached_on: V | None = None
        """Instance from which the prefill leg fetches the KV of an earlier turn (`fetches_cached`)."""
        self.dispatch_reason = _LEAST_COST
        """The rule that chose the last target."""
        self.source: V | None = None
        """Instance that computed the prompt last."""
        self.has_kv = False
        """Whether the decode leg is to use the KV that `source` computed."""
        self.local_prefill_reason: LocalPrefillReason | None = None
        """Why the decode instance computes the prompt itself."""
        self.continues = False
        """Whether the client has a part of the response, and another instance is to generate the rest."""
        self.prefill_open = self.decode_open = False
        """Whether the leg is in flight."""
        self.decode_was_idle = False
        """Whether the instance had no other legs when this leg was sent, so that its duration is its own."""
        self.predicted_ttft: PredictedTtft | None = None
        """Predicted when the prefill leg was sent; None without one."""
        self.prefill_computed_for_s: float | None = None
        """How long the last leg's prompt was the oldest one of its instance; see `PrefillSampler.add`."""
        self.proposal: FlipProposal | None = None
        """The flip that the request asked for last."""
        self.failure: Failure | None = None
        """Failure of the last leg that failed."""
        self.failed_status = 0
        """HTTP status with which the engine failed it; 0: none."""
        self.stop_reason: StopReason | None = None
        self.refusal = self.output_limit = self._account = self._counted = None
        self._give_up_at_s, self._is_judged = math.inf, context.admission.mode is _OFF
        self.decode_entry: DecodeEntry | None = None
        self._prefill_entry: PrefillEntry | None = None
        self._reservation: Reservation | None = None
        self._local_entry: PrefillEntry | None = None
        self._transfer_entry: PendingTransferEntry | None = None
        self._failed_prefill = self._failed_decode = tuple[str, ...]()
        self._decode_attempts = self._suspicions = 0
        self._lease_from_s = self._asked_at_s = self._forecast_s = self._recovery_s = 0.0
        self._last_action: Action | None = None
        self._hits, self._reserved_on = NO_HITS, None
        self._is_due = self._is_limited = self.must_recompute = False

    def skip_admission(self) -> None:
        """Admit the request, whatever admission would decide."""
        self._is_judged = True

    def _withdraw_demand(self, now_s: float) -> None:
        """The request ends without having been served; see `DemandState.withdrawn`.

        One that is late already stays in the demand: with more instances it might have been served.
        """
        if self._counted is not None and now_s < self.work.deadline_s:
            self._context.demand.withdraw(self._counted)
        self._counted = None

    def _find_hits(self) -> None:
        """Look up what instances have of the prompt in their prefix caches."""
        index, prefix = self._context.prefix_index, self.work.prefix
        if index is not None and prefix.hashes and not self.must_recompute:
            self._hits = hits = index.find_hits(prefix)
            if hits.tokens or self.work.cached_tokens:
                self.work = self.work._replace(cached_tokens=hits.tokens)

    def _record_prefix(self, instance: V) -> None:
        """The prompt is sent to an instance that computes it, and keeps it in its prefix cache."""
        index, work = self._context.prefix_index, self.work
        if index is not None:
            room = instance.kv_capacity_tokens or math.inf
            index.record(
                work.prefix,
                instance.name,
                new_tokens=work.count_computed(instance.name),
                room_tokens=room * (1.0 - (instance.kv_usage or 0.0)),
                places=self._hits.places,
            )

    @property
    def expected_transfer_s(self) -> float:
        """Expected duration of the KV transfer of the decode leg, in seconds; 0: it has none."""
        predicted = self.predicted_ttft
        return predicted.transfer_s if self.has_kv and predicted is not None else 0.0

    @property
    def local_compute_s(self) -> float | None:
        """Predicted time to compute the prompt in the decode leg; None: it is computed already."""
        return None if self._local_entry is None else self._local_entry.predicted_s

    def _take_from_rate_limit(self, now_s: float) -> bool:
        """Take the request's tokens from its tenant's rate limit; False: they exceed it and it is refused."""
        account = self._open_account()
        self.refusal = self._context.take_tokens(self.work, account.taken.total, now_s)
        if self.refusal is not None:
            self.stop_reason = StopReason.REFUSED
            return False
        self._account, self._is_limited = account, True
        return True

    def _open_account(self) -> TokenAccount:
        return self._context.open_account(self.work, limits_output=not self._has_turns)

    @property
    def _has_turns(self) -> bool:
        """Whether a response has several turns, by tools of the engine, each with the limit of the client."""
        return self._no_prefill_leg is _PASSED_THROUGH

    def _cap_output(self, output_tokens: int) -> int:
        """Count the output of one choice as no more than it can be: one wrong count is no answer to learn."""
        limit = 0 if self._has_turns else self.work.output_limit
        return min(output_tokens, limit or ASSUMED_CONTEXT_TOKENS, ASSUMED_CONTEXT_TOKENS)

    def _charge_tenant(self) -> None:
        """A leg is sent: charge the tenant for the first one, if requests wait in the router."""
        context, work = self._context, self.work
        if self._charge is None and context.waiting_room.prefill_ahead_s < math.inf:
            if self._account is None:
                self._account = self._open_account()
            self._charge = context.waiting_room.charge(
                self._account, priority=work.priority, tenant=work.tenant, tier=work.tier
            )
        if self._account is not None:
            self._account.send()

    def _settle(self, now_s: float, account: TokenAccount, action: Action) -> None:
        """Give back what was taken and not used, or take more.

        A request that fails costs nothing, unless an engine worked for it in vain because of the request.
        """
        served = action is not _FAIL or self.stop_reason in _FAULTS_OF_THE_REQUEST or self.failure is _TIMEOUT
        used = account.settle(served=served)
        if used is None:
            return
        if self._is_limited:
            (prompt, output), (used_prompt, used_output) = account.taken, used
            unused = prompt - used_prompt + output - used_output
            self._context.give_back_tokens(self.work, unused, now_s)
        if self._charge is not None:
            self._context.waiting_room.close_charge(self._charge, used)

    def _close_prefill(self, now_s: float) -> None:
        self.prefill_open = False
        if self._reservation is not None:
            self._release_reservation()
        if self._prefill_entry is not None:
            self.prefill_computed_for_s = self._prefill_entry.release(now_s)
            self._prefill_entry = None
            if self._reserved_on is not None:
                self._context.tier_reserve.end(self._reserved_on)
                self._reserved_on = None
            if self._context.waiting_room.members:
                self._context.waiting_room.reconsider(now_s)

    def _release_reservation(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _release_decode(self, now_s: float) -> None:
        if self.decode_entry is not None:
            work = self.work
            self._context.demand.lengths.forget(work.tenant, work.prompt_tokens, self.decode_entry)
            self.decode_entry.release()
            self.decode_entry = None
        if self._local_entry is not None:
            self._give_back_recovery(self._local_entry.uncomputed_share(now_s))
            self._release_local(now_s)

    def _give_back_recovery(self, share: float) -> None:
        """Of a deflected prompt this share is not computed: who leaves early takes no time from others."""
        recovery_s, self._recovery_s = self._recovery_s, 0.0
        if recovery_s and self.decode_instance is not None:
            self.decode_instance.ledger.give_back(recovery_s=share * recovery_s)

    def _release_local(self, now_s: float) -> None:
        entry, self._local_entry = self._local_entry, None
        if entry is not None:
            entry.release(now_s)
            if self._context.waiting_room.members:
                self._context.waiting_room.reconsider(now_s)

    def _drop_kv(self) -> None:
        """End the pending transfer: the KV was fetched, or will not be."""
        self.has_kv = False
        if self._transfer_entry is not None:
            self._transfer_entry.release()
            self._transfer_entry = None

    def _discard_prefill(self, reason: LocalPrefillReason) -> None:
        """Forget the KV transfer and which instance computed the prompt, so that any instance may decode."""
        self._drop_kv()
        self.local_prefill_reason, self.source = reason, None

    def _record_miss(self, decode: V, now_s: float, reason: str) -> None:
        """Count a transfer that this decode instance did not use or did not respond to."""
        if self.source is not None:
            pair = self._context.pairs[PairKey(self.source.name, decode.name)]
            pair.record(TransferOutcome.RECOMPUTED, now_s=now_s, reason=reason)

    def _is_stale(self, now_s: float) -> bool:
        """Whether the KV is too old to be fetched before its lease ends."""
        source = self.source
        if source is None or not self.protocol.leased:
            return False
        return now_s - self._lease_from_s > max_usable_age_s(source.kv_lease_s)
