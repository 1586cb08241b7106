"""Canaries: hand-offs of our own, which warm pairs of instances and prove those that have no traffic.

A canary is a prompt that nobody has asked before, a few blocks long, prefilled here and decoded there for a
single token. It stands in no books: neither load nor latencies nor flips know of it. It waits until both
instances have nothing to prefill and next to nothing to decode. With an instance that gets no work yet nobody
waits: its pairs are to be warm when it does.
"""

import asyncio
import os
import random
import time

import orjson
import structlog

from fulcrum_core.api import conditions as words
from fulcrum_core.values import Role
from fulcrum_router.fleet.instances import Instance, pool_of
from fulcrum_router.http1.bodies import Request, decode_body, prefill_body, read_prefill_answer, read_usage
from fulcrum_router.http1.inline_task import from_task
from fulcrum_router.http1.upstream import EnginePool, LegFailed, ask
from fulcrum_router.kv_transfer.verification import Handed, has_timed_out, missed, prove
from fulcrum_router.policy import Pair, PairKey
from fulcrum_router.policy.pairs import DEFAULT_BLOCK_TOKENS, SAMPLE_TOKENS
from fulcrum_router.router import Router

log = structlog.get_logger()

INTERVAL_S = 300.0
"""A pair without traffic is tried so often."""
LOOK_S = 0.25
REFRESH_S = 1.0
AT_ONCE = 2
ANSWER_S = 15.0
"""For one leg: more than an engine waits for a peer that does not answer."""
REFUSED_S = 600.0
"""A pair whose engines refuse these roles is left alone for so long, or until roles change."""
LOW_PRIORITY = 1_000_000
"""As engines read it: later than anybody else."""
QUIET_DECODES = 1
"""Decode legs beside which an instance still counts as quiet."""
LONGEST_TOKENS = 4_096
"""Of a canary that is to tell whether a slow pair still is."""
_REFUSED = frozenset({400, 422})


class Canaries:
    """Keeps the pairs of one router's instances known.

    Args:
        router: Whose instances.
        interval_s: How often a pair without traffic is tried.
        rng: Chooses prompts.
    """

    def __init__(self, router: Router, *, interval_s: float = INTERVAL_S, rng: random.Random) -> None:
        self._router, self._interval_s, self._rng = router, interval_s, rng
        self._flying: dict[PairKey, asyncio.Task[None]] = {}
        self._refused: dict[PairKey, tuple[float, object]] = {}
        """Until when a pair is left alone, and the roles that its instances had."""
        self._known: dict[str, tuple[EnginePool | None, Role, bool, bool]] = {}
        """Of each instance its engine, and whether work or canaries go there."""
        self._refreshed_s = 0.0

    async def run(self) -> None:
        """Look after the pairs until cancelled."""
        try:
            while True:
                self._look(time.monotonic())
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._flying.values():
                task.cancel()

    def _look(self, now_s: float) -> None:
        if self._follow() or now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now_s
            self._router.pairs.refresh(self._router.fleet.all, now_s=now_s)
            self._send(now_s)

    def _follow(self) -> bool:
        """Whether there is another fleet than before. An endpoint that has changed is another engine."""
        known = {i.name: (i.pool, i.role, i.serving, i.warms_up) for i in self._router.fleet.all}
        for name, (pool, *_) in known.items():
            if name in self._known and self._known[name][0] is not pool:
                self._router.pairs.cool(name)
        before, self._known = self._known, known
        return known != before

    def _send(self, now_s: float) -> None:
        router = self._router
        if not router.active or router.stopping or router.settings is None:
            return
        fleet, busy = router.fleet, {name for key in self._flying for name in key}
        there = [i for i in fleet.all if i.serving or i.warms_up]
        for key in router.pairs.due(there, now_s=now_s, interval_s=self._interval_s):
            if len(self._flying) >= AT_ONCE:
                return
            giver, taker = fleet.get(key.prefill), fleet.get(key.decode)
            if giver is None or taker is None or not busy.isdisjoint(key) or not self._may(key, now_s):
                continue
            new = giver.warms_up or taker.warms_up
            if new or (is_quiet(giver) and is_quiet(taker)):
                busy.update(key)
                self._flying[key] = asyncio.create_task(self._fly(key, giver, taker))

    def _may(self, key: PairKey, now_s: float) -> bool:
        until_s, roles = self._refused.get(key, (0.0, None))
        if now_s >= until_s or roles != self._roles(key):
            self._refused.pop(key, None)
            return True
        return False

    def _roles(self, key: PairKey) -> tuple[object, ...]:
        found = (self._router.fleet.get(name) for name in key)
        return tuple(instance and (instance.role, instance.pool) for instance in found)

    async def _fly(self, key: PairKey, giver: Instance, taker: Instance) -> None:
        try:
            await self._hand_over(key, giver, taker)
        except LegFailed as failed:
            log.debug("canary not answered", prefill=key.prefill, decode=key.decode, reason=failed.detail)
        except Exception:
            log.exception("canary failed by a fault of the router")
        finally:
            self._flying.pop(key, None)
        self._router.pairs.refresh(self._router.fleet.all, now_s=time.monotonic())
        self._send(time.monotonic())

    async def _hand_over(self, key: PairKey, giver: Instance, taker: Instance) -> None:
        """One canary from end to end."""
        router, pair = self._router, self._router.pairs[key]
        pair.last_used_s = time.monotonic()  # tried: another one has its turn
        request = self._request(giver, pair)
        host = pool_of(giver).host
        status, content = await self._ask(giver, prefill_body(request))
        if status != 200:
            self._not_given(key, status)
            return
        stamp_s, answer = router.stamp_s, read_prefill_answer(content, host)
        if answer.handoff is None:
            missed(router.pairs, giver, taker, words.NOT_COMPATIBLE)
            log.warning("canary was given no hand-off", prefill=key.prefill, reason=answer.problem)
            return
        handed = Handed.of(router.pairs, giver, taker, tokens=answer.prompt_tokens or 0, stamp_s=stamp_s)
        sent_s = time.monotonic()
        status, content = await self._ask(taker, decode_body(request, answer.handoff))
        took_s = time.monotonic() - sent_s
        if status in _REFUSED:
            self._not_given(key, status)
        elif status != 200:
            why = words.HANDSHAKE_FAILED if has_timed_out(took_s) else words.RECOMPUTED
            missed(router.pairs, giver, taker, why)
        elif handed.late:
            missed(router.pairs, giver, taker, words.LEASE_EXPIRED)  # nobody knows whose KV it was
        else:
            handed.usage = read_usage(content)
            await self._learn_to_tell(taker, request, handed)
            prove(handed, first_s=took_s)

    def _not_given(self, key: PairKey, status: int) -> None:
        if status in _REFUSED:  # its role is a start-up option
            self._refused[key] = (time.monotonic() + REFUSED_S, self._roles(key))

    async def _learn_to_tell(self, taker: Instance, request: Request, handed: Handed) -> None:
        """Whether an engine that says nothing of cached tokens would if there were some: ask it once more."""
        usage = handed.usage
        if usage is None or usage.cached_tokens is not None or taker.tells_cached:
            return
        status, content = await self._ask(taker, request.raw)
        again = read_usage(content) if status == 200 else None
        taker.tells_cached = again is not None and again.cached_tokens is not None

    def _request(self, giver: Instance, pair: Pair) -> Request:
        """A prompt of some blocks, in ids that every model has, for the engine's own model, salted."""
        block = giver.identity.block_size if giver.identity else DEFAULT_BLOCK_TOKENS
        length = max(2 * block + 5, SAMPLE_TOKENS + 5)
        if pair.reason == words.SLOW_TRANSPORT:
            length = max(length, min(pair.slow_tokens, LONGEST_TOKENS))
        fields = {
            "prompt": [self._rng.randrange(32, 128) for _ in range(length)],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": f"canary-{os.urandom(8).hex()}",
            "priority": LOW_PRIORITY,
        }
        return Request(orjson.dumps(fields), fields, 0, length, None)

    async def _ask(self, instance: Instance, body: bytes) -> tuple[int, bytes]:
        pool = pool_of(instance)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: canary-%b\r\ncontent-length: %d\r\n\r\n"
        ) % (pool.address, self._router.new_request_id(), len(body))
        asking = ask(pool, head, body, connect_s=1.0, answer_s=ANSWER_S, replaceable=False)
        status, content, _ = await from_task(asking)
        return status, content


def is_quiet(instance: Instance) -> bool:
    """Whether a canary would not be in anybody's way."""
    ledger = instance.ledger
    return not (ledger.prefill_legs or ledger.local_prefills) and ledger.decode_requests <= QUIET_DECODES
