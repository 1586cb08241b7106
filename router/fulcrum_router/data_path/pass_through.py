"""Requests that one engine answers alone: embeddings, scores, tokens, and APIs without KV transfer.

The response is forwarded as it comes. A request that generates tokens has a journey like a completion without
a prefill leg: it may wait or be refused, its tokens count, and it is retried like one. Any other goes to the
serving instance with the fewest legs in flight; before the first byte a failure moves it to another one,
once. The limits on bodies and the fields that clients may not set are those of completions. Both kinds are
counted by path and outcome, and neither for the SLO attainment of a tier. `downstream` starts it; completions
with a KV transfer are `exchange`'s.
"""

import asyncio
import time

import structlog

from fulcrum_router.counters import DECODE, RequestOutcome
from fulcrum_router.data_path.journey_steps import build_failure_response, wait_for_flip, wait_in_room
from fulcrum_router.data_path.leg_outcomes import LegOutcomes
from fulcrum_router.data_path.passed_paths import GENERATION_PATHS
from fulcrum_router.data_path.request import (
    ClientRequest,
    Downstream,
    EarlyResponse,
    find_error_status,
    read_long_body,
)
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import RequestBody, build_decode_body, parse_request_body
from fulcrum_router.http1.engine_events import EVENT_AND_CHUNK_END
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, ResponseHead
from fulcrum_router.http1.inline_task import Completion, InlineTask
from fulcrum_router.http1.json_limits import InvalidBody
from fulcrum_router.http1.output_limits import find_passed_limit
from fulcrum_router.http1.passed_usage import PassedUsage
from fulcrum_router.http1.prompt_size import measure_conversation
from fulcrum_router.http1.sending import send_and_wait
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection
from fulcrum_router.policy import Work
from fulcrum_router.policy.faults.blame import is_ambiguous, needs_another_engine
from fulcrum_router.policy.journey import Action, Journey, LocalPrefillReason, StopReason
from fulcrum_router.policy.journey.machine import DEATHS, MIN_SUSPICIONS
from fulcrum_router.policy.predictions.prompt_limit import ASSUMED_CONTEXT_TOKENS
from fulcrum_router.policy.whole_response import compute_deadline_s, compute_max_response_s
from fulcrum_router.router import Router
from fulcrum_router.settings import ServiceSettings

log = structlog.get_logger()

_INVALID = RequestOutcome.INVALID  # an attribute of an enum is slow to read
MAX_ATTEMPTS = 2
MAX_POOLING_S = 3_600.0
"""Longest time for the response of a request that generates no tokens, from an engine that makes progress."""


class StreamBroken(Exception):
    """The engine failed after the first byte was sent to the client."""

    def __init__(self, failed: LegFailed) -> None:
        super().__init__(failed.detail)
        self.failed = failed


class PassThroughLeg(Completion[None]):
    """One attempt: forwards the response of one instance; completes with its end."""

    __slots__ = (
        "_first_byte_timeout_s",
        "_last_bytes",
        "_max_response_s",
        "_on_first_byte",
        "committed",
        "connection",
        "head",
        "instance",
    )

    def __init__(
        self, connection: EngineConnection, instance: Instance, exchange: "PassThrough", *, timeout_s: float
    ) -> None:
        Completion.__init__(self)
        self.connection, self.instance = connection, instance
        self._max_response_s = exchange.max_response_s
        self._on_first_byte, self._first_byte_timeout_s = exchange.write_response, timeout_s
        self.head: ResponseHead | None = None
        self.committed = False
        """Whether the first byte was sent to the client: no other instance can take over."""
        self._last_bytes = b""
        """End of what was sent to the client; empty: it is not the end of a chunk."""

    @property
    def retryable(self) -> bool:
        """See `ResponseHandler`."""
        return not self.committed

    def on_head(self, head: ResponseHead) -> None:
        self.head = head
        if needs_another_engine(head.status):
            self.connection.abort()
            self._fail_with_status(head.status)
        else:
            self.connection.end_s = self.connection.sent_s + self._max_response_s

    def _fail_with_status(self, status: int) -> None:
        self.set_exception(LegFailed(Failure.STATUS, f"the engine returned status {status}", status=status))

    def on_body(self, data: bytes, boundary: int) -> None:
        if not self.done:
            end = len(EVENT_AND_CHUNK_END)
            self._last_bytes = (self._last_bytes + data[-end:])[-end:] if boundary == len(data) else b""
            self._forward(data)

    @property
    def can_take_event(self) -> bool:
        """Whether one more event can follow what was sent to the client."""
        head = self.head
        is_stream = head is not None and head.is_event_stream and head.length == CHUNKED
        return is_stream and self._last_bytes == EVENT_AND_CHUNK_END

    def _forward(self, data: bytes) -> None:
        assert self.head is not None
        self._on_first_byte(self, data)

    def on_end(self) -> None:
        if self.done:
            return
        if not self.committed:
            self._forward(b"")
        self.set_result(None)

    def on_complete_response(self, head: ResponseHead, content: bytes) -> None:
        self.head = head
        if needs_another_engine(head.status):
            self._fail_with_status(head.status)
            return
        self._forward(content)
        self.set_result(None)

    def on_failure(self, failure: Failure, detail: str) -> None:
        failed = LegFailed(failure, detail)
        self.set_exception(StreamBroken(failed) if self.committed else failed)

    def extend_deadline(self, now_s: float) -> float:
        """Wait on while the engine makes progress; see `policy.whole_response`."""
        if self.committed:
            return now_s
        return compute_deadline_s(
            sent_s=self.connection.sent_s,
            progress_at_s=self.instance.progress_at_s,
            first_byte_timeout_s=self._first_byte_timeout_s,
            max_response_s=self._max_response_s,
        )


class PassThrough:
    """One client request in progress; used as an `Exchange` is."""

    __slots__ = (
        "_arrival_s",
        "_body",
        "_client_request",
        "_downstream",
        "_first_leg_s",
        "_inline_task",
        "_journey",
        "_keep_alive",
        "_leg",
        "_legs",
        "_router",
        "_settings",
        "_suspicions",
        "_trace",
        "_usage",
    )

    def __init__(
        self, router: Router, settings: ServiceSettings, downstream: Downstream, client_request: ClientRequest
    ) -> None:
        self._router, self._settings, self._arrival_s = router, settings, time.monotonic()
        self._downstream, self._client_request = downstream, client_request
        self._keep_alive = client_request.keep_alive
        self._leg: PassThroughLeg | None = None
        self._legs = LegOutcomes(router)
        self._suspicions = 0
        """Engines that died or answered 5xx after they were sent the request."""
        self._body: RequestBody | None = None
        self._journey: Journey[Instance] | None = None
        """Journey of a request that generates tokens; None for other requests."""
        self._usage: PassedUsage | None = None
        """Reads the usage of its response; None until the first byte."""
        self._first_leg_s = 0.0
        """When the first leg was sent; 0: none was. Known only if the request is traced."""
        tracer, headers = router.tracer, client_request.trace_headers
        self._trace = None if tracer is None else tracer.begin(headers, self._arrival_s)
        self._inline_task = InlineTask(self._run())

    def start(self) -> None:
        """Start the request. It may finish before this returns."""
        self._inline_task.resume()

    def cancel(self) -> None:
        """Abort the leg: the client has disconnected."""
        self._inline_task.cancel()

    def pause(self) -> None:
        """Stop reading from the engine: the client reads too slowly."""
        if self._leg is not None and not self._leg.done:
            self._leg.connection.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self._leg is not None and not self._leg.done:
            self._leg.connection.resume()

    async def _run(self) -> None:
        outcome = RequestOutcome.FAILED
        try:
            outcome = await self._serve()
        except InvalidBody as error:
            outcome = RequestOutcome.INVALID
            self._downstream.write(responses.build_error_response(400, str(error)))
        except LegFailed as failed:
            self._write_failure(failed)
        except EarlyResponse as end:
            outcome = end.outcome
            self._downstream.write(end.response)
        except StreamBroken as broken:
            outcome, self._keep_alive = RequestOutcome.BROKEN, False
            self._write_error_event(broken.failed)
        except asyncio.CancelledError:
            outcome, self._keep_alive = RequestOutcome.CANCELLED, False
        except Exception:
            log.exception("request failed because of an internal error")
            self._keep_alive = False
            if self._leg is None or not self._leg.committed:
                self._downstream.write(
                    responses.build_error_response(500, "internal error of the router", close=True)
                )
        finally:
            if self._journey is not None:
                self._journey.client_left(time.monotonic())  # without effect at the end of a journey
            self._leg = None
            self._legs.close()
            self._router.counters.passed_through[self._client_request.path.decode(), outcome] += 1
            self._end_trace(outcome)
            if self._router.access_log.share and self._router.access_log.takes_next():
                self._log_access(outcome)
            self._downstream.finish_response(keep_alive=self._keep_alive)

    async def _serve(self) -> RequestOutcome:
        client, priority = self._client_request, self._client_request.caller.tier.engine_priority
        if client.is_long:
            request = await read_long_body(client.body, priority, self._router.long_turns, passed=True)
        else:
            request = parse_request_body(client.body, priority, passed=True)
        self._body = request
        if self._client_request.path in GENERATION_PATHS:
            return await self._generate(request)
        failed = LegFailed(Failure.REFUSED, "no instance is available", status=503)
        excluded: set[str] = set()
        budget = self._router.journeys.retry_budget
        budget.record_request(time.monotonic())
        while len(excluded) < MAX_ATTEMPTS and self._suspicions < MIN_SUSPICIONS:
            instance = self._choose(excluded)
            if instance is None:
                break
            if excluded and not self._suspicions and not budget.take_retry(time.monotonic()):
                self._router.counters.stopped_requests[StopReason.RETRY_BUDGET] += 1
                break
            excluded.add(instance.name)
            entry = instance.ledger.add_decode(tokens=0)  # it holds no KV once it has responded
            try:
                return await self._send(instance, request)
            except LegFailed as error:
                failed = error
                self._legs.record_failure(instance, DECODE, error, fields=request.fields)
                self._suspicions += error.may_have_started and (
                    error.failure in DEATHS or is_ambiguous(error.failure, error.status)
                )
                self._router.counters.retries[DECODE, error.failure] += 1
            except StreamBroken as broken:
                self._legs.record_failure(instance, DECODE, broken.failed, fields=request.fields)
                raise
            finally:
                entry.release()
        raise failed

    async def _generate(self, body: RequestBody) -> RequestOutcome:
        """Carry out the journey of a request that generates tokens."""
        router, outcome, failed = self._router, RequestOutcome.FAILED, None
        work = self._measure(body)
        journey = self._journey = Journey(
            router.journeys, work, local_prefill_reason=LocalPrefillReason.PASSED_THROUGH
        )
        action = journey.begin(work.arrival_s)
        while action is not Action.END:
            if action is Action.WAIT:
                action = await wait_in_room(journey)
            elif action is Action.ASK_FOR_FLIP:
                action = await wait_for_flip(router, journey)
            elif action is Action.SEND_DECODE:
                assert journey.decode_instance is not None
                try:
                    outcome = await self._send(journey.decode_instance, body)
                except (LegFailed, StreamBroken) as error:
                    failed = error.failed if isinstance(error, StreamBroken) else error
                    action = self._fail_leg(journey, journey.decode_instance, failed, body)
                    if isinstance(error, StreamBroken):
                        raise
                else:
                    router.counters.local_prefills[LocalPrefillReason.PASSED_THROUGH] += 1
                    action = self._end_leg(journey, outcome, body)
            else:
                close = not self._keep_alive
                raise EarlyResponse(*build_failure_response(router, journey, failed, close=close))
        return outcome

    def _measure(self, body: RequestBody) -> Work:
        tier, tenant = self._client_request.caller.tier, self._client_request.caller.tenant
        return Work(
            self._router.tokens_per_byte.predict_tokens(measure_conversation(body.fields), tenant=tenant),
            tier.slo,
            deadline_s=self._arrival_s + tier.slo.ttft_s,
            tier=tier.name,
            priority=-tier.engine_priority,
            tenant=tenant,
            output_limit=find_passed_limit(body.fields, path=self._client_request.path) or 0,
        )

    def _end_leg(self, journey: Journey[Instance], outcome: RequestOutcome, body: RequestBody) -> Action:
        now_s, entry = time.monotonic(), journey.decode_entry
        if outcome is _INVALID:
            return journey.decode_rejected(now_s)
        usage, is_sure = (None, True) if self._usage is None else self._usage.read()
        prompt_tokens, output_tokens = body.find_counts(usage)
        if not is_sure and entry is not None:
            prompt_tokens = max(prompt_tokens or 0, journey.work.prompt_tokens)
            output_tokens = max(output_tokens or 0, entry.output_tokens) or None
        return journey.decode_ended(now_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def _fail_leg(
        self, journey: Journey[Instance], instance: Instance, failed: LegFailed, body: RequestBody
    ) -> Action:
        if self._leg is None or not self._leg.committed:
            self._router.counters.retries[DECODE, failed.failure] += 1
        action = journey.decode_failed(
            time.monotonic(), failed.failure, status=failed.status, started=failed.may_have_started
        )
        # After the journey has read the error share.
        self._legs.record_failure(instance, DECODE, failed, fields=body.fields)
        return action

    def _choose(self, excluded: set[str]) -> Instance | None:
        """The serving instance with the fewest legs."""
        serving = [i for i in self._router.fleet.instances if i.serving and i.name not in excluded]
        return min(serving, key=lambda i: (i.ledger.legs, i.name), default=None)

    async def _send(self, instance: Instance, request: RequestBody) -> RequestOutcome:
        """Send the request to one instance and forward its response; trace this leg.

        Raises:
            LegFailed: if it fails before the first byte was sent to the client.
            StreamBroken: if it fails later.
        """
        trace = self._trace
        if trace is None:
            return await self._forward(instance, request)
        now_s = time.monotonic()
        self._first_leg_s = self._first_leg_s or now_s
        self._client_request.trace_headers = trace.begin_leg("fulcrum.pass_through", instance.name, now_s)
        try:
            outcome = await self._forward(instance, request)
        except (LegFailed, StreamBroken) as error:
            failed = error.failed if isinstance(error, StreamBroken) else error
            trace.end_leg(time.monotonic(), error=failed.failure)
            raise
        trace.end_leg(time.monotonic())
        return outcome

    def _log_access(self, outcome: RequestOutcome) -> None:
        request = self._client_request
        self._router.access_log.write(
            request_id=request.request_id,
            path=request.path,
            tier=request.caller.tier.name,
            tenant=request.caller.tenant,
            outcome=outcome,
            duration_s=round(time.monotonic() - self._arrival_s, 4),
        )

    def _end_trace(self, outcome: RequestOutcome) -> None:
        if self._trace is None:
            return
        client_request = self._client_request
        self._trace.end(
            time.monotonic(),
            arrival_s=self._arrival_s,
            first_leg_s=self._first_leg_s,
            parts=None,
            attributes={
                "fulcrum.tier": client_request.caller.tier.name,
                "fulcrum.outcome": outcome,
                "fulcrum.path": client_request.path.decode(),
            },
            error="" if outcome is RequestOutcome.OK else outcome,
        )

    async def _forward(self, instance: Instance, request: RequestBody) -> RequestOutcome:
        pool, timeouts = instance.require_connection_pool(), self._settings.timeouts

        def build_request(pool: ConnectionPool) -> tuple[bytes, bytes]:
            body = build_decode_body(request, None, cache_salt=instance.cache_salt)
            return self._client_request.build_leg_head(pool.address, len(body)), body

        leg = await send_and_wait(
            pool,
            lambda connection: self._start_leg(connection, instance),
            build_request,
            connect_timeout_s=timeouts.connect_s,
            head_timeout_s=timeouts.first_byte_s,
            idle_timeout_s=timeouts.idle_s,
        )
        assert leg.head is not None
        if leg.head.status < 400:
            self._legs.record_success(instance, DECODE)
            return RequestOutcome.OK
        self._legs.record_rejection(instance, DECODE)
        return RequestOutcome.INVALID

    @property
    def max_response_s(self) -> float:
        """Longest time for the response of one engine, in seconds; see `policy.whole_response`."""
        path = self._client_request.path
        if path not in GENERATION_PATHS or self._body is None:
            return MAX_POOLING_S
        limit = find_passed_limit(self._body.fields, path=path)
        return compute_max_response_s(
            first_byte_timeout_s=self._settings.timeouts.first_byte_s,
            max_output_tokens=ASSUMED_CONTEXT_TOKENS if limit is None else limit,
        )

    def _start_leg(self, connection: EngineConnection, instance: Instance) -> PassThroughLeg:
        timeout_s = self._settings.timeouts.first_byte_s
        leg = self._leg = PassThroughLeg(connection, instance, self, timeout_s=timeout_s)
        return leg

    def write_response(self, leg: PassThroughLeg, data: bytes) -> None:
        """Send bytes of the response to the client, the first ones with the head, and count its tokens."""
        head, sent = leg.head, data
        if head is not None and not leg.committed:
            leg.committed = True
            if head.length == UNTIL_CLOSE:
                self._keep_alive = False
            lines = leg.instance.decode_header
            if not self._keep_alive:
                lines += b"connection: close\r\n"
            sent = head.prepend_headers(lines) + data
            self._downstream.release_body()
            if self._body is not None:
                self._body.forget_prompt()
            if self._journey is not None:
                self._journey.first_byte(time.monotonic(), is_streamed=False)
                self._usage = PassedUsage(streaming=head.is_event_stream)
            if self._downstream.paused:
                self.pause()
        if self._usage is not None:
            self._usage.add(data)
        if head is not None and head.is_event_stream and self._journey is not None:
            entry = self._journey.decode_entry
            if entry is not None:
                entry.add_tokens(sent.count(b"\ndata:"))  # about one token each
        self._downstream.write(sent)

    def _write_error_event(self, failed: LegFailed) -> None:
        """End a broken stream with an error event, where one can be inserted."""
        if self._leg is not None and self._leg.can_take_event:
            message = f"the engine failed during the stream: {failed.detail}"
            self._downstream.write(responses.frame_typed_error_event(message))

    def _write_failure(self, failed: LegFailed) -> None:
        """Send the error for a request that no instance could serve."""
        status = find_error_status(failed)
        message = failed.detail if status == 503 else f"no instance responded: {failed.detail}"
        lines = responses.DO_NOT_RETRY if self._suspicions >= MIN_SUSPICIONS else b""
        self._downstream.write(
            responses.build_error_response(status, message, header_lines=lines, close=not self._keep_alive)
        )
