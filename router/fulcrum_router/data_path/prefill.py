"""The prefill leg of one request: have the prompt computed, and keep the KV transfer parameters for decode.

Up to `MAX_ATTEMPTS` prefill instances are tried. If none can compute the prompt, the decode instance does,
for the `local_prefill_reason`. KV transfer parameters are used once: after a fetch the engine frees the
blocks, and a second fetch would get another prompt's KV without an error.
"""

import time

from fulcrum_core.values import Role
from fulcrum_router.counters import PREFILL, LocalPrefillReason, RequestOutcome
from fulcrum_router.data_path.request import ClientRequest, EarlyResponse
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import (
    PrefillProblem,
    RequestBody,
    build_prefill_body,
    parse_prefill_response,
)
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, ResponseHead
from fulcrum_router.http1.inline_task import run_in_asyncio_task
from fulcrum_router.http1.upstream import send_request
from fulcrum_router.kv_transfer.verification import KvTransfer, record_miss
from fulcrum_router.policy import (
    Dispatch,
    DispatchDecision,
    FlipProposal,
    FlipProposalRules,
    PredictedTtft,
    Work,
    choose_prefill,
)
from fulcrum_router.policy.dispatch import NO_FLIP_PROPOSALS
from fulcrum_router.policy.kv_lease import max_usable_age_s
from fulcrum_router.policy.ledger import PendingTransferEntry
from fulcrum_router.router import Router
from fulcrum_router.settings import Tier, Timeouts

MAX_ATTEMPTS = 3
"""Instances tried for one leg."""

_REASONS = {
    PrefillProblem.INCOMPLETE_KV_TRANSFER_PARAMS: LocalPrefillReason.INCOMPLETE_KV_TRANSFER_PARAMS,
    PrefillProblem.WRONG_REMOTE_HOST: LocalPrefillReason.WRONG_REMOTE_HOST,
}
"""Problems that another prefill instance would have, too: the decode instance computes the prompt."""

_ROLE_BOTH = Role.BOTH  # an attribute of an enum is slow to read


class PrefillLeg:
    """The prompt of one request: all attempts to have it computed, and their result."""

    __slots__ = (
        "_client_request",
        "_entry",
        "_excluded",
        "_expired_before",
        "_received_after_s",
        "_router",
        "_timeouts",
        "kv_transfer_params",
        "local_prefill_reason",
        "predicted_ttft",
        "request_body",
        "source",
        "work",
    )

    def __init__(
        self,
        router: Router,
        client_request: ClientRequest,
        request_body: RequestBody,
        timeouts: Timeouts,
        tier: Tier,
        *,
        arrival_s: float,
    ) -> None:
        self._router, self._client_request, self.request_body = router, client_request, request_body
        self._timeouts = timeouts
        self._excluded: tuple[str, ...] = ()
        predicted_tokens = router.tokens_per_byte.predict_tokens(request_body.prompt_bytes)
        self.work = Work(
            request_body.prompt_id_count + predicted_tokens,
            tier.slo,
            deadline_s=arrival_s + tier.slo.ttft_s,
            tier=tier.name,
        )
        """The request; its prompt is an estimate until an engine has counted it."""
        self.source: Instance | None = None
        """Instance that computed the prompt last."""
        self.local_prefill_reason: LocalPrefillReason | None = None
        """Why the decode instance computes the prompt itself."""
        self.kv_transfer_params: bytes | None = None
        """JSON object for the decode leg."""
        self.predicted_ttft: PredictedTtft | None = None
        """Predicted when the prefill leg was sent; None without one."""
        self._entry: PendingTransferEntry | None = None
        self._received_after_s = 0.0
        self._expired_before: float | None = None

    async def compute_prompt(self) -> None:
        """Called in an inline task: let a prefill instance compute the prompt or set `local_prefill_reason`.

        Raises:
            EarlyResponse: if an engine rejects the request with a 4xx.
        """
        self.local_prefill_reason = self.request_body.local_prefill_reason
        self.source = None
        while self.local_prefill_reason is None:
            if len(self._excluded) >= MAX_ATTEMPTS:
                self.local_prefill_reason = LocalPrefillReason.PREFILL_FAILED
                return
            decision = self._choose(self._router.flip_rules)
            if type(decision) is FlipProposal:  # wait for the flip, then choose with or without it
                await run_in_asyncio_task(self._router.request_flip(decision))
                decision = self._choose(NO_FLIP_PROPOSALS)
            instance = self._dispatch(decision)
            if instance is None or instance.role is _ROLE_BOTH:
                return  # an instance with both roles prefills within its decode leg
            try:
                await self._compute_on(instance)
            except LegFailed as error:
                self._router.record_leg_failure(instance, PREFILL, error)
                self._router.counters.retries[PREFILL, error.failure] += 1
                self._excluded += (instance.name,)
                continue
            return

    def _choose(self, rules: FlipProposalRules) -> DispatchDecision:
        pairs = self._router.pairs
        return choose_prefill(
            self._router.fleet.candidates,
            self.work,
            now_s=time.monotonic(),
            rules=rules,
            exclude=self._excluded + pairs.broken_prefill_instances,
            delays=pairs.prefill_delays,
        )

    def _dispatch(self, decision: DispatchDecision) -> Instance | None:
        if type(decision) is Dispatch:
            self._router.counters.dispatches[PREFILL, decision.reason] += 1
            return self._router.fleet[decision.instance]
        reasons = LocalPrefillReason
        self.local_prefill_reason = reasons.PREFILL_FAILED if self._excluded else reasons.NO_PREFILL_INSTANCE
        if self._router.pairs.broken_prefill_instances:
            self.local_prefill_reason = reasons.KV_TRANSFER_BROKEN
        return None

    async def _compute_on(self, instance: Instance) -> None:
        pool, ledger, timeouts = instance.require_connection_pool(), instance.ledger, self._timeouts
        tokens = self.work.prompt_tokens
        sent_s, compute_s = time.monotonic(), instance.prefill_model.ttft_s(tokens)
        reserved = self._router.reserve_decode(instance, self.work, now_s=sent_s)
        entry = ledger.add_prefill(tokens=tokens, predicted_s=compute_s, now_s=sent_s)
        body = build_prefill_body(self.request_body, cache_salt=instance.cache_salt)
        self._expired_before = instance.expired_transfers  # before the lease begins, for a lease check
        try:
            status, content, head = await send_request(
                pool,
                self._client_request.build_leg_head(pool.address, len(body)),
                body,
                connect_timeout_s=timeouts.connect_s,
                response_timeout_s=timeouts.prefill_s,
            )
        finally:
            computed_for_s = entry.release(time.monotonic())
            if reserved is not None:  # the decode instance is chosen in the same turn of the event loop
                reserved[0].release()
        if status != 200:
            raise self._build_failure(instance, status, content, head)
        self._received_after_s, now_s = self._router.received_after_s, time.monotonic()
        cached_tokens = self._take_response(instance, content, pool.host)
        self._router.record_leg_success(instance, PREFILL)
        if reserved is not None:
            self.predicted_ttft = reserved[1]
            self._router.ttft_errors.learn_prefill_leg(reserved[1], measured_s=now_s - sent_s)
        instance.record_prefill(
            tokens=self.work.prompt_tokens, cached_tokens=cached_tokens, computed_for_s=computed_for_s
        )

    def _build_failure(
        self, instance: Instance, status: int, content: bytes, head: ResponseHead
    ) -> Exception:
        """Fail the leg after a 5xx; forward any other status, since the client's request caused it."""
        if status >= 500:
            return LegFailed(Failure.STATUS, f"the engine returned status {status}", status=status)
        self._router.record_leg_success(instance, PREFILL)
        chunked = head.length == CHUNKED
        response = (
            responses.build_response(status, content) if chunked else head.prepend_headers(b"") + content
        )
        return EarlyResponse(RequestOutcome.INVALID, response, keep_alive=head.length != UNTIL_CLOSE)

    def _take_response(self, instance: Instance, content: bytes, host: str) -> int:
        """Keep what decode needs; return the prompt tokens that the engine had in its prefix cache."""
        response = parse_prefill_response(content, host)
        if response.prompt_tokens is not None:
            counted = response.prompt_tokens - self.request_body.prompt_id_count
            self._router.tokens_per_byte.learn(prompt_bytes=self.request_body.prompt_bytes, tokens=counted)
            self.work = self.work.with_prompt_tokens(response.prompt_tokens)
        problem = response.problem
        if problem is not None:
            if problem is PrefillProblem.ABORTED:
                raise LegFailed(Failure.ABORTED, "the engine aborted the prefill")
            if problem not in _REASONS:
                raise LegFailed(Failure.NO_KV_TRANSFER_PARAMS, "the engine returned no kv_transfer_params")
            self.local_prefill_reason = _REASONS[problem]
        self.kv_transfer_params = response.kv_transfer_params
        self.source = instance
        if response.kv_transfer_params is not None:
            self._entry = instance.ledger.add_pending_transfer()
        return response.cached_tokens

    # --- the KV transfer -----------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether there are KV transfer parameters that are too old to be fetched in time."""
        source = self.source
        if self.kv_transfer_params is None or source is None:
            return False
        return time.monotonic() - self._received_after_s > max_usable_age_s(source.kv_lease_s)

    def start_transfer(self, decode: Instance) -> KvTransfer | None:
        """Create the KV transfer to this decode instance; None without KV transfer parameters."""
        source = self.source
        if self.kv_transfer_params is None or source is None:
            return None
        return KvTransfer.create(
            self._router.pairs,
            source,
            decode,
            tokens=self.work.prompt_tokens,
            received_after_s=self._received_after_s,
            expired_before=self._expired_before,
        )

    def record_miss_by(self, decode: Instance, reason: str) -> None:
        """Count a transfer that this decode instance did not use or did not respond to."""
        if self.source is not None:
            record_miss(self._router.pairs, self.source, decode, reason)

    def fall_back_to_local_prefill(self, reason: LocalPrefillReason) -> None:
        """Drop the KV transfer parameters: the decode instance computes the prompt."""
        self.release_transfer()
        self.local_prefill_reason = reason

    def discard_prefill(self, reason: LocalPrefillReason) -> None:
        """Also forget which instance computed the prompt, so that any instance may decode."""
        self.fall_back_to_local_prefill(reason)
        self.source = None

    def release_transfer(self) -> None:
        """End the pending transfer: the KV was fetched, or will not be."""
        if self._entry is not None:
            self._entry.release()
            self._entry = self.kv_transfer_params = None
