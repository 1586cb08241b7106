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

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.fleet.instances import Instance, get_connection_pool
from fulcrum_router.http1.bodies import (
    RequestBody,
    build_decode_body,
    build_prefill_body,
    parse_prefill_response,
    parse_usage,
)
from fulcrum_router.http1.inline_task import run_inline
from fulcrum_router.http1.upstream import ConnectionPool, LegFailed, send_request
from fulcrum_router.kv_transfer.verification import (
    KvTransfer,
    is_handshake_timeout,
    record_miss,
    verify_transfer,
)
from fulcrum_router.policy import PairKey, TransferPair
from fulcrum_router.policy.pair_record import DEFAULT_BLOCK_TOKENS, MIN_TIMED_TOKENS
from fulcrum_router.router import Router

log = structlog.get_logger()

IDLE_INTERVAL_S = 300.0
"""A pair without traffic is tried so often."""
TICK_S = 0.25
REFRESH_INTERVAL_S = 1.0
MAX_IN_FLIGHT = 2
LEG_TIMEOUT_S = 15.0
"""For one leg: more than an engine waits for a peer that does not answer."""
REFUSED_RETRY_S = 600.0
"""A pair whose engines refuse these roles is left alone for so long, or until roles change."""
LOW_PRIORITY = 1_000_000
"""As engines read it: later than anybody else."""
MAX_QUIET_DECODE_LEGS = 1
"""Decode legs beside which an instance still counts as quiet."""
MAX_PROMPT_TOKENS = 4_096
"""Of a canary that is to tell whether a slow pair still is."""
_REFUSED_STATUSES = frozenset({400, 422})


class CanaryScheduler:
    """Keeps the pairs of one router's instances known.

    Args:
        router: Whose instances.
        interval_s: How often a pair without traffic is tried.
        rng: Chooses prompts.
    """

    def __init__(self, router: Router, *, interval_s: float = IDLE_INTERVAL_S, rng: random.Random) -> None:
        self._router, self._interval_s, self._rng = router, interval_s, rng
        self._in_flight: dict[PairKey, asyncio.Task[None]] = {}
        self._refused: dict[PairKey, tuple[float, object]] = {}
        """Until when a pair is left alone, and the roles that its instances had."""
        self._last_fleet: dict[str, tuple[ConnectionPool | None, Role, bool, bool]] = {}
        """Of each instance its engine, and whether work or canaries go there."""
        self._refreshed_at_s = 0.0

    async def run(self) -> None:
        """Look after the pairs until cancelled."""
        try:
            while True:
                self._tick(time.monotonic())
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._in_flight.values():
                task.cancel()

    def _tick(self, now_s: float) -> None:
        if self._has_fleet_changed() or now_s - self._refreshed_at_s >= REFRESH_INTERVAL_S:
            self._refreshed_at_s = now_s
            self._router.pairs.refresh(self._router.fleet.instances, now_s=now_s)
            self._send_due(now_s)

    def _has_fleet_changed(self) -> bool:
        """Whether there is another fleet than before. An endpoint that has changed is another engine."""
        known = {
            i.name: (i.connection_pool, i.role, i.serving, i.is_warming_up)
            for i in self._router.fleet.instances
        }
        for name, (pool, *_) in known.items():
            if name in self._last_fleet and self._last_fleet[name][0] is not pool:
                self._router.pairs.invalidate(name)
        before, self._last_fleet = self._last_fleet, known
        return known != before

    def _send_due(self, now_s: float) -> None:
        router = self._router
        if not router.active or router.stopping or router.settings is None:
            return
        fleet, busy = router.fleet, {name for key in self._in_flight for name in key}
        candidates = [i for i in fleet.instances if i.serving or i.is_warming_up]
        for key in router.pairs.list_due(candidates, now_s=now_s, interval_s=self._interval_s):
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                return
            prefill, decode = fleet.get(key.prefill), fleet.get(key.decode)
            if (
                prefill is None
                or decode is None
                or not busy.isdisjoint(key)
                or not self._may_send(key, now_s)
            ):
                continue
            new = prefill.is_warming_up or decode.is_warming_up
            if new or (is_quiet(prefill) and is_quiet(decode)):
                busy.update(key)
                self._in_flight[key] = asyncio.create_task(self._run_canary(key, prefill, decode))

    def _may_send(self, key: PairKey, now_s: float) -> bool:
        until_s, roles = self._refused.get(key, (0.0, None))
        if now_s >= until_s or roles != self._read_roles(key):
            self._refused.pop(key, None)
            return True
        return False

    def _read_roles(self, key: PairKey) -> tuple[object, ...]:
        found = (self._router.fleet.get(name) for name in key)
        return tuple(instance and (instance.role, instance.connection_pool) for instance in found)

    async def _run_canary(self, key: PairKey, prefill: Instance, decode: Instance) -> None:
        try:
            await self._send_canary(key, prefill, decode)
        except LegFailed as failed:
            log.debug("canary not answered", prefill=key.prefill, decode=key.decode, reason=failed.detail)
        except Exception:
            log.exception("canary failed by a fault of the router")
        finally:
            self._in_flight.pop(key, None)
        self._router.pairs.refresh(self._router.fleet.instances, now_s=time.monotonic())
        self._send_due(time.monotonic())

    async def _send_canary(self, key: PairKey, prefill: Instance, decode: Instance) -> None:
        """One canary from end to end."""
        router, pair = self._router, self._router.pairs[key]
        pair.last_used_s = time.monotonic()  # tried: another one has its turn
        request = self._build_request(prefill, pair)
        host = get_connection_pool(prefill).host
        status, content = await self._post(prefill, build_prefill_body(request))
        if status != 200:
            self._record_refusal(key, status)
            return
        received_after_s, response = router.received_after_s, parse_prefill_response(content, host)
        if response.kv_transfer_params is None:
            record_miss(router.pairs, prefill, decode, conditions.INCOMPATIBLE)
            log.warning("canary was given no hand-off", prefill=key.prefill, reason=response.problem)
            return
        transfer = KvTransfer.create(
            router.pairs,
            prefill,
            decode,
            tokens=response.prompt_tokens or 0,
            received_after_s=received_after_s,
        )
        sent_s = time.monotonic()
        status, content = await self._post(decode, build_decode_body(request, response.kv_transfer_params))
        took_s = time.monotonic() - sent_s
        if status in _REFUSED_STATUSES:
            self._record_refusal(key, status)
        elif status != 200:
            reason = conditions.HANDSHAKE_FAILED if is_handshake_timeout(took_s) else conditions.RECOMPUTED
            record_miss(router.pairs, prefill, decode, reason)
        elif transfer.is_late:
            record_miss(
                router.pairs, prefill, decode, conditions.LEASE_EXPIRED
            )  # nobody knows whose KV it was
        else:
            transfer.usage = parse_usage(content)
            await self._check_reports_cached_tokens(decode, request, transfer)
            verify_transfer(transfer, time_to_first_event_s=took_s)

    def _record_refusal(self, key: PairKey, status: int) -> None:
        if status in _REFUSED_STATUSES:  # its role is a start-up option
            self._refused[key] = (time.monotonic() + REFUSED_RETRY_S, self._read_roles(key))

    async def _check_reports_cached_tokens(
        self, decode: Instance, request: RequestBody, transfer: KvTransfer
    ) -> None:
        """Whether an engine that says nothing of cached tokens would if there were some: ask it once more."""
        usage = transfer.usage
        if usage is None or usage.cached_tokens is not None or decode.reports_cached_tokens:
            return
        status, content = await self._post(decode, request.raw)
        second = parse_usage(content) if status == 200 else None
        decode.reports_cached_tokens = second is not None and second.cached_tokens is not None

    def _build_request(self, prefill: Instance, pair: TransferPair) -> RequestBody:
        """A prompt of some blocks, in ids that every model has, for the engine's own model, salted."""
        block = prefill.identity.block_size if prefill.identity else DEFAULT_BLOCK_TOKENS
        length = max(2 * block + 5, MIN_TIMED_TOKENS + 5)
        if pair.reason == conditions.SLOW_TRANSPORT:
            length = max(length, min(pair.slow_prompt_tokens, MAX_PROMPT_TOKENS))
        fields = {
            "prompt": [self._rng.randrange(32, 128) for _ in range(length)],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": f"canary-{os.urandom(8).hex()}",
            "priority": LOW_PRIORITY,
        }
        return RequestBody(orjson.dumps(fields), fields, 0, length, None)

    async def _post(self, instance: Instance, body: bytes) -> tuple[int, bytes]:
        pool = get_connection_pool(instance)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: canary-%b\r\ncontent-length: %d\r\n\r\n"
        ) % (pool.address, self._router.make_request_id(), len(body))
        call = send_request(
            pool, head, body, connect_timeout_s=1.0, response_timeout_s=LEG_TIMEOUT_S, retryable=False
        )
        status, content, _ = await run_inline(call)
        return status, content


def is_quiet(instance: Instance) -> bool:
    """Whether a canary would not be in anybody's way."""
    ledger = instance.ledger
    return not (ledger.prefill_legs or ledger.local_prefills) and ledger.decode_legs <= MAX_QUIET_DECODE_LEGS
