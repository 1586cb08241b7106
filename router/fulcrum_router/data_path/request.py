"""One client request, as the modules that serve it see it.

`downstream` makes a `ClientRequest`; `exchange` and its legs share a `ServedRequest`: the body, the journey,
the results of the legs. `pass_through` uses the rest. They write to the client through `Downstream`, which is
declared here so that they need not import `downstream`. Nothing here reads a socket or chooses an instance.
"""

import time
from typing import Protocol

from fulcrum_router.access.callers import Caller
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.data_path.continuation import Continuation
from fulcrum_router.data_path.leg_outcomes import LegOutcomes
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import (
    RequestBody,
    is_stream_without_usage,
    limit_output,
    parse_request_body,
    read_request_body,
)
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.inline_task import Turns
from fulcrum_router.http1.json_limits import (
    UNCHECKED_BYTES,
    InvalidBody,
    limit_parsed,
    limit_unparsed,
    parse_object,
)
from fulcrum_router.http1.output_limits import find_output_limit, is_stream
from fulcrum_router.http1.prompt_prefix import build_prefix
from fulcrum_router.policy import Work
from fulcrum_router.policy.faults.blame import SHED_STATUSES
from fulcrum_router.policy.journey import Action, Journey
from fulcrum_router.policy.predictions.latency_parts import RequestTimes
from fulcrum_router.policy.prefix_index import NO_PREFIX
from fulcrum_router.policy.work import NOT_CACHED
from fulcrum_router.router import Router
from fulcrum_router.settings import ServiceSettings

LONG_BODY_BYTES = UNCHECKED_BYTES
"""Larger bodies are handled in steps, with other work of the event loop between them."""

_CANCELLED = RequestOutcome.CANCELLED  # an attribute of an enum is slow to read


class Downstream(Protocol):
    """The client's connection, as an exchange uses it."""

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly: pause reading from the engine."""

    def write(self, data: bytes) -> None:
        """Send bytes to the client."""

    def release_body(self) -> None:
        """Forget the body of the request: no leg can need it again."""

    def finish_response(self, *, keep_alive: bool) -> None:
        """End the exchange; the connection is closed unless `keep_alive` is set."""


class ClientRequest:
    """A POST that engines answer, as it arrived: a completion, or a passed-through request."""

    __slots__ = ("body", "caller", "keep_alive", "path", "request_id", "trace_headers")

    def __init__(
        self,
        path: bytes,
        body: bytes,
        request_id: bytes,
        caller: Caller,
        trace_headers: bytes,
        keep_alive: bool,
    ) -> None:
        self.path, self.body, self.keep_alive = path, body, keep_alive
        self.request_id = request_id
        """The client's `x-request-id`, or one of the router."""
        self.caller = caller
        """Tenant and tier."""
        self.trace_headers = trace_headers
        """Header lines of the W3C trace context."""

    @property
    def is_long(self) -> bool:
        """Whether the body is so long that each step with it gets a turn of the event loop."""
        return len(self.body) > LONG_BODY_BYTES

    def build_leg_head(self, address: bytes, body_bytes: int) -> bytes:
        """Build the request head of a leg whose body has `body_bytes` bytes."""
        return (
            b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        ) % (self.path, address, self.request_id, self.trace_headers, body_bytes)


async def read_long_body(
    raw: bytes, priority: int, turns: Turns, *, chat: bool = False, passed: bool = False
) -> RequestBody:
    """Do what `parse_request_body` does, in an inline task, with a turn of the event loop for each step."""
    await turns.take()
    openings = limit_unparsed(raw)
    await turns.take()
    fields = parse_object(raw)
    await turns.take()
    limit_parsed(fields, openings)
    await turns.take()
    body = read_request_body(raw, fields, priority, chat=chat, passed=passed)
    await turns.take()
    return body


class EarlyResponse(Exception):
    """Ends the exchange with this response; the connection closes unless `keep_alive` is set."""

    def __init__(self, outcome: RequestOutcome, response: bytes, *, keep_alive: bool = True) -> None:
        super().__init__(outcome)
        self.outcome, self.response, self.keep_alive = outcome, response, keep_alive


_TIMEOUT_FAILURES = frozenset(
    {Failure.TIMEOUT, Failure.TOO_LONG, Failure.UNREACHABLE, Failure.EJECTED, Failure.REMOVED}
)


def find_error_status(failed: LegFailed) -> int:
    """Return the status for a client whose request failed in this way on its last instance."""
    if failed.status in SHED_STATUSES:
        return 503
    return 504 if failed.failure in _TIMEOUT_FAILURES else 502


class ServedRequest:
    """What the exchange and its legs know of a completion in progress."""

    __slots__ = (
        "adds_usage",
        "arrival_s",
        "body",
        "client",
        "continuation",
        "counted_tokens",
        "downstream",
        "expired_before",
        "failed",
        "first_byte_at_s",
        "has_journey",
        "is_chat",
        "is_degraded",
        "journey",
        "keep_alive",
        "kv_transfer_params",
        "legs",
        "outcome",
        "received_after_s",
        "router",
        "tier",
        "timeouts",
        "times",
        "trace",
    )

    body: RequestBody
    """Set by `begin_journey`."""
    journey: Journey[Instance]
    """Set by `begin_journey`."""

    def __init__(
        self, router: Router, settings: ServiceSettings, downstream: Downstream, client: ClientRequest
    ) -> None:
        self.has_journey = False
        """Whether its body was parsed, so that `body` and `journey` are set."""
        self.is_degraded = False
        """Whether its output was limited."""
        self.arrival_s = time.monotonic()
        """TTFT counts from here."""
        self.times = RequestTimes(self.arrival_s)
        tracer = router.tracer
        self.trace = None if tracer is None else tracer.begin(client.trace_headers, self.arrival_s)
        self.router, self.downstream, self.client = router, downstream, client
        self.is_chat = client.path.endswith(b"/chat/completions")
        """Whether the request is for a chat completion."""
        self.tier, self.timeouts = client.caller.tier, settings.timeouts
        self.keep_alive = client.keep_alive
        self.legs = LegOutcomes(router)
        self.outcome = _CANCELLED
        """How the request ended; until then, how it would if its client left."""
        self.first_byte_at_s: float | None = None
        """When the first byte was sent to the client."""
        self.continuation: Continuation | None = None
        """What is kept of a stream to continue it; None until its first byte, and for other responses."""
        self.failed: LegFailed | None = None
        """The failure that an error to the client names."""
        # Of the last prefill leg:
        self.kv_transfer_params: bytes | None = None
        """JSON object for the decode leg, used only if `Journey.has_kv`."""
        self.counted_tokens: int | None = None
        """Length of the prompt as its engine counted it."""
        self.received_after_s = 0.0
        """Time before which its response had not arrived: the lease of its KV began later."""
        self.expired_before: float | None = None
        """Expired transfers of the prefill instance when the leg was sent; None: not known."""

    def begin_journey(self, body: RequestBody) -> Journey[Instance]:
        """Make the journey of the request, whose body was parsed; `Journey.begin` is left to the exchange."""
        self.body = body
        self.adds_usage = is_stream_without_usage(body)
        slo, router = self.tier.slo, self.router
        tokens = body.prompt_id_count + router.tokens_per_byte.predict_tokens(
            body.prompt_bytes, tenant=self.client.caller.tenant
        )
        prefix = NO_PREFIX
        if router.journeys.prefix_index is not None:
            prefix = build_prefix(body, tokens=tokens, chat=self.is_chat)
        work = Work(  # by position: with names it takes three times as long
            tokens,
            slo,
            self.arrival_s + slo.ttft_s,
            find_output_limit(body.fields, chat=self.is_chat) or 0,
            NOT_CACHED,
            self.tier.name,
            -self.tier.engine_priority,
            self.client.caller.tenant,
            body.choices,
            body.prompts,
            prefix,
            is_stream(body.fields),
        )
        self.journey = journey = Journey(router.journeys, work, body.local_prefill_reason)
        self.has_journey = True
        return journey

    def limit_output(self) -> None:
        """Limit the output as admission decided."""
        limit = self.journey.output_limit
        if limit is not None and not self.is_degraded:
            self.is_degraded = True
            self.body = limit_output(self.body, limit, chat=self.is_chat)

    def begin_stream(self, *, chunked: bool) -> None:
        """Keep what is needed to continue the stream, whose first byte is sent now."""
        body = self.body
        self.continuation = Continuation(
            body.raw,
            body.fields,
            self.router.kept_streams,
            self.router.request_memory,
            tenant=self.client.caller.tenant,
            chat=self.is_chat,
            chunked=chunked,
        )

    async def continue_stream(self) -> int | None:
        """Called in an inline task: replace the body, so that the next legs generate the rest of a stream.

        Returns the output tokens that the client has from the last leg; None: the rest cannot be generated.
        """
        continuation = self.continuation
        if continuation is None or continuation.output is None:
            return None
        await self.router.long_turns.take()
        before, raw = continuation.counted_tokens, continuation.build_body()
        if raw is None:
            return None
        try:
            self.body = parse_request_body(raw, self.tier.engine_priority, chat=self.is_chat)
        except InvalidBody:  # with the text it exceeds a limit
            return None
        self.kv_transfer_params = None
        return continuation.counted_tokens - before


class Leg(Protocol):
    """One request to one engine: an attempt of the prefill or of the decode."""

    async def run(self) -> Action:
        """Called in an inline task: send the leg, report its end to the journey, return the next action.

        Cancelling aborts the leg.

        Raises:
            EarlyResponse: if the engine's response ends the request.
        """

    def pause(self) -> None:
        """Stop reading what goes to the client: it reads too slowly."""

    def resume(self) -> None:
        """Read again."""
