"""One request's prompt: who computes it, and the hand-off that waits until decode has fetched it.

Prefill instances are asked one after another. Where none is there or none can, the decode instance computes
the prompt itself, and `local` says why. A hand-off is used once: where an engine may have fetched it, the
prompt is computed anew, since blocks that were given up hold other prompts' tokens and nobody would notice.
"""

import time

from fulcrum_core.values import Role, Slo
from fulcrum_router.counters import PREFILL, Outcome
from fulcrum_router.data_path.request import Answered, Call
from fulcrum_router.fleet.instances import Instance, pool_of
from fulcrum_router.http1 import responses
from fulcrum_router.http1.bodies import Request, lacks_usage, prefill_body, read_prefill_answer
from fulcrum_router.http1.framing import CHUNKED, UNTIL_CLOSE, AnswerHead
from fulcrum_router.http1.inline_task import in_task
from fulcrum_router.http1.upstream import Failure, LegFailed, ask
from fulcrum_router.kv_transfer.verification import HALF, Handed, missed
from fulcrum_router.policy import Decision, Dispatch, FlipRules, FlipWanted, choose_prefill
from fulcrum_router.policy.dispatch import NO_FLIPS
from fulcrum_router.policy.ledger import HandoffEntry
from fulcrum_router.router import Router
from fulcrum_router.settings import Timeouts

ATTEMPTS = 3
"""Instances asked for one leg."""

_BOTH = Role.BOTH  # an attribute of an enum is slow to read


class Prompt:
    """The prompt of one request."""

    __slots__ = (
        "_avoid",
        "_call",
        "_entry",
        "_expired_before",
        "_router",
        "_slo",
        "_stamp_s",
        "_timeouts",
        "handoff",
        "local",
        "request",
        "source",
        "tokens",
    )

    def __init__(self, router: Router, call: Call, request: Request, timeouts: Timeouts, slo: Slo) -> None:
        self._router, self._call, self.request = router, call, request
        self._timeouts, self._slo = timeouts, slo
        self._avoid: tuple[str, ...] = ()
        self.tokens = request.prompt_ids + router.ratio.tokens(request.prompt_bytes)
        """Estimated until an engine has counted them."""
        self.source: Instance | None = None
        """Who computed it last."""
        self.local: str | None = None
        """Why decode computes it itself."""
        self.handoff: bytes | None = None
        """As decode is to get it."""
        self._entry: HandoffEntry | None = None
        self._stamp_s = 0.0
        self._expired_before: float | None = None

    async def compute(self) -> None:
        """For a flow: have it computed, and keep the hand-off; without one, `local` tells why.

        Raises:
            Answered: if an engine finds the request at fault.
        """
        self.local = self.request.several
        self.source = None
        while self.local is None:
            if len(self._avoid) >= ATTEMPTS:
                self.local = "prefill_failed"
                return
            decision = self._choose(self._router.rules)
            if type(decision) is FlipWanted:
                await in_task(self._router.ask_for_flip(decision))
                decision = self._choose(NO_FLIPS)
            instance = self._dispatched(decision)
            if instance is None or instance.role is _BOTH:
                return  # whoever serves both phases needs no hand-off
            try:
                await self._compute_on(instance)
            except LegFailed as error:
                self._router.leg_failed(instance, PREFILL, error)
                self._router.books.retries[PREFILL, error.failure] += 1
                self._avoid += (instance.name,)
                continue
            return

    def _choose(self, rules: FlipRules) -> Decision:
        fleet, pairs = self._router.fleet.all, self._router.pairs
        avoid, delays = self._avoid + pairs.broken, pairs.giver_delays
        return choose_prefill(fleet, self.tokens, self._slo, rules=rules, avoid=avoid, delays=delays)

    def _dispatched(self, decision: Decision) -> Instance | None:
        if type(decision) is Dispatch:
            self._router.books.dispatched[PREFILL, decision.reason] += 1
            return self._router.fleet[decision.instance]
        self.local = "prefill_failed" if self._avoid else "no_prefill_instance"
        if self._router.pairs.broken:
            self.local = "no_kv_transfer"
        return None

    async def _compute_on(self, instance: Instance) -> None:
        pool, ledger, timeouts = pool_of(instance), instance.ledger, self._timeouts
        alone = not ledger.prefill_legs and not ledger.decode_requests
        tokens = self.tokens
        entry = ledger.open_prefill(tokens=tokens, seconds=instance.prefill_model.ttft_s(tokens))
        predicted_s = ledger.prefill_s
        body = prefill_body(self.request, salt=instance.salt)
        self._expired_before = instance.kv_expired
        sent_s = time.monotonic()
        try:
            status, content, head = await ask(
                pool,
                self._call.leg_head(pool.address, len(body)),
                body,
                connect_s=timeouts.connect,
                answer_s=timeouts.prefill,
            )
        finally:
            entry.release()
        if status != 200:
            raise self._refusal(instance, status, content, head)
        self._stamp_s, now_s = self._router.stamp_s, time.monotonic()
        self._take(instance, content, pool.host)
        self._router.leg_succeeded(instance, PREFILL)
        self._router.prediction_error.learn(predicted_s=predicted_s, measured_s=now_s - sent_s)
        if alone:
            instance.learn_prefill(tokens=self.tokens, seconds=now_s - sent_s)

    def _refusal(self, instance: Instance, status: int, content: bytes, head: AnswerHead) -> Exception:
        """A 5xx is the engine's fault, anything else the client's."""
        if status >= 500:
            return LegFailed(Failure.STATUS, f"the engine answered {status}", status=status)
        self._router.leg_succeeded(instance, PREFILL)
        chunked = head.length == CHUNKED
        answer = responses.answer(status, content) if chunked else head.with_fields(b"") + content
        return Answered(Outcome.INVALID, answer, keep=head.length != UNTIL_CLOSE)

    def _take(self, instance: Instance, content: bytes, host: str) -> None:
        answer = read_prefill_answer(content, host)
        if answer.prompt_tokens is not None:
            counted = answer.prompt_tokens - self.request.prompt_ids
            self._router.ratio.learn(size=self.request.prompt_bytes, tokens=counted)
            self.tokens = answer.prompt_tokens
        if answer.problem == "aborted":
            raise LegFailed(Failure.ABORTED, "the engine aborted the prefill")
        if answer.problem in ("no_handoff", "not_json"):
            raise LegFailed(Failure.HANDOFF, "the engine gave no hand-off")
        self.local = answer.problem
        self.handoff = answer.handoff
        self.source = instance
        if answer.handoff is not None:
            self._entry = instance.ledger.open_handoff()

    # --- the hand-off --------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether there is a hand-off, and it may be too old to be fetched in time."""
        source = self.source
        if self.handoff is None or source is None:
            return False
        return time.monotonic() - self._stamp_s > HALF * source.kv_lease_s

    def handed_to(self, decode: Instance) -> Handed | None:
        """What is to be proven of the hand-off that this instance gets; None if it gets none."""
        source = self.source
        if self.handoff is None or source is None:
            return None
        return Handed.of(
            self._router.pairs,
            source,
            decode,
            tokens=self.tokens,
            stamp_s=self._stamp_s,
            hides_usage=self._call.version != b"1.0" and lacks_usage(self.request),
            expired_before=self._expired_before,
        )

    def missed_by(self, decode: Instance, why: str) -> None:
        """Count a hand-off that this instance did not use, or did not answer."""
        if self.source is not None:
            missed(self._router.pairs, self.source, decode, why)

    def leave_to_decode(self, why: str) -> None:
        """The hand-off is of no use: decode computes the prompt."""
        self.close()
        self.local = why

    def forget(self, why: str) -> None:
        """So is what was computed, and where: any instance may decode."""
        self.leave_to_decode(why)
        self.source = None

    def close(self) -> None:
        """The hand-off was fetched, or is not to be."""
        if self._entry is not None:
            self._entry.release()
            self._entry = self.handoff = None
