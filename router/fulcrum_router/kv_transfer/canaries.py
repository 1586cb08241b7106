"""Canaries: KV transfers that the router sends itself, to warm and verify transfer pairs without traffic.

A canary is a random prompt of a few KV blocks, prefilled on one instance and decoded for one token on the
other. It does not count as load, in latency models or for flips. A canary waits until both instances have no
prefill and at most one decode leg; pairs with an instance that gets no requests yet do not wait, so that they
are warm when it serves.

On a standby too, the scheduler refreshes the router's pairs each second, from which dispatch reads delays and
broken prefill instances, and invalidates the pairs of an instance whose engine was replaced. `server` runs
the scheduler as a background task.
"""

import asyncio
import os
import random
import time

import orjson
import structlog

from fulcrum_core.api import conditions
from fulcrum_core.values import Role
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import (
    RequestBody,
    build_decode_body,
    build_prefill_body,
    parse_prefill_response,
)
from fulcrum_router.http1.engine_events import parse_usage
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.http1.inline_task import run_inline
from fulcrum_router.http1.sending import send_request
from fulcrum_router.http1.upstream import ConnectionPool
from fulcrum_router.kv_transfer.verification import (
    KvTransfer,
    is_handshake_timeout,
    record_miss,
    verify_transfer,
)
from fulcrum_router.policy import PairKey, TransferPair
from fulcrum_router.policy.intervals import CANARY_IDLE_S
from fulcrum_router.policy.kv_pairs.pair_record import DEFAULT_BLOCK_TOKENS, MIN_TIMED_TOKENS
from fulcrum_router.router import Router

log = structlog.get_logger()

TICK_S = 0.25
"""How often the scheduler looks for a change of the fleet."""
REFRESH_INTERVAL_S = 1.0
"""How often pairs are refreshed and due canaries sent, besides after a change and after each canary."""
MAX_IN_FLIGHT = 2
LEG_TIMEOUT_S = 15.0
"""Time-out of one leg. Longer than an engine's handshake time-out, so that the engine's own ends the leg."""
REFUSED_RETRY_S = 600.0
"""Pause of a pair whose engines refuse their roles; it ends early when a role or an engine changes."""
LOW_PRIORITY = 1_000_000
"""vLLM schedules higher values later: after every client request."""
MAX_QUIET_DECODE_LEGS = 1
"""Most decode legs of an instance that still counts as quiet."""
MAX_PROMPT_TOKENS = 4_096
"""Longest canary prompt: a slow pair is timed again with prompts as long as the slow ones."""
_REFUSED_STATUSES = frozenset({400, 422})


class CanaryScheduler:
    """Sends canaries to the pairs of one router's instances.

    Args:
        router: The router; a standby sends no canaries.
        interval_s: Time between two canaries on a pair without traffic.
        rng: Chooses the prompts' token ids.
    """

    def __init__(self, router: Router, *, interval_s: float = CANARY_IDLE_S, rng: random.Random) -> None:
        self._router, self._interval_s, self._rng = router, interval_s, rng
        self._in_flight: dict[PairKey, asyncio.Task[None]] = {}
        self._refused: dict[PairKey, tuple[float, object]] = {}
        """Time until which a pair is paused, and the roles and engines that refused it."""
        self._last_fleet: dict[str, tuple[ConnectionPool | None, Role, bool, bool]] = {}
        """Endpoint, role, `serving` and `is_warming_up` of each instance at the last tick."""
        self._refreshed_at_s = 0.0

    async def run(self) -> None:
        """Send canaries until cancelled."""
        try:
            while True:
                self._tick(time.monotonic())
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._in_flight.values():
                task.cancel()

    def _tick(self, now_s: float) -> None:
        if self._note_fleet_changes() or now_s - self._refreshed_at_s >= REFRESH_INTERVAL_S:
            self._refreshed_at_s = now_s
            self._router.pairs.refresh(self._router.fleet.instances, now_s=now_s)
            self._send_due(now_s)

    def _note_fleet_changes(self) -> bool:
        """Invalidate the pairs of replaced engines; return whether the fleet changed since the last tick."""
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
            warming_up = prefill.is_warming_up or decode.is_warming_up
            if warming_up or (is_quiet(prefill) and is_quiet(decode)):
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
            log.debug("canary leg failed", prefill=key.prefill, decode=key.decode, reason=failed.detail)
        except Exception:
            log.exception("canary failed because of an internal error")
        finally:
            self._in_flight.pop(key, None)
        self._router.pairs.refresh(self._router.fleet.instances, now_s=time.monotonic())
        self._send_due(time.monotonic())

    async def _send_canary(self, key: PairKey, prefill: Instance, decode: Instance) -> None:
        """Send both legs of one canary and record the outcome."""
        router, pair = self._router, self._router.pairs[key]
        pair.last_used_s = time.monotonic()  # also if it fails: other pairs are due first
        request = self._build_request(prefill, pair)
        host = prefill.require_connection_pool().host
        status, content = await self._post(prefill, build_prefill_body(request))
        if status != 200:
            self._record_refusal(key, status)
            return
        received_after_s, response = router.received_after_s, parse_prefill_response(content, host)
        if response.kv_transfer_params is None:
            record_miss(router.pairs, prefill, decode, conditions.INCOMPATIBLE)
            log.warning("canary got no KV transfer parameters", prefill=key.prefill, reason=response.problem)
            return
        transfer = KvTransfer(
            router.pairs,
            prefill,
            decode,
            tokens=response.prompt_tokens or 0,
            received_after_s=received_after_s,
            decode_was_idle=not decode.ledger.legs,
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
            # The engine may have used another prompt's KV: its usage shows nothing.
            record_miss(router.pairs, prefill, decode, conditions.LEASE_EXPIRED)
        else:
            transfer.usage = parse_usage(content)
            await self._find_out_if_cached_tokens_are_reported(decode, request, transfer)
            verify_transfer(transfer, time_to_first_byte_s=took_s)

    def _record_refusal(self, key: PairKey, status: int) -> None:
        if status in _REFUSED_STATUSES:  # the engine was started for the other role
            self._refused[key] = (time.monotonic() + REFUSED_RETRY_S, self._read_roles(key))

    async def _find_out_if_cached_tokens_are_reported(
        self, decode: Instance, request: RequestBody, transfer: KvTransfer
    ) -> None:
        """Send the prompt once more if the engine reported no cached tokens: now all of it is cached.

        If it again reports none, it never reports them, and its transfers cannot be verified. If it reports
        some, the first response had left the number out because it was 0.
        """
        usage = transfer.usage
        if usage is None or usage.cached_tokens is not None or decode.reports_cached_tokens:
            return
        status, content = await self._post(decode, request.raw)
        second = parse_usage(content) if status == 200 else None
        decode.reports_cached_tokens = second is not None and second.cached_tokens is not None

    def _build_request(self, prefill: Instance, pair: TransferPair) -> RequestBody:
        """Build a random prompt of some blocks, of token ids that every model has, with a salt of its own.

        Without the field `model` the engine uses its own.
        """
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
        pool = instance.require_connection_pool()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: canary-%b\r\ncontent-length: %d\r\n\r\n"
        ) % (pool.address, self._router.make_request_id(), len(body))
        request = send_request(
            pool, head, body, connect_timeout_s=1.0, response_timeout_s=LEG_TIMEOUT_S, retryable=False
        )
        status, content, _ = await run_inline(request)
        return status, content


def is_quiet(instance: Instance) -> bool:
    """Whether a canary would delay no client request: no prefills and next to no decode legs."""
    ledger = instance.ledger
    return not (ledger.prefill_legs or ledger.local_prefills) and ledger.decode_legs <= MAX_QUIET_DECODE_LEGS
