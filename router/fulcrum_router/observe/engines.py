"""What the router reads from the engines once a second, and how dead instances come back.

Only what the data path cannot know: the engines' own inter-token latency (requests without a stream show
it none), KV use, and how many requests they have, other routers' too. A probe shares the pool of the
instance and runs beside the requests.
"""

import asyncio
import math
import re
import time
from dataclasses import dataclass

import structlog

from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.inline_task import run_inline
from fulcrum_router.http1.upstream import ConnectionPool, send_request
from fulcrum_router.router import Router

log = structlog.get_logger()

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 1.0
MISSED_PROBES_TO_EJECT = 3
"""Probes without an answer, in a row, that eject an instance: it hangs. One that cannot even connect does."""
NO_RESPONSE_FAILURES = frozenset({Failure.TIMEOUT, Failure.UNREACHABLE, Failure.REFUSED})
"""Of a probe: whoever waits for the same engine waits in vain."""

_ITL_SUM = b"vllm:inter_token_latency_seconds_sum"
_ITL_COUNT = b"vllm:inter_token_latency_seconds_count"
_KV_USAGE = b"vllm:kv_cache_usage_perc"
_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_CACHE_CONFIG = b"\nvllm:cache_config_info{"
_BLOCK_SIZE = re.compile(rb'\bblock_size="(\d+)"')
_KV_EXPIRED = b"vllm:nixl_num_kv_expired_reqs_total"


def sum_samples(text: bytes, name: bytes) -> float | None:
    """The sum of all samples of one name in an exposition; None if it has none, or one that is no number."""
    total, found, start = 0.0, False, 0
    while True:
        start = text.find(name, start)
        if start < 0:
            return total if found and math.isfinite(total) else None
        end = text.find(b"\n", start)
        line = text[start : end if end >= 0 else len(text)]
        at_line_start = start == 0 or text[start - 1 : start] == b"\n"
        start += len(name)
        if not at_line_start or line[len(name) : len(name) + 1] not in (b"{", b" "):
            continue
        try:
            total += float(line.rpartition(b"}")[2].split()[0] if b"}" in line else line.split()[1])
        except (ValueError, IndexError):
            return None
        found = True


@dataclass(frozen=True, slots=True)
class LatencySums:
    """An engine's inter-token latency since its start."""

    seconds: float
    count: float
    batch_tokens: int = 0
    """KV tokens of the decode batch when this was read; 0: none, or prompts were computed beside it."""

    def mean_since(self, before: "LatencySums | None") -> float | None:
        """Mean over what came since `before`; None without tokens, or where the counters went back."""
        if before is None:
            return None
        count, seconds = self.count - before.count, self.seconds - before.seconds
        return seconds / count if count > 0 and seconds >= 0 else None


class EngineProber:
    """Keeps one probe running per instance."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        try:
            while True:
                self._sync_tasks(self._router.fleet)
                await asyncio.sleep(PROBE_INTERVAL_S / 4)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _sync_tasks(self, fleet: Fleet) -> None:
        for instance in fleet.instances:
            if instance.name not in self._tasks:
                self._tasks[instance.name] = asyncio.create_task(self._probe_until_cancelled(instance))
        for name in [name for name in self._tasks if fleet.get(name) is None]:
            self._tasks.pop(name).cancel()

    async def _probe_until_cancelled(self, instance: Instance) -> None:
        """Probe one instance for as long as it exists."""
        previous: LatencySums | None = None
        pool: ConnectionPool | None = None
        while True:
            began_s = time.monotonic()
            if instance.connection_pool is not pool:
                pool, previous = instance.connection_pool, None
            if instance.health.ejected:
                await self._probe_ejected(instance)
            elif pool is not None:
                previous = await self._scrape(instance, pool, previous)
            await asyncio.sleep(max(0.0, self._next_probe_s(instance, began_s) - time.monotonic()))

    @staticmethod
    def _next_probe_s(instance: Instance, began_s: float) -> float:
        if instance.health.ejected:
            return max(instance.health.probe_at_s, time.monotonic() + 0.01)
        return began_s + PROBE_INTERVAL_S

    async def _scrape(
        self, instance: Instance, pool: ConnectionPool, previous: LatencySums | None
    ) -> LatencySums | None:
        requested_at_s = time.time()
        try:
            status, text = await _get(pool, b"/metrics")
        except LegFailed as failed:
            self._record_missed_probe(instance, pool, failed.failure)
            return None
        if status != 200:
            self._record_missed_probe(instance, pool, "status")
            return None
        if instance.connection_pool is not pool:
            return None  # it has moved meanwhile: this is another engine's word
        instance.missed_probes = 0
        instance.engine_requests, instance.engine_read_at_s = read_request_count(text), requested_at_s
        instance.kv_usage = sum_samples(text, _KV_USAGE)
        instance.expired_transfers = sum_samples(text, _KV_EXPIRED)
        _update_block_size(instance, text)
        seconds, count = sum_samples(text, _ITL_SUM), sum_samples(text, _ITL_COUNT)
        if seconds is None or count is None:
            instance.itl_s = None
            return None
        ledger = instance.ledger
        sums = LatencySums(seconds, count, 0 if ledger.prefill_tokens else ledger.decode_tokens)
        instance.itl_s = sums.mean_since(previous)
        if instance.itl_s and previous and previous.batch_tokens and sums.batch_tokens:
            # A second's latency belongs to that second's batch. With the batch at its end alone, every burst
            # that had just ended would teach that tokens cost nothing, and no flip to decode be wanted.
            instance.learn_decode(
                tokens=(previous.batch_tokens + sums.batch_tokens) // 2, itl_s=instance.itl_s
            )
        return sums

    def _record_missed_probe(self, instance: Instance, pool: ConnectionPool, reason: str) -> None:
        if instance.connection_pool is not pool:
            return  # it has moved meanwhile
        instance.missed_probes += 1
        instance.itl_s = instance.kv_usage = instance.engine_requests = None
        if instance.missed_probes < MISSED_PROBES_TO_EJECT and reason != Failure.UNREACHABLE:
            return
        if instance.health.record_failure(
            time.monotonic(), eject_now=True, unresponsive=reason in NO_RESPONSE_FAILURES
        ):
            self._router.record_ejection(instance, f"probe_{reason}")

    async def _probe_ejected(self, instance: Instance) -> None:
        """Ask an ejected instance for its health; an answer brings it back."""
        pool = instance.connection_pool
        if pool is None or time.monotonic() < instance.health.probe_at_s:
            return
        unresponsive = False
        try:
            status, _ = await _get(pool, b"/health")
        except LegFailed as failed:
            status, unresponsive = 0, failed.failure in NO_RESPONSE_FAILURES
        if instance.connection_pool is not pool:
            return
        if status != 200:
            instance.missed_probes += 1
            instance.health.record_failed_probe(time.monotonic(), unresponsive=unresponsive)
            return
        instance.missed_probes = 0
        if instance.health.record_success():
            instance.update_serving()
            log.info("instance back", instance=instance.name)


def read_request_count(text: bytes) -> int | None:
    """How many requests run or wait in an engine, by its exposition; None if it does not say."""
    running, waiting = sum_samples(text, _RUNNING), sum_samples(text, _WAITING)
    return None if running is None or waiting is None else int(running + waiting)


def read_block_size(text: bytes) -> int | None:
    """The engine's own word on the size of its KV blocks, in tokens; None: it does not say."""
    start = text.find(_CACHE_CONFIG) + 1
    found = _BLOCK_SIZE.search(text, start, text.find(b"\n", start)) if start else None
    return int(found[1]) if found else None


def _update_block_size(instance: Instance, text: bytes) -> None:
    size, identity = read_block_size(text), instance.identity
    if size is None or size == instance.reported_block_size:
        return
    instance.reported_block_size = size
    if identity is not None and identity.block_size != size:
        declared = identity.block_size
        log.warning(
            "engine has other blocks than is declared", instance=instance.name, actual=size, declared=declared
        )
        instance.set_identity(identity)


async def fetch_expired_transfers(instance: Instance) -> float | None:
    """How many hand-offs the instance has let expire; None if it does not say."""
    pool = instance.connection_pool
    if pool is None:
        return None
    try:
        status, text = await _get(pool, b"/metrics")
    except LegFailed:
        return None
    return sum_samples(text, _KV_EXPIRED) if status == 200 and instance.connection_pool is pool else None


async def _get(pool: ConnectionPool, path: bytes) -> tuple[int, bytes]:
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, pool.address)
    request = send_request(
        pool,
        head,
        b"",
        connect_timeout_s=PROBE_TIMEOUT_S,
        response_timeout_s=PROBE_TIMEOUT_S,
        retryable=False,
    )
    status, content, _ = await run_inline(request)
    return status, content
