"""The journey of one request, from its arrival to its end, as a state machine without I/O and clock.

    arrived ─► (waiting, flip requested) ─► prefill ─► decode sent ─► decode ─► done
                        ▲                      │            │            │
                        └─── retry, continue ◄─┴────────────┴────────────┘

This is the last layer of `Journey`. Without a KV transfer there is no prefill leg. Each method under *events*
is one event; all but `first_byte` return the `Action` that the interpreter carries out next. The details of
the action are attributes. Reading, connecting, time-outs of legs and metrics are the interpreter's: the data
path is one, the simulation another. The journey writes the ledgers of the instances, and everything in its
`JourneyContext` that counts or remembers requests. Its choices are in `choices`.

Retries. A leg that fails before the first byte is sent to another instance, at most `MAX_ATTEMPTS` in each
phase. After as many failed prefill legs, or without retry budget, the decode instance computes the prompt. A
request is a *query of death* if two engines closed the connection, died or answered 5xx after they were sent
it: it is not tried again. Where engines die anyway, a second death is likely chance: each
`DEATHS_PER_ATTEMPT` deaths of the last seconds without this request allow one more, up to `MAX_SUSPICIONS`.
Where all instances of a role fail, one more engine is allowed, which is a decode instance after two prefills.
These retries are few by that rule; those after other failures of an engine that is still alive are charged to
the retry budget of all requests. A re-run after an expired lease uses no KV, so it happens once.

Continuations. A response that breaks after its first byte goes on with another instance if the interpreter
can send the rest of the request (`delivered_tokens`); the output so far is then part of the prompt.
"""

from itertools import chain

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.policy.candidates import V
from fulcrum_router.policy.dispatch import NO_FLIP_PROPOSALS
from fulcrum_router.policy.faults.blame import SHED_STATUSES, is_ambiguous, is_rejection
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.journey.choices import MAX_ATTEMPTS, JourneyChoices
from fulcrum_router.policy.journey.context import SHED_BACKOFF_S
from fulcrum_router.policy.journey.states import Action, LocalPrefillReason, State, StopReason
from fulcrum_router.policy.predictions.prompt_limit import SHORT_PROMPT_TOKENS, cap_prompt

MIN_SUSPICIONS, MAX_SUSPICIONS = 2, 4
"""Engines that died or answered 5xx after which a request is a query of death, while no others die, and at
most."""
DEATHS_PER_ATTEMPT = 3
"""Deaths of engines without this request that make one of its own count as chance."""
KNOWN_FAILING_SHARE = 0.5
"""Share of failed legs on all instances of a role from which a 5xx is the engine's: all of them fail."""

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
DEATHS = frozenset({Failure.CLOSED, Failure.EJECTED, Failure.REFUSED, Failure.UNREACHABLE})
"""Failures of a leg that had started with which its engine ended, or ceased to respond."""

# An attribute of an enum is slow to read.
_FLIP_REQUESTED, _PREFILL, _DECODE_SENT, _DECODE, _ABORTING, _DONE = (
    State.FLIP_REQUESTED,
    State.PREFILL,
    State.DECODE_SENT,
    State.DECODE,
    State.ABORTING,
    State.DONE,
)
_WAIT, _END = Action.WAIT, Action.END


class Journey(JourneyChoices[V]):
    """One request, moved by its events. Times are seconds of one clock, the caller's."""

    __slots__ = ()

    # --- events ------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> Action:
        """The request has arrived, and its body is read.

        Refuses it if its tenant is over the rate limit, and makes the first choice; admission is a part of
        that. A prompt longer than any engine takes counts as the longest (`policy.predictions.prompt_limit`).
        """
        context = self._context
        if self.work.prompt_tokens > SHORT_PROMPT_TOKENS:
            candidates = context.fleet.candidates
            self.work = cap_prompt(self.work, chain(candidates.decode, candidates.other_role))
        if context.prefix_index is not None:
            self._find_hits()
        if self.work.tier in context.rate_limits.by_tier and not self._take_from_rate_limit(now_s):
            return self._end(now_s, Action.FAIL)
        if self._is_judged:
            self._counted = context.record_admitted(self.work, now_s)
        if context.waiting_room.members:
            context.waiting_room.reconsider(now_s)  # others have waited longer
        return self._seek_prefill(now_s, context.flip_rules)

    def prefill_responded(
        self,
        now_s: float,
        *,
        lease_from_s: float,
        has_params: bool,
        tokens: int | None = None,
        cached_tokens: int = 0,
        problem: LocalPrefillReason | None = None,
    ) -> Action:
        """The prefill leg got its response.

        Args:
            now_s: Time of the event.
            lease_from_s: Earliest time at which the lease on the KV may have begun.
            has_params: Whether the response has usable KV transfer parameters.
            tokens: Length of the prompt as the engine counted it; None: not reported.
            cached_tokens: Those of them that the engine had in its prefix cache.
            problem: Why the KV of this response cannot be used, if it would be so on any prefill instance.
        """
        self._close_prefill(now_s)
        if self.state is _DONE or self.state is _ABORTING:
            return _END if self.state is _DONE else _WAIT
        instance, protocol = self.prefill_instance, self.protocol
        assert instance is not None
        if self._context.prefix_index is not None:
            self._context.prefix_index.report(
                instance.name, self._hits, self.work.prefix, cached_tokens=cached_tokens
            )
        if tokens is not None:
            self.work = self.work.with_prompt_tokens(tokens)
            if self._account is not None and not self.continues:
                self._account.count_prompt(tokens)
        self.source, self.local_prefill_reason, self._counted = instance, problem, None
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
        """An engine rejected the request (4xx): the interpreter forwards its response."""
        self.prefill_open = False
        self._withdraw_demand(now_s)
        return self._end(now_s, Action.BREAK if self.continues else _END)

    def prefill_failed(
        self, now_s: float, failure: Failure, *, status: int = 0, started: bool = True
    ) -> Action:
        """The prefill leg failed; `started`: the engine may have begun it."""
        instance = self.prefill_instance
        self._note_shed(now_s, instance, status)
        self._close_prefill(now_s)
        if self.state is _DONE or self.state is _ABORTING or instance is None:
            return _END if self.state is _DONE else _WAIT
        self._failed_prefill += (instance.name,)
        if self.state is _DECODE:
            return _WAIT  # legs at once: the client has the first byte, so the KV arrived
        if failure is Failure.TOO_LARGE:  # it is as large everywhere: no second prefill leg to charge
            self.failure, self.failed_status = failure, status
            self._no_prefill_leg = LocalPrefillReason.PREFILL_FAILED
            return self._retry_after_abort(now_s, None)
        stop = self._record_failure(now_s, instance, failure, status, started=started)
        if stop is StopReason.RETRY_BUDGET:
            self._no_prefill_leg, stop = LocalPrefillReason.PREFILL_FAILED, None
        return self._retry_after_abort(now_s, stop)

    def first_byte(self, now_s: float, *, is_streamed: bool = True) -> None:
        """The first byte was sent to the client: the KV was fetched, the prompt is computed.

        Without `is_streamed` it is not known when the first token was.
        """
        if self._forecast_s and is_streamed:
            work, forecast_s, self._forecast_s = self.work, self._forecast_s, 0.0
            self._context.admission.errors.learn(
                forecast_s=forecast_s, measured_s=now_s - work.arrival_s, objective_s=work.slo.ttft_s
            )
        if self.state is _DECODE_SENT or self.state is _PREFILL:
            self.state, self._counted = _DECODE, None
            if self.decode_entry is not None:
                self.decode_entry.note_first_token()
            self._drop_kv()
            if self._local_entry is not None:
                self._release_local(now_s)

    def decode_ended(
        self, now_s: float, *, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> Action:
        """The response of the decode leg is complete.

        Nothing is learned from the last part of a response.

        Args:
            now_s: Time of the event.
            prompt_tokens: Prompt of this leg, by the engine's count; None: not reported.
            output_tokens: Output of this leg, of all choices, by the engine's count; None: not reported.
        """
        self.decode_open = False
        if self._account is not None:
            if prompt_tokens is not None and not self.continues:
                self._account.count_prompt(prompt_tokens)
            self._account.end_leg(output_tokens)
        if output_tokens is None and self.decode_entry is not None:
            output_tokens = self.decode_entry.output_tokens
        output_tokens = self._cap_output((output_tokens or 0) // self.work.choices)
        if output_tokens and not self.continues:
            work, lengths, limit = self.work, self._context.demand.lengths, self.output_limit
            lengths.record_served(output_tokens)
            if limit is None or output_tokens < limit:  # else its length is not known
                lengths.learn(work.tenant, work.prompt_tokens, output_tokens)
        return self._end(now_s, _END)

    def decode_rejected(self, now_s: float) -> Action:
        """An engine rejected the request (4xx), and its response was forwarded: there is no output."""
        self.decode_open = False
        self._withdraw_demand(now_s)
        if self._account is not None:
            self._account.end_leg(0)
        if self._recovery_s:
            self._give_back_recovery(1.0)
        return self._end(now_s, _END)

    def decode_failed(
        self,
        now_s: float,
        failure: Failure,
        *,
        status: int = 0,
        started: bool = True,
        kv_late: bool = False,
        delivered_tokens: int | None = None,
    ) -> Action:
        """The decode leg failed, or its response may not be used.

        Args:
            now_s: Time of the event.
            failure: The cause; `LEASE_EXPIRED` has the prompt computed again, on any instance.
            status: The engine's HTTP status; 0: none.
            started: Whether the engine may have begun the leg, and so may have fetched the KV.
            kv_late: Whether this leg's own KV may have been fetched too late.
            delivered_tokens: Output tokens that the client has from this leg, if another instance can
                continue after them; None: it cannot.
        """
        instance, has_begun = self.decode_instance, self.state is _DECODE
        self.decode_open = False
        self._note_shed(now_s, instance, status)
        if self._account is not None:
            self._account.end_leg(None if has_begun or failure is Failure.TOO_LONG else 0)
        self._release_decode(now_s)
        if self.state is _DONE or self.state is _ABORTING or instance is None:
            return _END if self.state is _DONE else _WAIT
        if has_begun:
            return self._continue(now_s, instance, failure, status, delivered_tokens)
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
        # An engine that cannot fetch the KV answers 5xx.
        if failure is Failure.STATUS and self.has_kv and not is_rejection(failure, status):
            self._record_miss(instance, now_s, conditions.RECOMPUTED)
        if started:
            self._drop_kv()  # transfer parameters are used once
        stop = self._record_failure(now_s, instance, failure, status, started=started)
        if stop is None and self._decode_attempts >= MAX_ATTEMPTS:
            stop = StopReason.ATTEMPTS
        return self._retry_after_abort(now_s, stop)

    def flip_done(self, now_s: float) -> Action:
        """A new assignment was applied while the request waited for its flip."""
        return self._leave_flip_wait(now_s) if self.state is _FLIP_REQUESTED else _WAIT

    def flip_wait_ended(self, now_s: float) -> Action:
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
        self._withdraw_demand(now_s)
        return self._end(now_s, _END)

    # --- failures and ends -------------------------------------------------------------------------

    def _record_failure(
        self, now_s: float, instance: V, failure: Failure, status: int, *, started: bool
    ) -> StopReason | None:
        """Record why a leg failed, and charge the retry; return why it may not be tried again, or None.

        An engine that may have died by the request raises the suspicion against the request.
        """
        self.failure, self.failed_status = failure, status
        if not started:
            return None
        context = self._context
        if failure in DEATHS:
            context.engine_deaths.record(instance.name, now_s)
            return self._suspect(now_s)
        if is_ambiguous(failure, status):
            return self._suspect_all(now_s) if self._all_fail(instance) else self._suspect(now_s)
        if failure is Failure.TOO_LONG:
            return StopReason.TOO_LONG
        if is_rejection(failure, status):
            return None  # `Health.doubts_rejection` limits how often another engine is asked
        if failure in _CHARGED and not context.retry_budget.take_retry(now_s):
            return StopReason.RETRY_BUDGET
        return None

    def _all_fail(self, failed: V) -> bool:
        """Whether all serving instances of the role of `failed` have failed most of their last legs."""
        candidates = self._context.fleet.candidates
        peers = candidates.other_role if failed.role is Role.PREFILL else candidates.decode
        return all(i.error_share >= KNOWN_FAILING_SHARE for i in (failed, *peers))

    def _note_shed(self, now_s: float, instance: V | None, status: int) -> None:
        """Keep waiting requests from an engine that sheds; called before they may leave the waiting room."""
        if status in SHED_STATUSES and instance is not None:
            self._context.list_shedding(now_s)  # forgets others
            self._context.shed_until_s[instance.name] = now_s + SHED_BACKOFF_S

    def _suspect_all(self, now_s: float) -> StopReason | None:
        """Count a 5xx of a role that fails: one engine more is allowed, of the other role after a prefill."""
        if self._suspicions + 1 >= MIN_SUSPICIONS:
            self._no_prefill_leg = self._no_prefill_leg or LocalPrefillReason.PREFILL_FAILED
        return self._suspect(now_s, more=1)

    def _suspect(self, now_s: float, *, more: int = 0) -> StopReason | None:
        """Count an engine that died or answered 5xx by this request, or by chance; `more` are allowed."""
        self._suspicions += 1
        if self._suspicions < MIN_SUSPICIONS:
            return None
        others = max(0, self._context.engine_deaths.count(now_s) - self._suspicions)
        limit = min(MAX_SUSPICIONS, MIN_SUSPICIONS + more + others // DEATHS_PER_ATTEMPT)
        return StopReason.QUERY_OF_DEATH if self._suspicions >= limit else None

    def _continue(
        self, now_s: float, instance: V, failure: Failure, status: int, delivered_tokens: int | None
    ) -> Action:
        """Have another instance generate the rest of a response that broke after its first byte."""
        self._failed_decode += (instance.name,)
        if delivered_tokens is None:
            self.failure, self.failed_status = failure, status
            if failure in DEATHS:
                self._context.engine_deaths.record(instance.name, now_s)
            return self._end(now_s, Action.BREAK)
        stop = self._record_failure(now_s, instance, failure, status, started=True)
        if stop is not None:
            self.stop_reason = stop
            return self._end(now_s, Action.BREAK)
        work = self.work
        self.work = work.with_prompt_tokens(work.prompt_tokens + delivered_tokens)._replace(
            deadline_s=now_s + work.slo.ttft_s
        )
        self.continues, self._decode_attempts, self._recovery_s = True, 0, 0.0
        self._drop_kv()
        return self._retry_after_abort(now_s, None)

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
