"""The exchange: the router's work on one completion request, once its body is complete.

It carries out the actions of the request's journey (`policy.journey`), which decides what is sent where. It
responds to the client where no engine does. At the end it counts the outcome and the latencies, and writes
the request into the flight recorder, the access log and its trace. `PrefillLeg` and `DecodeLeg` talk to the
engines. `downstream` starts and cancels the exchange; `pass_through` serves other paths.
"""

import asyncio
import time

import structlog

from fulcrum_core.spans import AttributeValue
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.data_path.decode import DecodeLeg
from fulcrum_router.data_path.decode_response import DecodeResponse, ResponseState
from fulcrum_router.data_path.journey_steps import build_failure_response, wait_for_flip, wait_in_room
from fulcrum_router.data_path.prefill import PrefillLeg
from fulcrum_router.data_path.request import (
    ClientRequest,
    Downstream,
    EarlyResponse,
    Leg,
    ServedRequest,
    read_long_body,
)
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import parse_request_body
from fulcrum_router.http1.engine_events import count_output_tokens
from fulcrum_router.http1.inline_task import InlineTask
from fulcrum_router.http1.json_limits import InvalidBody
from fulcrum_router.http1.output_limits import find_output_limit, is_stream
from fulcrum_router.policy.journey import Action, State, StopReason
from fulcrum_router.router import Router
from fulcrum_router.settings import ServiceSettings

log = structlog.get_logger()

# An attribute of an enum is slow to read.
_SEND_PREFILL, _SEND_DECODE, _END = Action.SEND_PREFILL, Action.SEND_DECODE, Action.END
_OUTCOME_NUMBERS = {outcome: number for number, outcome in enumerate(RequestOutcome)}
_OK, _DONE, _NOT_SERVED = RequestOutcome.OK, State.DONE, (StopReason.FULL, StopReason.REFUSED)
_NOT_REPLAYED = (RequestOutcome.INVALID, RequestOutcome.LIMITED)


class Exchange:
    """One client request in progress."""

    __slots__ = ("_inline_task", "_leg", "_paused_at_s", "_request", "_unread_s")

    def __init__(
        self, router: Router, settings: ServiceSettings, downstream: Downstream, client_request: ClientRequest
    ) -> None:
        self._request = ServedRequest(router, settings, downstream, client_request)
        self._leg: Leg | None = None
        """The leg that was sent last."""
        self._paused_at_s = self._unread_s = 0.0
        """Time since which the client reads too slowly, and the sum of such times since the first byte."""
        self._inline_task = InlineTask(self._run())

    def start(self) -> None:
        """Start the exchange. It may finish before this returns."""
        self._inline_task.resume()

    def cancel(self) -> None:
        """Abort the leg in flight: the client has disconnected."""
        self._inline_task.cancel()

    def pause(self) -> None:
        """Stop reading from the engine: the client reads too slowly."""
        self._paused_at_s = time.monotonic()
        if self._leg is not None:
            self._leg.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        first_byte_at_s = self._request.first_byte_at_s
        if first_byte_at_s is not None:
            self._unread_s += time.monotonic() - max(self._paused_at_s, first_byte_at_s)
        if self._leg is not None:
            self._leg.resume()

    async def _run(self) -> None:
        request = self._request
        request.router.counters.get_tier(request.tier.name).offered += 1
        try:
            await self._serve()
        except EarlyResponse as end:
            if request.first_byte_at_s is not None:  # the client has the beginning of a stream
                self._end_broken_stream()
                return
            request.outcome, request.keep_alive = end.outcome, request.keep_alive and end.keep_alive
            request.downstream.write(end.response)
        except InvalidBody as error:
            request.outcome = RequestOutcome.INVALID
            request.downstream.write(responses.build_error_response(400, str(error)))
        except asyncio.CancelledError:
            request.outcome, request.keep_alive = self._judge_client_left(), False
        except Exception:
            log.exception("request failed because of an internal error")
            request.outcome, request.keep_alive = RequestOutcome.FAILED, False
            if request.first_byte_at_s is None:
                request.downstream.write(
                    responses.build_error_response(500, "internal error of the router", close=True)
                )
        finally:
            if request.has_journey and request.journey.state is not _DONE:
                request.journey.client_left(time.monotonic())
            request.legs.close()
            self._record_end()
            if request.continuation is not None:
                request.continuation.forget()
            # The leg refers to the request: without this only a garbage collection would free both.
            self._leg = None
            request.downstream.finish_response(keep_alive=request.keep_alive)

    async def _serve(self) -> None:
        """Carry out the actions of the request's journey, one after another."""
        request, client = self._request, self._request.client
        priority, turns = request.tier.engine_priority, request.router.long_turns
        if client.is_long:
            body = await read_long_body(client.body, priority, turns, chat=request.is_chat)
        else:
            body = parse_request_body(client.body, priority, chat=request.is_chat)
        journey = request.begin_journey(body)
        action = journey.begin(request.arrival_s)
        while action is not _END:
            if action is _SEND_PREFILL:
                assert journey.prefill_instance is not None
                self._leg = PrefillLeg(request, journey.prefill_instance)
                if request.trace is not None:
                    self._trace_leg("fulcrum.prefill", journey.prefill_instance)
                action = await self._run_prefill(self._leg)
                if request.trace is not None:
                    self._end_leg_trace(failed=journey.source is None)
            elif action is _SEND_DECODE:
                assert journey.decode_instance is not None
                if journey.output_limit is not None:
                    request.limit_output()
                self._leg = DecodeLeg(request, journey.decode_instance)
                if request.trace is not None:
                    self._trace_leg("fulcrum.decode", journey.decode_instance)
                if request.first_byte_at_s is None:  # else the time counts as decode
                    request.times.send_decode(
                        time.monotonic(),
                        transfer_s=journey.expected_transfer_s,
                        local_compute_s=journey.local_compute_s,
                    )
                action = await self._leg.run()
                if request.trace is not None:
                    self._end_leg_trace(failed=action is not _END)
            elif action is Action.ASK_FOR_FLIP:
                action = await wait_for_flip(request.router, journey)
            elif action is Action.WAIT:
                action = await wait_in_room(journey)
            elif action is Action.FAIL:
                raise EarlyResponse(
                    *build_failure_response(
                        request.router, journey, request.failed, close=not request.keep_alive
                    )
                )
            elif action is Action.BREAK:
                self._end_broken_stream()
                return
            else:  # legs at once: no protocol of the data path has them
                raise NotImplementedError(action)

    async def _run_prefill(self, leg: PrefillLeg) -> Action:
        request, journey = self._request, self._request.journey
        if request.first_byte_at_s is not None:  # a stream goes on: the time counts as decode
            return await leg.run()
        request.times.send_prefill(time.monotonic())
        action = await leg.run()
        request.times.end_prefill(
            time.monotonic(),
            responded=journey.source is not None,
            compute_s=journey.prefill_computed_for_s,
        )
        return action

    # --- the end -------------------------------------------------------------------------------------

    def _record_end(self) -> None:
        """Count the request, the latencies that its response shows, and the latency parts; end its trace."""
        leg = self._leg
        response = leg.response if type(leg) is DecodeLeg else None
        request, outcome, end_s = self._request, self._request.outcome, time.monotonic()
        counters, first_byte_at_s, arrival_s = (
            request.router.counters,
            request.first_byte_at_s,
            request.times.arrival_s,
        )
        tokens: int | None = None
        ttft_s: float | None = None
        response_s: float | None = None
        streaming = response.streaming if response is not None else first_byte_at_s is not None
        if first_byte_at_s is None or not (streaming or outcome is _OK):
            # Without an answer, or with an error, there is no latency to judge.
            met = counters.record_request(request.tier, outcome)
        elif response is not None and not streaming:
            # The first byte of a whole response says nothing: all of its time is judged.
            tokens, response_s = self._count_output_tokens(response), end_s - arrival_s
            met = counters.record_whole_response(request.tier, response_s=response_s, tokens=tokens)
        elif response is not None and outcome is _OK:
            tokens = self._count_output_tokens(response)
            # The engine is not to blame for the time in which the client did not read.
            took_s = end_s - first_byte_at_s - self._unread_s
            tpot_s = took_s / (tokens - 1) if tokens > 1 else None
            ttft_s = first_byte_at_s - arrival_s
            met = counters.record_request(request.tier, outcome, ttft_s=ttft_s, tpot_s=tpot_s)
        else:
            # A stream that was cut short, or of which no decode leg is known, has a TTFT but no TPOT.
            ttft_s = first_byte_at_s - arrival_s
            met = counters.record_request(request.tier, outcome, ttft_s=ttft_s)
        parts = request.times.divide(
            end_s,
            first_byte_s=first_byte_at_s,
            unread_s=self._unread_s,
            streamed=response is None or streaming,
            refused=request.has_journey and request.journey.stop_reason in _NOT_SERVED,
        )
        counters.record_parts(request.tier, outcome, parts, met=met, tokens=tokens)
        if request.client.caller.tenant:
            counters.record_tenant(request.client.caller.tenant, outcome, met=met, now_s=end_s)
        if request.has_journey and outcome not in _NOT_REPLAYED:
            self._record_flight(end_s, tokens=tokens, ttft_s=ttft_s)
        access_log = request.router.access_log
        if access_log.share and access_log.takes_next():
            self._log_access(end_s, met=met, tokens=tokens)
        if request.trace is not None:
            self._end_trace(end_s, parts, met=met, tokens=tokens)
            counters.keep_exemplars(
                request.tier,
                request.trace.trace_id,
                at_s=time.time(),
                ttft_s=ttft_s,
                response_s=response_s,
            )

    def _log_access(self, end_s: float, *, met: bool, tokens: int | None) -> None:
        request, first_byte_at_s = self._request, self._request.first_byte_at_s
        journey = request.journey if request.has_journey else None
        prefill = None if journey is None else journey.prefill_instance
        decode = None if journey is None else journey.decode_instance
        request.router.access_log.write(
            request_id=request.client.request_id,
            path=request.client.path,
            tier=request.tier.name,
            tenant=request.client.caller.tenant,
            outcome=request.outcome,
            slo_met=met,
            prefill=None if prefill is None else prefill.name,
            decode=None if decode is None else decode.name,
            prompt_tokens=None if journey is None else journey.work.prompt_tokens,
            output_tokens=tokens,
            first_byte_s=None if first_byte_at_s is None else round(first_byte_at_s - request.arrival_s, 4),
            duration_s=round(end_s - request.arrival_s, 4),
        )

    def _record_flight(self, end_s: float, *, tokens: int | None, ttft_s: float | None) -> None:
        """Record the request in numbers, to replay it later."""
        request, work, duration_s = self._request, self._request.journey.work, end_s - self._request.arrival_s
        request.router.flight_recorder.add(
            arrival_s=time.time() - duration_s,
            prompt_tokens=work.prompt_tokens,
            output_tokens=(tokens or 0) * work.choices,
            ttft_s=ttft_s,
            duration_s=duration_s,
            tier=request.tier.name,
            outcome=_OUTCOME_NUMBERS[request.outcome],
            tenant=work.tenant,
        )

    def _trace_leg(self, name: str, instance: Instance) -> None:
        """Begin the span of a leg, and have the engine continue its trace."""
        request = self._request
        if request.trace is not None:
            request.client.trace_headers = request.trace.begin_leg(name, instance.name, time.monotonic())

    def _end_leg_trace(self, *, failed: bool) -> None:
        request = self._request
        if request.trace is not None:
            error = request.journey.failure if failed else None
            request.trace.end_leg(time.monotonic(), error=error or "", first_byte_s=request.first_byte_at_s)

    def _end_trace(self, end_s: float, parts: tuple[float, ...], *, met: bool, tokens: int | None) -> None:
        request, outcome = self._request, self._request.outcome
        if request.trace is None:
            return
        attributes: dict[str, AttributeValue] = {
            "fulcrum.tier": request.tier.name,
            "fulcrum.outcome": outcome,
            "fulcrum.slo_met": met,
        }
        if tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = tokens
        request.trace.end(
            end_s,
            arrival_s=request.arrival_s,
            first_leg_s=request.times.first_leg_s,
            parts=parts,
            attributes=attributes,
            error="" if outcome is _OK else outcome,
        )

    def _count_output_tokens(self, response: DecodeResponse) -> int:
        """Add the output tokens of a complete response to the counters; return the mean of one choice."""
        usage, request = response.usage, self._request
        if usage is not None:
            tokens, leg = usage.completion_tokens, self._leg
            if (
                tokens > response.events and type(leg) is DecodeLeg
            ):  # an engine cannot meet an SLO by its counts
                tokens = min(tokens, leg.max_output_tokens)
            if request.continuation is not None:
                tokens += request.continuation.counted_tokens
        else:  # an engine that reports no usage
            events = response.events
            tokens = count_output_tokens(events, chat=request.is_chat) if response.streaming else 1
        request.router.counters.output_tokens += tokens
        return tokens if request.body.choices == 1 else tokens // request.body.choices

    def _judge_client_left(self) -> RequestOutcome:
        """Return the outcome of a request whose client disconnected: whether it had missed the TTFT already.

        A whole response has no first byte before its last: it gets the time of the tokens that it asks for.
        """
        request = self._request
        first_byte_at_s, tokens = request.first_byte_at_s, 1
        if request.has_journey and not is_stream(request.body.fields):
            tokens = find_output_limit(request.body.fields, chat=request.is_chat) or 1
        waited_s = (time.monotonic() if first_byte_at_s is None else first_byte_at_s) - request.arrival_s
        late = waited_s > request.tier.slo.compute_response_limit_s(tokens)
        return RequestOutcome.LEFT_LATE if late else RequestOutcome.CANCELLED

    def _end_broken_stream(self) -> None:
        """Set the outcome `broken`, send an error event if one can be inserted, and close the connection."""
        request, leg = self._request, self._leg
        response = leg.response if type(leg) is DecodeLeg else None
        request.outcome, request.keep_alive = RequestOutcome.BROKEN, False
        continuation = request.continuation
        if continuation is not None:
            request.router.counters.continuations[continuation.outcome] += 1
        if request.journey.stop_reason is not None:
            request.router.counters.stopped_requests[request.journey.stop_reason] += 1
        detail = "" if request.failed is None else f": {request.failed.detail}"
        message = f"the engine failed during the stream{detail}"
        last = b""
        if response is not None and response.state is ResponseState.SENDING:
            last = response.build_stream_error(message)
        elif continuation is not None and continuation.stream is not None:  # between two engines
            last = responses.frame_broken_stream_event(message)
        if last:
            request.downstream.write(last)
