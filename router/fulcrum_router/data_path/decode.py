"""The decode leg: one attempt to have the output generated and forwarded to the client.

`DecodeResponse` forwards the bytes. This module sends the request, adds the leg's KV transfer to the incoming
transfers of the instance, verifies the transfer when the response is complete, and reports the end of the leg
to the journey. If the engine may still fetch the KV too late, it rotates the cache salt of the instance.
`exchange` runs a leg for each attempt, and the journey decides about the next one.
"""

import asyncio
import time

from fulcrum_router.counters import DECODE, ContinuationOutcome, RequestOutcome
from fulcrum_router.data_path.continuation import Continuation
from fulcrum_router.data_path.decode_response import DecodeResponse, ResponseState
from fulcrum_router.data_path.degraded_response import DegradedResponse
from fulcrum_router.data_path.lease_check import check_kv_leases
from fulcrum_router.data_path.request import ServedRequest
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import build_decode_body
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE
from fulcrum_router.http1.output_limits import (
    estimate_streamed_tokens,
    find_output_limit,
    find_tokens_per_event,
    is_stream,
)
from fulcrum_router.http1.remote_media import has_remote_media
from fulcrum_router.http1.sending import send_and_wait
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer, verify_transfer
from fulcrum_router.policy.journey import Action
from fulcrum_router.policy.predictions.prompt_limit import ASSUMED_CONTEXT_TOKENS
from fulcrum_router.policy.whole_response import compute_deadline_s, compute_max_response_s
from fulcrum_router.router import make_cache_salt

# An attribute of an enum is slow to read.
_OK, _INVALID, _BROKEN = RequestOutcome.OK, RequestOutcome.INVALID, RequestOutcome.BROKEN
_CONTINUED, _SENDING = ContinuationOutcome.CONTINUED, ResponseState.SENDING


class DecodeLeg:
    """A `Leg` to a decode instance."""

    __slots__ = (
        "_cache_salt",
        "_instance",
        "_lease_check",
        "_request",
        "_tokens_per_event",
        "_transfer",
        "response",
    )

    def __init__(self, request: ServedRequest, instance: Instance) -> None:
        self._request, self._instance = request, instance
        # After an expired lease: a salt that no other request has, so that the engine reuses no cached KV.
        self._cache_salt = None if request.journey.must_recompute else instance.cache_salt
        self._transfer = self._create_transfer()
        self._tokens_per_event = find_tokens_per_event(request.body.fields)
        self._lease_check: asyncio.Task[None] | None = None
        self.response: DecodeResponse | None = None
        """The response on the last connection that was tried."""

    def _create_transfer(self) -> KvTransfer | None:
        """Create the KV transfer of the leg; None if the decode instance computes the prompt."""
        request, journey = self._request, self._request.journey
        source = journey.source
        if source is None or not journey.has_kv:
            return None
        return KvTransfer(
            request.router.pairs,
            source,
            self._instance,
            tokens=journey.work.prompt_tokens,
            counted_tokens=request.counted_tokens,
            received_after_s=request.received_after_s,
            decode_was_idle=journey.decode_was_idle,
            expired_before=request.expired_before,
        )

    def pause(self) -> None:
        """See `Leg`."""
        if self.response is not None:
            self.response.pause()

    def resume(self) -> None:
        """See `Leg`."""
        if self.response is not None:
            self.response.resume()

    async def run(self) -> Action:
        """See `Leg`."""
        request, timeouts = self._request, self._request.timeouts
        request.router.counters.dispatches[DECODE, request.journey.dispatch_reason] += 1
        failed: LegFailed | None = None
        try:
            pool = self._instance.require_connection_pool()
            await send_and_wait(
                pool,
                self._expect_response,
                self._build_request,
                connect_timeout_s=timeouts.connect_s,
                head_timeout_s=timeouts.first_byte_s,
                idle_timeout_s=timeouts.idle_s,
            )
        except LegFailed as error:
            failed = error
        except asyncio.CancelledError:
            # A client that disconnects after `[DONE]` has its whole response.
            if self.response is None or not self.response.sent_last_event:
                raise
        finally:
            # Also when cancelled: the engine may still fetch the KV of a transfer that no leg waits for.
            if self._transfer is not None:
                self._end_transfer(self._transfer)
            if self._lease_check is not None:
                self._lease_check.cancel()
            if self.response is not None:
                self.response.forget_observer()
        if failed is None:
            return self._finish()
        return self._fail(failed, await self._continue_stream(failed))

    def _build_request(self, pool: ConnectionPool) -> tuple[bytes, bytes]:
        body = self._build_body()
        return self._request.client.build_leg_head(pool.address, len(body)), body

    def _build_body(self) -> bytes:
        request, salt = self._request, self._cache_salt
        if salt is None or (self._transfer is not None and has_remote_media(request.body.fields)):
            salt = make_cache_salt()  # no other request reads what the engine caches
        return build_decode_body(
            request.body,
            request.kv_transfer_params if self._transfer is not None else None,
            include_usage=request.adds_usage,
            cache_salt=salt,
        )

    def _expect_response(self, connection: EngineConnection) -> DecodeResponse:
        """Create the response on this connection, and add the leg's transfer to the incoming ones."""
        request, instance, transfer = self._request, self._instance, self._transfer
        entry, cache_salt = request.journey.decode_entry, self._cache_salt
        strips_usage, counts_events = request.adds_usage, self._tokens_per_event == 1
        fulcrum_headers = self._build_fulcrum_headers()
        limit = request.journey.output_limit
        kind = DecodeResponse if limit is None else DegradedResponse
        self.response = response = kind(  # by position: with names it takes twice as long
            connection,
            request.downstream,
            self,
            entry,
            fulcrum_headers,
            instance,
            cache_salt,
            transfer,
            strips_usage,
            counts_events,
        )
        if isinstance(response, DegradedResponse) and limit is not None:
            response.output_limit = limit
        if transfer is not None:
            transfer.sent_s = response.sent_s
            instance.incoming_transfers.add(transfer)
        return response

    def _build_fulcrum_headers(self) -> bytes:
        """The router's header lines: the instances that served the request, and the local prefill reason."""
        journey, lines = self._request.journey, self._instance.decode_header
        if journey.source is not None:
            lines = journey.source.prefill_header + lines
        if journey.local_prefill_reason is not None:
            lines += b"x-fulcrum-local-prefill: %b\r\n" % journey.local_prefill_reason.encode()
        if journey.output_limit is not None:
            lines += b"x-fulcrum-degraded: max_tokens=%d\r\n" % journey.output_limit
        return lines if self._request.keep_alive else lines + b"connection: close\r\n"

    # --- ResponseObserver --------------------------------------------------------------------------

    def record_first_byte(self, now_s: float) -> None:
        """Record the first byte of this leg: the KV was fetched and the prompt computed.

        Releases the request body, which no leg can need again. At the first byte of the request, begins to
        keep the stream for a continuation and learns the error of the TTFT prediction; at a later one, counts
        a continued stream.
        """
        request, response = self._request, self.response
        if request.first_byte_at_s is not None:
            request.router.counters.continuations[_CONTINUED] += 1
            self._release_body(now_s)
            if request.continuation is not None:
                request.continuation.release_body()
            return
        request.first_byte_at_s = now_s
        if self._transfer is not None:
            request.times.fetching_share = self._instance.wait_causes.fetching_share
        if response is not None and response.streaming and response.head is not None:
            request.begin_stream(chunked=response.head.length == CHUNKED)
        predicted = request.journey.predicted_ttft
        if predicted is not None and response is not None and response.streaming:
            request.router.ttft_errors.learn_first_token(
                predicted, decode_leg_s=now_s - response.sent_s, ttft_s=now_s - request.arrival_s
            )
        self._release_body(now_s)

    def _release_body(self, now_s: float) -> None:
        request, response = self._request, self.response
        request.downstream.release_body()
        request.body.forget_prompt()
        request.journey.first_byte(now_s, is_streamed=response is not None and response.streaming)

    @property
    def continuation(self) -> Continuation | None:
        """See `ResponseObserver`."""
        return self._request.continuation

    def doubts_rejection(self) -> bool:
        """See `LegOutcomes.doubts_rejection`."""
        return self._request.legs.doubts_rejection(self._instance)

    def start_lease_check(self) -> None:
        """Query the source instances for expired transfers; the response is withheld until then."""
        if self.response is not None:
            self._lease_check = asyncio.get_running_loop().create_task(check_kv_leases(self.response))

    @property
    def max_response_s(self) -> float:
        """See `ResponseObserver`; `policy.whole_response` computes it."""
        return compute_max_response_s(
            first_byte_timeout_s=self._request.timeouts.first_byte_s, max_output_tokens=self.max_output_tokens
        )

    @property
    def max_output_tokens(self) -> int:
        """Output tokens that the response may have, of all choices."""
        request, body = self._request, self._request.body
        limit = find_output_limit(body.fields, chat=request.is_chat)
        if limit is None:
            limit = max(0, ASSUMED_CONTEXT_TOKENS - request.journey.work.prompt_tokens)
        return limit * body.choices

    def count_tokens(self, events: int) -> int:
        """See `ResponseObserver`."""
        response = self.response
        if response is None or response.entry is None:
            return events
        tokens = estimate_streamed_tokens(
            response.events, tokens_per_event=self._tokens_per_event, most=self.max_output_tokens
        )
        return max(0, tokens - response.entry.output_tokens)

    def extend_deadline(self, now_s: float) -> float:
        """Return until when to wait for a whole response: as long as its engine makes progress.

        See `policy.whole_response`. Returns `now_s` for a stream, which is not waited for any longer.
        """
        request, response = self._request, self.response
        first_byte_s = request.timeouts.first_byte_s
        if response is None or is_stream(request.body.fields):
            return now_s
        progress_at_s = self._instance.progress_at_s
        deadline_s = compute_deadline_s(
            sent_s=response.sent_s,
            progress_at_s=progress_at_s,
            first_byte_timeout_s=first_byte_s,
            max_response_s=self.max_response_s,
        )
        if deadline_s <= now_s < progress_at_s + first_byte_s:
            response.fail_too_long()
        return deadline_s

    # --- the end -------------------------------------------------------------------------------------

    @property
    def _is_sending(self) -> bool:
        """Whether the client has a byte of this leg."""
        return self.response is not None and self.response.state is _SENDING

    def _end_transfer(self, transfer: KvTransfer) -> None:
        """Stop waiting for the transfer; rotate the cache salt if its KV may still be fetched too late."""
        self._instance.incoming_transfers.discard(transfer)
        # Its first byte shows that the KV was fetched. Without it the engine may still fetch and cache it.
        if not self._is_sending and transfer.may_be_late:
            self._request.router.rotate_cache_salt(self._instance, self._cache_salt)

    def _finish(self) -> Action:
        request, response, transfer = self._request, self.response, self._transfer
        router, journey = request.router, request.journey
        assert response is not None
        head = response.head
        assert head is not None
        if head.status < 400:
            request.legs.record_success(self._instance, DECODE)
        else:
            request.legs.record_rejection(self._instance, DECODE)
        if transfer is not None and head.status == 200:
            transfer.usage = response.usage
            time_to_first_byte_s = response.first_byte_at_s - response.sent_s if response.streaming else None
            if time_to_first_byte_s is not None:
                router.counters.kv_transfers.observe(time_to_first_byte_s)
            verify_transfer(transfer, time_to_first_byte_s=time_to_first_byte_s)
        if journey.local_prefill_reason is not None:
            router.counters.local_prefills[journey.local_prefill_reason] += 1
        if head.length == UNTIL_CLOSE:
            request.keep_alive = False
        request.outcome = _OK
        if head.status >= 400 or response.error_status:
            request.outcome = _BROKEN if response.broke_off else _INVALID
        if request.outcome is _INVALID:
            return journey.decode_rejected(time.monotonic())
        prompt_tokens, output_tokens = request.body.find_counts(response.usage)
        return journey.decode_ended(
            time.monotonic(), prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )

    async def _continue_stream(self, error: LegFailed) -> int | None:
        """See `ServedRequest.continue_stream`; None also for a leg that has sent nothing to the client."""
        request = self._request
        if self.response is None or not self._is_sending or self.response.is_mid_chunk:
            return None
        try:
            return await request.continue_stream()
        except asyncio.CancelledError:  # the client has left meanwhile
            request.legs.record_failure(self._instance, DECODE, error, fields=request.body.fields)
            raise

    def _fail(self, error: LegFailed, delivered_tokens: int | None) -> Action:
        request, router = self._request, self._request.router
        is_late = False
        if error.failure is Failure.LEASE_EXPIRED:
            router.rotate_cache_salt(self._instance, self._cache_salt)
            is_late = self._transfer is not None and self._transfer.is_late
        request.failed = error
        if not self._is_sending and error.failure is not Failure.TOO_LONG:
            router.counters.retries[DECODE, error.failure] += 1
        action = request.journey.decode_failed(
            time.monotonic(),
            error.failure,
            status=error.status,
            started=error.may_have_started,
            kv_late=is_late,
            delivered_tokens=delivered_tokens,
        )
        # After the journey has read the error share.
        request.legs.record_failure(self._instance, DECODE, error, fields=request.body.fields)
        return action
