"""One request, from its last body byte to the last byte of its answer.

Prefill leg, hand-off, decode leg, and what happens when one of them fails: until the client has seen a
byte, another instance is asked; without any prefill instance the decode instance computes the prompt
itself, and says so. A hand-off is used once: where an engine may have fetched it, the prompt is
prefilled anew, since blocks that were given up hold other prompts' tokens and nobody would notice.
"""

import asyncio
import time

import structlog

from fulcrum_core.api import conditions as words
from fulcrum_core.values import Role
from fulcrum_router import answers
from fulcrum_router.accounting import DECODE, PREFILL, Outcome
from fulcrum_router.bodies import (
    BadBody,
    Request,
    decode_body,
    lacks_usage,
    parse_request,
    prefill_body,
    read_prefill_answer,
)
from fulcrum_router.calls import Call, Client
from fulcrum_router.fleet import Instance, pool_of
from fulcrum_router.flow import Flow, in_task
from fulcrum_router.http1 import CHUNKED, UNTIL_CLOSE, AnswerHead
from fulcrum_router.policy import (
    Decision,
    Dispatch,
    FlipRules,
    FlipWanted,
    NoInstance,
    Reason,
    choose_decode,
    choose_prefill,
)
from fulcrum_router.policy.dispatch import NO_FLIPS
from fulcrum_router.policy.ledger import HandoffEntry, PrefillEntry
from fulcrum_router.proof import HALF, Handed, missed, prove
from fulcrum_router.relay import Broken, DecodeLeg, settle
from fulcrum_router.router import Router, new_salt
from fulcrum_router.settings import Settings
from fulcrum_router.upstream import EnginePool, Failure, LegFailed, ask

log = structlog.get_logger()

_BOTH, _PREFILLED_HERE = Role.BOTH, Reason.PREFILLED_HERE  # an attribute of an enum is slow to read
_ENDED_WELL = (Outcome.OK, None)
_CANCELLED = Outcome.CANCELLED
_TOO_SLOW = frozenset({Failure.TIMEOUT, Failure.UNREACHABLE, Failure.EJECTED})

ATTEMPTS = 3
"""Instances asked for one leg."""


class _Answered(Exception):
    """The client has its answer; nothing more is to be sent."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Exchange:
    """One request in service."""

    __slots__ = (
        "_avoid_decode",
        "_avoid_prefill",
        "_call",
        "_client",
        "_expired_before",
        "_first_s",
        "_flow",
        "_handoff",
        "_handoff_at_s",
        "_handoff_entry",
        "_keep",
        "_leg",
        "_local",
        "_local_entry",
        "_recompute",
        "_request",
        "_request_id",
        "_router",
        "_settings",
        "_settling",
        "_source",
        "_tier",
        "_tokens",
        "arrival_s",
    )

    def __init__(self, router: Router, settings: Settings, client: Client, call: Call) -> None:
        self.arrival_s = time.monotonic()
        self._router, self._settings, self._client, self._call = router, settings, client, call
        self._tier = settings.tier(call.tier)
        self._keep = call.keep_alive
        self._avoid_prefill: tuple[str, ...] = ()
        self._avoid_decode: tuple[str, ...] = ()
        self._source: Instance | None = None
        self._handoff: bytes | None = None
        self._handoff_at_s = 0.0
        self._handoff_entry: HandoffEntry | None = None
        self._expired_before: float | None = None
        self._recompute = False
        self._settling: asyncio.Task[None] | None = None
        self._local: str | None = None
        self._local_entry: PrefillEntry | None = None
        self._leg: DecodeLeg | None = None
        self._first_s: float | None = None
        self._flow = Flow(self._run())

    def start(self) -> None:
        """Begin. May end at once, and tell the client so."""
        self._flow.resume()

    def cancel(self) -> None:
        """The client left: drop both legs."""
        self._flow.cancel()

    def pause(self) -> None:
        """The client is slower than the engine."""
        if self._leg is not None and not self._leg.released:
            self._leg.connection.pause()

    def resume(self) -> None:
        """The client takes more."""
        if self._leg is not None and not self._leg.released:
            self._leg.connection.resume()

    async def _run(self) -> None:
        books = self._router.books
        books.tier(self._tier.name).offered += 1
        outcome, tpot_s = _CANCELLED, None
        try:
            outcome, tpot_s = await self._serve()
        except _Answered as end:
            outcome = end.outcome
        except Broken as broken:
            outcome = self._broken(broken)
        except asyncio.CancelledError:
            self._keep = False
        except Exception:
            log.exception("request failed by a fault of the router")
            outcome, self._keep = Outcome.FAILED, False
            if self._first_s is None:
                self._client.write(answers.error(500, "internal error of the router", close=True))
        finally:
            if self._handoff_entry is not None:
                self._close_handoff()
            if self._settling is not None:
                self._settling.cancel()
            self._leg = None  # it refers back to us: without this only a garbage collection would free both
            ttft_s = None if self._first_s is None else self._first_s - self.arrival_s
            books.finish(self._tier, outcome, ttft_s=ttft_s, tpot_s=tpot_s)
            self._client.answered(keep=self._keep)

    async def _serve(self) -> tuple[Outcome, float | None]:
        self._request = request = self._parse()
        self._tokens = request.prompt_ids + self._router.ratio.tokens(request.prompt_bytes)
        self._request_id = self._call.request_id or self._router.new_request_id()
        failed: LegFailed | None = None
        for _ in range(ATTEMPTS):
            if self._handoff is None and not self._recompute:
                await self._prefill()
            decision = self._choose_decode(self._router.rules)
            if type(decision) is FlipWanted:
                await in_task(self._router.ask_for_flip(decision))
                decision = self._choose_decode(NO_FLIPS)
            instance = self._dispatched_decode(decision)
            if instance is None:
                break
            try:
                return await self._decode(instance)
            except LegFailed as error:
                failed = error
                self._decode_failed(instance, error)
        raise self._refuse(failed)

    def _parse(self) -> Request:
        try:
            return parse_request(self._call.body, self._tier.engine_priority)
        except BadBody as error:
            self._client.write(answers.error(400, str(error)))
            raise _Answered(Outcome.INVALID) from None

    # --- prefill -------------------------------------------------------------------------------

    async def _prefill(self) -> None:
        """Have the prompt computed and its hand-off kept here; without one, `_local` tells why."""
        self._local = self._request.several
        self._source = None
        while self._local is None:
            if len(self._avoid_prefill) >= ATTEMPTS:
                self._local = "prefill_failed"
                return
            decision = self._choose_prefill(self._router.rules)
            if type(decision) is FlipWanted:
                await in_task(self._router.ask_for_flip(decision))
                decision = self._choose_prefill(NO_FLIPS)
            instance = self._dispatched_prefill(decision)
            if instance is None or instance.role is _BOTH:
                return  # whoever serves both phases needs no hand-off
            try:
                await self._prefill_on(instance)
            except LegFailed as error:
                self._router.leg_failed(instance, PREFILL, error)
                self._router.books.retries[PREFILL, error.failure] += 1
                self._avoid_prefill += (instance.name,)
                continue
            return

    def _dispatched_prefill(self, decision: Decision) -> Instance | None:
        if type(decision) is Dispatch:
            self._router.books.dispatched[PREFILL, decision.reason] += 1
            return self._router.fleet[decision.instance]
        self._local = "prefill_failed" if self._avoid_prefill else "no_prefill_instance"
        if self._router.pairs.broken:
            self._local = "no_kv_transfer"
        return None

    def _choose_prefill(self, rules: FlipRules) -> Decision:
        fleet, pairs = self._router.fleet.all, self._router.pairs
        avoid, delays, slo = self._avoid_prefill + pairs.broken, pairs.giver_delays, self._tier.slo
        return choose_prefill(fleet, self._tokens, slo, rules=rules, avoid=avoid, delays=delays)

    async def _prefill_on(self, instance: Instance) -> None:
        ledger, timeouts = instance.ledger, self._settings.timeouts
        alone = not ledger.prefill_legs and not ledger.decode_requests
        tokens = self._tokens
        entry = ledger.open_prefill(tokens=tokens, seconds=instance.prefill_model.ttft_s(tokens))
        predicted_s = ledger.prefill_s
        pool = pool_of(instance)
        body = prefill_body(self._request, salt=instance.salt)
        self._expired_before = instance.kv_expired
        sent_s = time.monotonic()
        try:
            status, content, head = await ask(
                pool,
                self._leg_head(pool, len(body)),
                body,
                connect_s=timeouts.connect,
                answer_s=timeouts.prefill,
            )
        finally:
            entry.release()
        if status != 200:
            self._prefill_status(instance, status, content, head)
        self._handoff_at_s, now_s = self._router.stamp_s, time.monotonic()
        self._take_handoff(instance, content, pool.host)
        self._router.leg_succeeded(instance, PREFILL)
        self._router.prediction_error.learn(predicted_s=predicted_s, measured_s=now_s - sent_s)
        if alone:
            instance.learn_prefill(tokens=self._tokens, seconds=now_s - sent_s)

    def _prefill_status(self, instance: Instance, status: int, content: bytes, head: AnswerHead) -> None:
        """A 5xx is the engine's fault, anything else the client's."""
        if status >= 500:
            raise LegFailed(Failure.STATUS, f"the engine answered {status}", status=status)
        self._router.leg_succeeded(instance, PREFILL)
        if head.length == CHUNKED:
            self._client.write(answers.answer(status, content))
        else:
            self._client.write(head.with_fields(b"") + content)
        self._keep = self._keep and head.length != UNTIL_CLOSE
        raise _Answered(Outcome.INVALID)

    def _take_handoff(self, instance: Instance, content: bytes, host: str) -> None:
        answer = read_prefill_answer(content, host)
        if answer.prompt_tokens is not None:
            request = self._request
            self._router.ratio.learn(
                size=request.prompt_bytes, tokens=answer.prompt_tokens - request.prompt_ids
            )
            self._tokens = answer.prompt_tokens
        if answer.problem == "aborted":
            raise LegFailed(Failure.ABORTED, "the engine aborted the prefill")
        if answer.problem in ("no_handoff", "not_json"):
            raise LegFailed(Failure.HANDOFF, "the engine gave no hand-off")
        self._local = answer.problem
        self._handoff = answer.handoff
        self._source = instance
        if answer.handoff is not None:
            self._handoff_entry = instance.ledger.open_handoff()

    def _close_handoff(self) -> None:
        if self._handoff_entry is not None:
            self._handoff_entry.release()
            self._handoff_entry = self._handoff = None

    # --- decode --------------------------------------------------------------------------------

    def _dispatched_decode(self, decision: Decision) -> Instance | None:
        if type(decision) is NoInstance and self._source is not None:
            self._close_handoff()  # nobody can read it, but somebody may compute the prompt again
            self._source, self._local = None, "unreadable_handoff"
            decision = self._choose_decode(NO_FLIPS)
        if type(decision) is not Dispatch:
            return None
        self._router.books.dispatched[DECODE, decision.reason] += 1
        if decision.reason is _PREFILLED_HERE:
            self._close_handoff()  # its blocks are this engine's own prefix cache
        elif self._handoff is not None and self._is_stale():
            self._close_handoff()
            self._local = "stale_handoff"
            self._missed(self._router.fleet[decision.instance], words.LEASE_EXPIRED)
        return self._router.fleet[decision.instance]

    def _missed(self, instance: Instance, why: str) -> None:
        if self._source is not None:
            missed(self._router.pairs, self._source, instance, why)

    def _is_stale(self) -> bool:
        """Whether the hand-off may be too old to be fetched in time."""
        source = self._source
        return source is not None and time.monotonic() - self._handoff_at_s > HALF * source.kv_lease_s

    def _choose_decode(self, rules: FlipRules) -> Decision:
        source = self._source
        return choose_decode(
            self._router.fleet.all,
            self._tokens,
            self._tier.slo,
            prefilled_on=source,
            rules=rules,
            now_s=time.time(),
            avoid=self._avoid_decode,
            delays=self._router.pairs.delays.get(source.name) if source is not None else None,
        )

    async def _decode(self, instance: Instance) -> tuple[Outcome, float | None]:
        """Relay the answer of one instance.

        Raises:
            LegFailed: if the client has seen nothing of it.
            Broken: if it has.
        """
        ledger, timeouts = instance.ledger, self._settings.timeouts
        pool = pool_of(instance)
        handed, salt = self._handed_to(instance), None if self._recompute else instance.salt
        asks, asked = handed is not None and handed.hides_usage, (instance, salt)
        salted = new_salt() if salt is None else salt
        body = decode_body(self._request, self._handoff, ask_usage=asks, salt=salted)
        head, fields = self._leg_head(pool, len(body)), self._fulcrum_fields(instance)
        entry = ledger.open_decode(tokens=self._tokens)
        if self._source is None or self._local is not None:
            seconds = instance.prefill_model.ttft_s(self._tokens)
            self._local_entry = ledger.open_local_prefill(tokens=self._tokens, seconds=seconds)
        try:
            connection = pool.kept()
            if connection is None:
                connection = await in_task(pool.connect(timeouts.connect))
            while True:
                leg = self._leg = DecodeLeg(
                    connection, self._client, entry, fields, asked, self._first, self._doubt, handed
                )
                if handed is not None:
                    handed.sent_s = leg.sent_s
                    instance.awaited.add(handed)
                connection.send(leg, head, body, first_byte_s=timeouts.first_byte, idle_s=timeouts.idle)
                try:
                    await leg
                except LegFailed:
                    if not connection.lost_reuse_race:
                        raise
                    connection = await in_task(pool.connect(timeouts.connect))
                    continue
                except asyncio.CancelledError:
                    if not leg.released:
                        connection.abort()
                    if not leg.told_all:
                        raise
                return self._decoded(instance, leg)
        except Broken as broken:
            self._router.leg_failed(instance, DECODE, LegFailed(broken.failure, broken.detail))
            raise
        finally:
            if handed is not None:
                instance.awaited.discard(handed)
                if self._first_s is None and handed.may_be_late:
                    self._router.distrust(instance, salt)
            entry.release()
            if self._local_entry is not None:
                self._local_entry.release()

    def _handed_to(self, instance: Instance) -> Handed | None:
        """What is to be proven of the hand-off that this instance gets; None if it gets none."""
        source = self._source
        if self._handoff is None or source is None:
            return None
        return Handed.of(
            self._router.pairs,
            source,
            instance,
            tokens=self._tokens,
            stamp_s=self._handoff_at_s,
            hides_usage=self._call.version != b"1.0" and lacks_usage(self._request),
            expired_before=self._expired_before,
        )

    def _doubt(self) -> None:
        """An answer may come of KV that was fetched too late: ask the givers what they let expire."""
        if self._leg is not None:
            self._settling = asyncio.get_running_loop().create_task(settle(self._leg))

    def _decoded(self, instance: Instance, leg: DecodeLeg) -> tuple[Outcome, float | None]:
        books, head = self._router.books, leg.head
        assert head is not None
        self._router.leg_succeeded(instance, DECODE)
        if leg.handed is not None and head.status == 200:
            first_s = leg.first_s - leg.sent_s if leg.streaming else None
            prove(self._router.pairs, leg.handed, first_s=first_s)
        if self._local is not None:
            books.local[self._local] += 1
        if head.length == UNTIL_CLOSE:
            self._keep = False
        if head.status >= 400:
            return Outcome.INVALID, None
        if not leg.streaming:
            return _ENDED_WELL
        tokens = self._output_tokens(leg)
        books.output_tokens += tokens
        if tokens < 2:
            return _ENDED_WELL
        return Outcome.OK, (time.monotonic() - leg.first_s) / (tokens - 1)

    def _output_tokens(self, leg: DecodeLeg) -> int:
        """Events that carry a token: not `[DONE]`, nor the usage chunk, nor chat's first with the role."""
        options = self._request.fields.get("stream_options")
        usage = type(options) is dict and bool(options.get("include_usage"))
        chat = self._call.path.endswith(b"/chat/completions")
        return max(0, leg.events - 1 - usage - chat)

    def _first(self, now_s: float) -> None:
        """The first byte goes to the client."""
        self._first_s = now_s
        self._close_handoff()
        if self._local_entry is not None:
            self._local_entry.release()  # further releases change nothing

    def _decode_failed(self, instance: Instance, error: LegFailed) -> None:
        self._router.leg_failed(instance, DECODE, error)
        self._router.books.retries[DECODE, error.failure] += 1
        leg, self._leg = self._leg, None
        if error.failure is Failure.LEASE and leg is not None:
            self._router.distrust(instance, leg.salt)
            if leg.handed is not None and leg.handed.late:
                self._missed(instance, words.LEASE_EXPIRED)
            self._close_handoff()
            self._source, self._local, self._recompute = None, "lease_expired", True
            return
        self._avoid_decode += (instance.name,)
        if error.failure is Failure.STATUS and self._handoff is not None:
            self._missed(instance, words.RECOMPUTED)
        if error.consumed:
            self._close_handoff()

    # --- what the client is told ---------------------------------------------------------------

    def _leg_head(self, pool: EnginePool, length: int) -> bytes:
        call = self._call
        return (
            b"POST %b HTTP/%b\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        ) % (call.path, call.version, pool.address, self._request_id, call.trace, length)

    def _fulcrum_fields(self, decode: Instance) -> bytes:
        """Who did the work, in front of the engine's own header."""
        source, local = self._source, self._local
        fields = decode.decode_field if source is None else source.prefill_field + decode.decode_field
        if local is not None:
            fields += b"x-fulcrum-local-prefill: %b\r\n" % local.encode()
        return fields if self._keep else fields + b"connection: close\r\n"

    def _refuse(self, failed: LegFailed | None) -> _Answered:
        """No instance answered."""
        if failed is None or failed.status == 503:
            message = "no instance can take the request now" if failed is None else failed.detail
            status = 503
        else:
            message = f"no instance answered: {failed.detail}"
            status = 504 if failed.failure in _TOO_SLOW else 502
        self._client.write(answers.error(status, message, close=not self._keep))
        return _Answered(Outcome.FAILED)

    def _broken(self, broken: Broken) -> Outcome:
        """The stream ends here: an error event where one can be put, and no clean end."""
        leg = self._leg
        self._keep = False
        if leg is not None:
            words = leg.last_words(f"the engine failed in mid-stream: {broken.detail}")
            if words:
                self._client.write(words)
        return Outcome.BROKEN
