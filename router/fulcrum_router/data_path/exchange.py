"""One request, from its last body byte to the last byte of its answer.

Its prompt is computed (`prompt`), an instance that decodes is chosen, and the answer relayed (`relay`). When
that instance fails before the client has seen a byte, another one is asked.
"""

import asyncio
import time

import structlog

from fulcrum_core.api import conditions as words
from fulcrum_router.counters import DECODE, Outcome
from fulcrum_router.data_path.decode import Broken, DecodeLeg, settle
from fulcrum_router.data_path.prefill import ATTEMPTS, Prompt
from fulcrum_router.data_path.request import Answered, Call, Client
from fulcrum_router.fleet.instances import Instance, pool_of
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import BadBody, Request, decode_body, parse_request
from fulcrum_router.http1.framing import UNTIL_CLOSE
from fulcrum_router.http1.inline_task import Flow, in_task
from fulcrum_router.http1.upstream import Failure, LegFailed
from fulcrum_router.kv_transfer.verification import prove
from fulcrum_router.policy import (
    Decision,
    Dispatch,
    FlipRules,
    FlipWanted,
    NoInstance,
    Reason,
    choose_decode,
)
from fulcrum_router.policy.dispatch import NO_FLIPS
from fulcrum_router.policy.ledger import PrefillEntry
from fulcrum_router.router import Router, new_salt
from fulcrum_router.settings import Settings

log = structlog.get_logger()

_PREFILLED_HERE = Reason.PREFILLED_HERE  # an attribute of an enum is slow to read
_ENDED_WELL = (Outcome.OK, None)
_CANCELLED = Outcome.CANCELLED
_TOO_SLOW = frozenset({Failure.TIMEOUT, Failure.UNREACHABLE, Failure.EJECTED})


class Exchange:
    """One request in service."""

    __slots__ = (
        "_avoid",
        "_call",
        "_client",
        "_first_s",
        "_flow",
        "_keep",
        "_leg",
        "_local_entry",
        "_prompt",
        "_recompute",
        "_router",
        "_settling",
        "_tier",
        "_timeouts",
        "arrival_s",
    )

    def __init__(self, router: Router, settings: Settings, client: Client, call: Call) -> None:
        self.arrival_s = time.monotonic()
        self._router, self._client, self._call = router, client, call
        self._tier, self._timeouts = settings.tier(call.tier), settings.timeouts
        self._keep = call.keep_alive
        self._avoid: tuple[str, ...] = ()
        self._recompute = False
        """Whether no KV that there is may be used."""
        self._settling: asyncio.Task[None] | None = None
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
        except Answered as end:
            outcome, self._keep = end.outcome, self._keep and end.keep
            self._client.write(end.answer)
        except Broken as broken:
            outcome = self._broken(broken)
        except asyncio.CancelledError:
            self._keep = False
        except Exception:
            log.exception("request failed by a fault of the router")
            outcome, self._keep = Outcome.FAILED, False
            if self._first_s is None:
                self._client.write(responses.error(500, "internal error of the router", close=True))
        finally:
            if self._settling is not None:
                self._settling.cancel()
            self._leg = None  # it refers back to us: without this only a garbage collection would free both
            ttft_s = None if self._first_s is None else self._first_s - self.arrival_s
            books.finish(self._tier, outcome, ttft_s=ttft_s, tpot_s=tpot_s)
            self._client.answered(keep=self._keep)

    async def _serve(self) -> tuple[Outcome, float | None]:
        request = self._parse()
        self._prompt = prompt = Prompt(self._router, self._call, request, self._timeouts, self._tier.slo)
        failed: LegFailed | None = None
        try:
            for _ in range(ATTEMPTS):
                if prompt.handoff is None and not self._recompute:
                    await prompt.compute()
                decision = self._choose(self._router.rules)
                if type(decision) is FlipWanted:
                    await in_task(self._router.ask_for_flip(decision))
                    decision = self._choose(NO_FLIPS)
                instance = self._dispatched(decision)
                if instance is None:
                    break
                try:
                    return await self._decode(instance)
                except LegFailed as error:
                    failed = error
                    self._decode_failed(instance, error)
            raise self._refusal(failed)
        finally:
            prompt.close()

    def _parse(self) -> Request:
        try:
            return parse_request(self._call.body, self._tier.engine_priority)
        except BadBody as error:
            raise Answered(Outcome.INVALID, responses.error(400, str(error))) from None

    # --- decode --------------------------------------------------------------------------------

    def _choose(self, rules: FlipRules) -> Decision:
        source = self._prompt.source
        return choose_decode(
            self._router.fleet.all,
            self._prompt.tokens,
            self._tier.slo,
            prefilled_on=source,
            rules=rules,
            now_s=time.time(),
            avoid=self._avoid,
            delays=self._router.pairs.delays.get(source.name) if source is not None else None,
        )

    def _dispatched(self, decision: Decision) -> Instance | None:
        prompt = self._prompt
        if type(decision) is NoInstance and prompt.source is not None:
            prompt.forget("unreadable_handoff")
            decision = self._choose(NO_FLIPS)
        if type(decision) is not Dispatch:
            return None
        self._router.books.dispatched[DECODE, decision.reason] += 1
        instance = self._router.fleet[decision.instance]
        if decision.reason is _PREFILLED_HERE:
            prompt.close()  # its blocks are this engine's own prefix cache
        elif prompt.is_stale:
            prompt.missed_by(instance, words.LEASE_EXPIRED)
            prompt.leave_to_decode("stale_handoff")
        return instance

    async def _decode(self, instance: Instance) -> tuple[Outcome, float | None]:
        """Relay the answer of one instance.

        Raises:
            LegFailed: if the client has seen nothing of it.
            Broken: if it has.
        """
        prompt, ledger, timeouts = self._prompt, instance.ledger, self._timeouts
        pool, handed = pool_of(instance), prompt.handed_to(instance)
        salt = None if self._recompute else instance.salt
        body = decode_body(
            prompt.request,
            prompt.handoff,
            ask_usage=handed is not None and handed.hides_usage,
            salt=new_salt() if salt is None else salt,
        )
        head, fields = self._call.leg_head(pool.address, len(body)), self._fulcrum_fields(instance)
        entry = ledger.open_decode(tokens=prompt.tokens)
        if prompt.source is None or prompt.local is not None:
            seconds = instance.prefill_model.ttft_s(prompt.tokens)
            self._local_entry = ledger.open_local_prefill(tokens=prompt.tokens, seconds=seconds)
        try:
            connection = pool.kept()
            if connection is None:
                connection = await in_task(pool.connect(timeouts.connect))
            while True:
                leg = self._leg = DecodeLeg(
                    connection, self._client, entry, fields, instance, salt, self._first, self._doubt, handed
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

    def _doubt(self) -> None:
        """An answer may come of KV that was fetched too late: ask the givers what they let expire."""
        if self._leg is not None:
            self._settling = asyncio.get_running_loop().create_task(settle(self._leg))

    def _decoded(self, instance: Instance, leg: DecodeLeg) -> tuple[Outcome, float | None]:
        books, head, local = self._router.books, leg.head, self._prompt.local
        assert head is not None
        self._router.leg_succeeded(instance, DECODE)
        if leg.handed is not None and head.status == 200:
            first_s = leg.first_s - leg.sent_s if leg.streaming else None
            prove(leg.handed, first_s=first_s)
        if local is not None:
            books.local[local] += 1
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
        options = self._prompt.request.fields.get("stream_options")
        usage = type(options) is dict and bool(options.get("include_usage"))
        chat = self._call.path.endswith(b"/chat/completions")
        return max(0, leg.events - 1 - usage - chat)

    def _first(self, now_s: float) -> None:
        """The first byte goes to the client."""
        self._first_s = now_s
        self._prompt.close()
        if self._local_entry is not None:
            self._local_entry.release()  # further releases change nothing

    def _decode_failed(self, instance: Instance, error: LegFailed) -> None:
        self._router.leg_failed(instance, DECODE, error)
        self._router.books.retries[DECODE, error.failure] += 1
        prompt, leg, self._leg = self._prompt, self._leg, None
        if error.failure is Failure.LEASE and leg is not None:
            self._router.distrust(instance, leg.salt)
            if leg.handed is not None and leg.handed.late:
                prompt.missed_by(instance, words.LEASE_EXPIRED)
            prompt.forget("lease_expired")
            self._recompute = True
            return
        self._avoid += (instance.name,)
        if error.failure is Failure.STATUS and prompt.handoff is not None:
            prompt.missed_by(instance, words.RECOMPUTED)
        if error.consumed:
            prompt.close()

    # --- what the client is told ---------------------------------------------------------------

    def _fulcrum_fields(self, decode: Instance) -> bytes:
        """Who did the work, in front of the engine's own header."""
        source, local = self._prompt.source, self._prompt.local
        fields = decode.decode_field if source is None else source.prefill_field + decode.decode_field
        if local is not None:
            fields += b"x-fulcrum-local-prefill: %b\r\n" % local.encode()
        return fields if self._keep else fields + b"connection: close\r\n"

    def _refusal(self, failed: LegFailed | None) -> Answered:
        """No instance answered."""
        if failed is None or failed.status == 503:
            message = "no instance can take the request now" if failed is None else failed.detail
            status = 503
        else:
            message = f"no instance answered: {failed.detail}"
            status = 504 if failed.failure in _TOO_SLOW else 502
        return Answered(Outcome.FAILED, responses.error(status, message, close=not self._keep))

    def _broken(self, broken: Broken) -> Outcome:
        """The stream ends here: an error event where one can be put, and no clean end."""
        leg = self._leg
        self._keep = False
        if leg is not None:
            last = leg.last_words(f"the engine failed in mid-stream: {broken.detail}")
            if last:
                self._client.write(last)
        return Outcome.BROKEN
