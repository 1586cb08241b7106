"""The prefill leg: one attempt to have the prompt computed, and to get the KV transfer parameters for decode.

KV transfer parameters are used once: after a fetch the engine frees the blocks, and a second fetch would get
another prompt's KV without an error.

From the response the router also learns: tokens per byte, the prefill time of the instance, and the error of
the TTFT prediction. `exchange` runs a leg for each attempt; the journey chooses the instance, and what
follows a failure.
"""

import time

from fulcrum_router.counters import PREFILL, RequestOutcome
from fulcrum_router.data_path.request import EarlyResponse, ServedRequest
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import (
    PrefillProblem,
    PrefillResponse,
    build_prefill_body,
    parse_prefill_response,
)
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, ResponseHead
from fulcrum_router.http1.prompt_size import has_only_text
from fulcrum_router.http1.sending import BufferedResponse, send_and_wait
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection
from fulcrum_router.policy.faults.blame import needs_another_engine
from fulcrum_router.policy.journey import Action, LocalPrefillReason, StopReason
from fulcrum_router.policy.whole_response import compute_deadline_s

_REASONS = {
    PrefillProblem.INCOMPLETE_KV_TRANSFER_PARAMS: LocalPrefillReason.INCOMPLETE_KV_TRANSFER_PARAMS,
    PrefillProblem.WRONG_REMOTE_HOST: LocalPrefillReason.WRONG_REMOTE_HOST,
}
"""Problems that another prefill instance would have, too: the decode instance computes the prompt."""


MAX_PREFILL_FACTOR = 10.0
"""Multiple of the time-out of a prefill leg up to which an engine that makes progress is waited for."""


class PrefillLegResponse(BufferedResponse):
    """The response of a prefill leg, which is waited for as long as its engine makes progress."""

    __slots__ = ("_connection", "_instance", "_timeout_s")

    def __init__(self, connection: EngineConnection, instance: Instance, timeout_s: float) -> None:
        BufferedResponse.__init__(self, retryable=True)
        self._connection, self._instance, self._timeout_s = connection, instance, timeout_s

    def extend_deadline(self, now_s: float) -> float:  # noqa: ARG002  # ResponseHandler's signature
        """See `ResponseHandler` and `policy.whole_response`."""
        return compute_deadline_s(
            sent_s=self._connection.sent_s,
            progress_at_s=self._instance.progress_at_s,
            first_byte_timeout_s=self._timeout_s,
            max_response_s=MAX_PREFILL_FACTOR * self._timeout_s,
        )


class PrefillLeg:
    """A `Leg` to a prefill instance. Nothing of its response goes to the client, except for a 4xx."""

    __slots__ = ("_instance", "_request")

    def __init__(self, request: ServedRequest, instance: Instance) -> None:
        self._request, self._instance = request, instance

    def pause(self) -> None:
        """See `Leg`."""

    def resume(self) -> None:
        """See `Leg`."""

    async def run(self) -> Action:
        """See `Leg`."""
        request, instance = self._request, self._instance
        router, journey = request.router, request.journey
        router.counters.dispatches[PREFILL, journey.dispatch_reason] += 1
        sent_s = time.monotonic()
        try:
            response = await self._send()
        except LegFailed as error:
            return self._fail(error)
        now_s = time.monotonic()
        request.legs.record_success(instance, PREFILL)
        if journey.predicted_ttft is not None:
            router.ttft_errors.learn_prefill_leg(journey.predicted_ttft, measured_s=now_s - sent_s)
        if response.prompt_tokens is not None and has_only_text(
            request.body.fields, prompt_bytes=request.body.prompt_bytes
        ):
            counted = response.prompt_tokens - request.body.prompt_id_count
            router.tokens_per_byte.learn(
                prompt_bytes=request.body.prompt_bytes, tokens=counted, tenant=request.client.caller.tenant
            )
        request.kv_transfer_params, request.counted_tokens = (
            response.kv_transfer_params,
            response.prompt_tokens,
        )
        request.received_after_s = router.received_after_s
        problem = response.problem
        action = journey.prefill_responded(
            now_s,
            lease_from_s=router.received_after_s,
            has_params=response.kv_transfer_params is not None,
            tokens=response.prompt_tokens,
            cached_tokens=response.cached_tokens,
            problem=None if problem is None else _REASONS[problem],
        )
        instance.record_prefill(
            tokens=journey.work.prompt_tokens,
            cached_tokens=response.cached_tokens,
            computed_for_s=journey.prefill_computed_for_s,
        )
        return action

    async def _send(self) -> PrefillResponse:
        """Send the leg and read its response.

        Raises:
            LegFailed: without a response that the journey can go on with.
            EarlyResponse: if the engine rejects the request.
        """
        request, instance = self._request, self._instance
        pool, timeouts = instance.require_connection_pool(), request.timeouts
        request.expired_before = instance.expired_transfers  # before the lease begins, for a lease check
        received = await send_and_wait(
            pool,
            self._expect_response,
            self._build_request,
            connect_timeout_s=timeouts.connect_s,
            head_timeout_s=timeouts.prefill_s,
            idle_timeout_s=0.0,
        )
        head = received.head
        assert head is not None
        if head.status != 200:
            self._reject(head.status, received.content, head)
        response = parse_prefill_response(received.content, pool.host)
        if (response.prompt_tokens or 0) > request.body.max_prompt_tokens:
            response.prompt_tokens = None
        problem = response.problem
        if problem is PrefillProblem.ABORTED:
            raise LegFailed(Failure.ABORTED, "the engine aborted the prefill")
        if problem is not None and problem not in _REASONS:
            raise LegFailed(Failure.NO_KV_TRANSFER_PARAMS, "the engine returned no kv_transfer_params")
        return response

    def _expect_response(self, connection: EngineConnection) -> PrefillLegResponse:
        return PrefillLegResponse(connection, self._instance, self._request.timeouts.prefill_s)

    def _build_request(self, pool: ConnectionPool) -> tuple[bytes, bytes]:
        request = self._request
        body = build_prefill_body(request.body, cache_salt=self._instance.cache_salt)
        return request.client.build_leg_head(pool.address, len(body)), body

    def _reject(self, status: int, content: bytes, head: ResponseHead) -> None:
        """Fail the leg after a 5xx or 429; forward any other status, since the client's request caused it."""
        if needs_another_engine(status):
            raise LegFailed(Failure.STATUS, f"the engine returned status {status}", status=status)
        legs = self._request.legs
        if legs.doubts_rejection(self._instance):
            raise LegFailed(Failure.STATUS, f"the engine returned status {status}", status=status)
        legs.record_rejection(self._instance, PREFILL)
        self._request.journey.prefill_rejected(time.monotonic())
        chunked = head.length == CHUNKED
        response = (
            responses.build_response(status, content) if chunked else head.prepend_headers(b"") + content
        )
        raise EarlyResponse(RequestOutcome.INVALID, response, keep_alive=head.length != UNTIL_CLOSE)

    def _fail(self, error: LegFailed) -> Action:
        router, journey, legs = self._request.router, self._request.journey, self._request.legs
        router.counters.retries[PREFILL, error.failure] += 1
        action = journey.prefill_failed(
            time.monotonic(), error.failure, status=error.status, started=error.may_have_started
        )
        # After the journey has read the error share.
        legs.record_failure(self._instance, PREFILL, error, fields=self._request.body.fields)
        if journey.stop_reason is StopReason.QUERY_OF_DEATH:
            self._request.failed = error
        return action
