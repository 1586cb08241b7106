"""The exchange: the router's work on one client request, from its last body byte to its last response byte.

It has the prompt computed (`prefill`), chooses a decode instance and forwards its response (`decode`). If
that instance fails before the first byte was sent to the client, the exchange tries another. `downstream`
starts and cancels the exchange.
"""

import asyncio
import time

import structlog

from fulcrum_core.api import conditions
from fulcrum_router.counters import DECODE, LocalPrefillReason, RequestOutcome
from fulcrum_router.data_path.decode import DecodeLeg, StreamBroken, check_kv_leases
from fulcrum_router.data_path.prefill import MAX_ATTEMPTS, PrefillLeg
from fulcrum_router.data_path.request import ClientRequest, Downstream, EarlyResponse
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import (
    RequestBody,
    build_decode_body,
    is_stream_without_usage,
    parse_request_body,
)
from fulcrum_router.http1.engine_events import count_output_tokens
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import UNTIL_CLOSE
from fulcrum_router.http1.inline_task import InlineTask, run_in_asyncio_task
from fulcrum_router.http1.json_limits import InvalidBody
from fulcrum_router.http1.output_limits import find_output_limit, is_stream
from fulcrum_router.http1.upstream import EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer, verify_transfer
from fulcrum_router.policy import (
    Dispatch,
    DispatchDecision,
    DispatchReason,
    FlipProposal,
    FlipProposalRules,
    NoInstance,
    choose_decode,
)
from fulcrum_router.policy.dispatch import NO_FLIP_PROPOSALS
from fulcrum_router.policy.ledger import DecodeEntry, PrefillEntry
from fulcrum_router.policy.whole_response import CONTEXT_TOKENS, compute_deadline_s
from fulcrum_router.router import Router, make_cache_salt
from fulcrum_router.settings import ServiceSettings

log = structlog.get_logger()

_PREFILLED_HERE = DispatchReason.PREFILLED_HERE  # an attribute of an enum is slow to read
_OK, _INVALID = RequestOutcome.OK, RequestOutcome.INVALID
_CANCELLED, _LEFT_LATE = RequestOutcome.CANCELLED, RequestOutcome.LEFT_LATE
_TIMEOUT_FAILURES = frozenset({Failure.TIMEOUT, Failure.TOO_LONG, Failure.UNREACHABLE, Failure.EJECTED})


class Exchange:
    """One client request in progress."""

    __slots__ = (
        "_adds_usage",
        "_client_request",
        "_decode_leg",
        "_downstream",
        "_excluded",
        "_first_byte_at_s",
        "_inline_task",
        "_keep_alive",
        "_lease_check",
        "_local_prefill_entry",
        "_must_recompute",
        "_paused_at_s",
        "_prefill_leg",
        "_router",
        "_tier",
        "_timeouts",
        "_unread_s",
        "arrival_s",
    )

    def __init__(
        self, router: Router, settings: ServiceSettings, downstream: Downstream, client_request: ClientRequest
    ) -> None:
        self.arrival_s = time.monotonic()
        """TTFT counts from here."""
        self._router, self._downstream, self._client_request = router, downstream, client_request
        self._tier, self._timeouts = settings.find_tier(client_request.tier), settings.timeouts
        self._keep_alive = client_request.keep_alive
        self._excluded: tuple[str, ...] = ()
        """Decode instances that failed."""
        self._must_recompute = False
        """Whether the decode instance must compute the prompt without any cached or transferred KV."""
        self._lease_check: asyncio.Task[None] | None = None
        self._local_prefill_entry: PrefillEntry | None = None
        self._decode_leg: DecodeLeg | None = None
        self._first_byte_at_s: float | None = None
        self._paused_at_s = self._unread_s = 0.0
        """Since when the client reads too slowly, and for how long it has since the first byte."""
        self._inline_task = InlineTask(self._run())

    def start(self) -> None:
        """Start the exchange. It may finish before this returns."""
        self._inline_task.resume()

    def cancel(self) -> None:
        """Abort both legs: the client has disconnected."""
        self._inline_task.cancel()

    def pause(self) -> None:
        """Stop reading from the engine: the client reads too slowly."""
        self._paused_at_s = time.monotonic()
        if self._decode_leg is not None and not self._decode_leg.connection_returned:
            self._decode_leg.connection.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self._first_byte_at_s is not None:
            self._unread_s += time.monotonic() - max(self._paused_at_s, self._first_byte_at_s)
        if self._decode_leg is not None and not self._decode_leg.connection_returned:
            self._decode_leg.connection.resume()

    async def _run(self) -> None:
        counters = self._router.counters
        counters.get_tier(self._tier.name).offered += 1
        outcome = _CANCELLED
        try:
            outcome = await self._serve()
        except EarlyResponse as end:
            outcome, self._keep_alive = end.outcome, self._keep_alive and end.keep_alive
            self._downstream.write(end.response)
        except StreamBroken as broken:
            outcome = self._end_broken_stream(broken)
        except asyncio.CancelledError:
            outcome, self._keep_alive = self._judge_departure(), False
        except Exception:
            log.exception("request failed because of an internal error")
            outcome, self._keep_alive = RequestOutcome.FAILED, False
            if self._first_byte_at_s is None:
                self._downstream.write(
                    responses.build_error_response(500, "internal error of the router", close=True)
                )
        finally:
            if self._lease_check is not None:
                self._lease_check.cancel()
            self._record_end(outcome)
            # The leg refers to this exchange: without this only a garbage collection would free both.
            self._decode_leg = None
            self._downstream.finish_response(keep_alive=self._keep_alive)

    def _record_end(self, outcome: RequestOutcome) -> None:
        """Count the request, and its latencies as far as the response shows them."""
        counters, leg, first_byte_at_s = self._router.counters, self._decode_leg, self._first_byte_at_s
        if leg is None or first_byte_at_s is None or not (leg.streaming or outcome is _OK):
            counters.record_request(self._tier, outcome)
        elif not leg.streaming:
            tokens = self._count_output_tokens(leg)
            counters.record_whole_response(
                self._tier, response_s=time.monotonic() - self.arrival_s, tokens=tokens
            )
        elif outcome is _OK:
            tokens = self._count_output_tokens(leg)
            took_s = time.monotonic() - first_byte_at_s - self._unread_s
            tpot_s = took_s / (tokens - 1) if tokens > 1 else None
            counters.record_request(
                self._tier, outcome, ttft_s=first_byte_at_s - self.arrival_s, tpot_s=tpot_s
            )
        else:
            counters.record_request(self._tier, outcome, ttft_s=first_byte_at_s - self.arrival_s)

    def _count_output_tokens(self, leg: DecodeLeg) -> int:
        """Count the output tokens of a complete response; return the mean number of one choice."""
        usage, body = leg.usage, self._prefill_leg.request_body
        if usage is not None:
            tokens = usage.completion_tokens
        else:  # an engine that reports no usage
            tokens = count_output_tokens(leg.events, chat=self._is_chat) if leg.streaming else 1
        self._router.counters.output_tokens += tokens
        return tokens if body.choices == 1 else tokens // body.choices

    def _judge_departure(self) -> RequestOutcome:
        """Return the outcome of a request whose client disconnected: whether it had missed the TTFT already.

        A whole response has no first byte before its last: it gets the time of the tokens that it asks for.
        """
        first_byte_at_s, fields = self._first_byte_at_s, self._prefill_leg.request_body.fields
        tokens = 1 if is_stream(fields) else find_output_limit(fields, chat=self._is_chat) or 1
        waited_s = (time.monotonic() if first_byte_at_s is None else first_byte_at_s) - self.arrival_s
        return _LEFT_LATE if waited_s > self._tier.slo.compute_response_limit_s(tokens) else _CANCELLED

    async def _serve(self) -> RequestOutcome:
        request = self._parse_body()
        # An HTTP/1.0 stream has no chunks: its usage could not be removed.
        self._adds_usage = self._client_request.http_version != b"1.0" and is_stream_without_usage(request)
        self._prefill_leg = prefill_leg = PrefillLeg(
            self._router,
            self._client_request,
            request,
            self._timeouts,
            self._tier,
            arrival_s=self.arrival_s,
        )
        failed: LegFailed | None = None
        try:
            for _ in range(MAX_ATTEMPTS):
                if prefill_leg.kv_transfer_params is None and not self._must_recompute:
                    await prefill_leg.compute_prompt()
                decision = self._choose_decode(self._router.flip_rules)
                if type(decision) is FlipProposal:  # wait for the flip, then choose with or without it
                    await run_in_asyncio_task(self._router.request_flip(decision))
                    decision = self._choose_decode(NO_FLIP_PROPOSALS)
                instance = self._dispatch(decision)
                if instance is None:
                    break
                try:
                    return await self._decode_on(instance)
                except LegFailed as error:
                    failed = error
                    if error.failure is Failure.TOO_LONG:  # it would take as long on another instance
                        self._router.record_leg_failure(instance, DECODE, error)
                        break
                    self._handle_decode_failure(instance, error)
            raise self._build_failure_response(failed)
        finally:
            prefill_leg.release_transfer()

    def _parse_body(self) -> RequestBody:
        try:
            return parse_request_body(self._client_request.body, self._tier.engine_priority)
        except InvalidBody as error:
            raise EarlyResponse(
                RequestOutcome.INVALID, responses.build_error_response(400, str(error))
            ) from None

    # --- decode --------------------------------------------------------------------------------

    def _choose_decode(self, rules: FlipProposalRules) -> DispatchDecision:
        source = self._prefill_leg.source
        return choose_decode(
            self._router.fleet.candidates,
            self._prefill_leg.work,
            now_s=time.monotonic(),
            prefilled_on=source,
            rules=rules,
            exclude=self._excluded,
            pairs=None if source is None else self._router.pairs.list_from(source.name),
        )

    def _dispatch(self, decision: DispatchDecision) -> Instance | None:
        prefill_leg = self._prefill_leg
        if type(decision) is NoInstance and prefill_leg.source is not None:
            prefill_leg.discard_prefill(LocalPrefillReason.UNREADABLE_KV)
            decision = self._choose_decode(NO_FLIP_PROPOSALS)
        if type(decision) is not Dispatch:
            return None
        self._router.counters.dispatches[DECODE, decision.reason] += 1
        instance = self._router.fleet[decision.instance]
        if decision.reason is _PREFILLED_HERE:
            prefill_leg.release_transfer()  # the KV is in the prefix cache of this instance
        elif prefill_leg.is_stale:
            prefill_leg.record_miss_by(instance, conditions.LEASE_EXPIRED)
            prefill_leg.fall_back_to_local_prefill(LocalPrefillReason.STALE_KV_TRANSFER)
        return instance

    async def _decode_on(self, instance: Instance) -> RequestOutcome:
        """Send the decode leg to one instance and forward its response.

        Raises:
            LegFailed: if it fails before the first byte was sent to the client.
            StreamBroken: if it fails later.
        """
        prefill_leg, timeouts = self._prefill_leg, self._timeouts
        pool, transfer = instance.require_connection_pool(), prefill_leg.start_transfer(instance)
        # After an expired lease: a salt that no other request has, so that the engine reuses no cached KV.
        cache_salt = None if self._must_recompute else instance.cache_salt
        body = build_decode_body(
            prefill_leg.request_body,
            prefill_leg.kv_transfer_params,
            include_usage=self._adds_usage,
            cache_salt=make_cache_salt() if cache_salt is None else cache_salt,
        )
        head = self._client_request.build_leg_head(pool.address, len(body))
        fulcrum_headers = self._build_fulcrum_headers(instance)
        entry = instance.ledger.add_decode(tokens=prefill_leg.work.prompt_tokens)
        self._count_local_prefill(instance)
        try:
            connection = pool.take_idle()
            if connection is None:
                connection = await pool.open(timeouts.connect_s)
            while True:
                leg = self._start_leg(connection, entry, fulcrum_headers, instance, cache_salt, transfer)
                first_byte_s, idle_s = timeouts.first_byte_s, timeouts.idle_s
                connection.send(leg, head, body, first_byte_timeout_s=first_byte_s, idle_timeout_s=idle_s)
                try:
                    await leg
                except LegFailed:
                    if not connection.lost_reuse_race:
                        raise
                    # The engine closed its idle connection: not a failure. A fresh one cannot lose this race,
                    # so the loop runs at most twice.
                    connection = await pool.open(timeouts.connect_s)
                    continue
                except asyncio.CancelledError:
                    if not leg.connection_returned:
                        connection.abort()
                    # A client that disconnects after `[DONE]` has its whole response.
                    if not leg.sent_last_event:
                        raise
                return self._finish_decode(instance, leg)
        except StreamBroken as broken:
            self._router.record_leg_failure(instance, DECODE, LegFailed(broken.failure, broken.detail))
            raise
        finally:
            # Also when cancelled: the engine may still fetch the KV of a transfer that no leg waits for.
            entry.release()
            if self._local_prefill_entry is not None:
                self._local_prefill_entry.release(time.monotonic())
            if transfer is not None:
                self._end_transfer(instance, transfer, cache_salt)

    def _end_transfer(self, instance: Instance, transfer: KvTransfer, cache_salt: str | None) -> None:
        """Stop waiting for the transfer; rotate the cache salt if its KV may still be fetched too late."""
        instance.incoming_transfers.discard(transfer)
        # The first byte shows that the KV was fetched. Without it the engine may still fetch and cache it.
        if self._first_byte_at_s is None and transfer.may_be_late:
            self._router.rotate_cache_salt(instance, cache_salt)

    def _start_leg(
        self,
        connection: EngineConnection,
        entry: DecodeEntry,
        fulcrum_headers: bytes,
        instance: Instance,
        cache_salt: str | None,
        transfer: KvTransfer | None,
    ) -> DecodeLeg:
        """Create the decode leg for one connection, and record its transfer as pending."""
        leg = self._decode_leg = DecodeLeg(
            connection,
            self._downstream,
            entry=entry,
            fulcrum_headers=fulcrum_headers,
            instance=instance,
            cache_salt=cache_salt,
            on_first_byte=self._record_first_byte,
            on_late_response=self._start_lease_check,
            on_silence=self._extend_deadline,
            transfer=transfer,
            strips_usage=self._adds_usage,
        )
        if transfer is not None:
            transfer.sent_s = leg.sent_s
            instance.incoming_transfers.add(transfer)
        return leg

    def _extend_deadline(self, leg: DecodeLeg, now_s: float) -> float:
        """Wait for a whole response as long as its engine makes progress; see `policy.whole_response`."""
        fields, first_byte_s = self._prefill_leg.request_body.fields, self._timeouts.first_byte_s
        if is_stream(fields):
            return now_s
        limit = find_output_limit(fields, chat=self._is_chat)
        tokens = max(0, CONTEXT_TOKENS - self._prefill_leg.work.prompt_tokens) if limit is None else limit
        tokens *= self._prefill_leg.request_body.choices
        progress_at_s = leg.instance.progress_at_s
        deadline_s = compute_deadline_s(
            sent_s=leg.sent_s,
            progress_at_s=progress_at_s,
            first_byte_timeout_s=first_byte_s,
            max_output_tokens=tokens,
        )
        if deadline_s <= now_s < progress_at_s + first_byte_s:
            leg.fail_too_long()
        return deadline_s

    @property
    def _is_chat(self) -> bool:
        return self._client_request.path.endswith(b"/chat/completions")

    def _count_local_prefill(self, instance: Instance) -> None:
        """Add a prompt that the decode instance computes to its ledger, until the first byte."""
        leg = self._prefill_leg
        if leg.source is None or leg.local_prefill_reason is not None:
            tokens = leg.work.prompt_tokens
            self._local_prefill_entry = instance.ledger.add_local_prefill(
                tokens=tokens,
                predicted_s=instance.prefill_model.ttft_s(tokens),
                now_s=time.monotonic(),
            )

    def _start_lease_check(self) -> None:
        """Query the source instances for expired transfers; the leg withholds its response until then."""
        if self._decode_leg is not None:
            self._lease_check = asyncio.get_running_loop().create_task(check_kv_leases(self._decode_leg))

    def _finish_decode(self, instance: Instance, leg: DecodeLeg) -> RequestOutcome:
        counters, head, local = self._router.counters, leg.head, self._prefill_leg.local_prefill_reason
        assert head is not None
        self._router.record_leg_success(instance, DECODE)
        if leg.transfer is not None and head.status == 200:
            leg.transfer.usage = leg.usage
            time_to_first_byte_s = leg.first_byte_at_s - leg.sent_s if leg.streaming else None
            verify_transfer(leg.transfer, time_to_first_byte_s=time_to_first_byte_s)
        if local is not None:
            counters.local_prefills[local] += 1
        if head.length == UNTIL_CLOSE:
            self._keep_alive = False
        return _INVALID if head.status >= 400 else _OK

    def _record_first_byte(self, now_s: float) -> None:
        """Record that the first byte is sent to the client: the KV was fetched and the prompt computed."""
        self._first_byte_at_s = now_s
        predicted, leg = self._prefill_leg.predicted_ttft, self._decode_leg
        if predicted is not None and leg is not None and leg.streaming:
            self._router.ttft_errors.learn_first_token(
                predicted, decode_leg_s=now_s - leg.sent_s, ttft_s=now_s - self.arrival_s
            )
        self._downstream.release_body()
        self._prefill_leg.request_body.forget_prompt()
        self._prefill_leg.release_transfer()
        if self._local_prefill_entry is not None:
            self._local_prefill_entry.release(now_s)  # releasing again later has no effect

    def _handle_decode_failure(self, instance: Instance, error: LegFailed) -> None:
        self._router.record_leg_failure(instance, DECODE, error)
        self._router.counters.retries[DECODE, error.failure] += 1
        prefill_leg, leg, self._decode_leg = self._prefill_leg, self._decode_leg, None
        if error.failure is Failure.LEASE_EXPIRED and leg is not None:
            self._router.rotate_cache_salt(instance, leg.cache_salt)
            if leg.transfer is not None and leg.transfer.is_late:
                prefill_leg.record_miss_by(instance, conditions.LEASE_EXPIRED)
            prefill_leg.discard_prefill(LocalPrefillReason.LEASE_EXPIRED)
            self._must_recompute = True
            return
        self._excluded += (instance.name,)
        # An engine that cannot fetch the KV returns 5xx: counted against the pair.
        if error.failure is Failure.STATUS and prefill_leg.kv_transfer_params is not None:
            prefill_leg.record_miss_by(instance, conditions.RECOMPUTED)
        if error.may_have_started:  # KV transfer parameters are used once
            prefill_leg.release_transfer()

    # --- headers and errors for the client -----------------------------------------------------

    def _build_fulcrum_headers(self, decode: Instance) -> bytes:
        """The router's header lines: the instances that served the request, and the local prefill reason."""
        source, local = self._prefill_leg.source, self._prefill_leg.local_prefill_reason
        lines = decode.decode_header if source is None else source.prefill_header + decode.decode_header
        if local is not None:
            lines += b"x-fulcrum-local-prefill: %b\r\n" % local.encode()
        return lines if self._keep_alive else lines + b"connection: close\r\n"

    def _build_failure_response(self, failed: LegFailed | None) -> EarlyResponse:
        """Build the error for a request that no decode instance could serve."""
        if failed is None or failed.status == 503:
            message = "no decode instance is available" if failed is None else failed.detail
            status = 503
        else:
            message = f"no decode instance responded: {failed.detail}"
            status = 504 if failed.failure in _TIMEOUT_FAILURES else 502
        return EarlyResponse(
            RequestOutcome.FAILED, responses.build_error_response(status, message, close=not self._keep_alive)
        )

    def _end_broken_stream(self, broken: StreamBroken) -> RequestOutcome:
        """Send an error event if one can be inserted, and close the connection without a regular end."""
        leg = self._decode_leg
        self._keep_alive = False
        if leg is not None:
            last = leg.build_stream_error(f"the engine failed during the stream: {broken.detail}")
            if last:
                self._downstream.write(last)
        return RequestOutcome.BROKEN
