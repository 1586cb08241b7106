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
from fulcrum_router.http1.inline_task import from_task
from fulcrum_router.http1.upstream import EnginePool, Failure, LegFailed, ask
from fulcrum_router.router import Router

log = structlog.get_logger()

INTERVAL_S = 1.0
PROBE_S = 1.0
MISSED_EJECT = 3
"""Probes without an answer, in a row, that eject an instance: it hangs. One that cannot even connect does."""
SILENT = frozenset({Failure.TIMEOUT, Failure.UNREACHABLE, Failure.REFUSED})
"""Of a probe: whoever waits for the same engine waits in vain."""

_ITL_SUM = b"vllm:inter_token_latency_seconds_sum"
_ITL_COUNT = b"vllm:inter_token_latency_seconds_count"
_KV_USAGE = b"vllm:kv_cache_usage_perc"
_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_CACHE = b"\nvllm:cache_config_info{"
_BLOCK_SIZE = re.compile(rb'\bblock_size="(\d+)"')
_KV_EXPIRED = b"vllm:nixl_num_kv_expired_reqs_total"


def read_sample(text: bytes, name: bytes) -> float | None:
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


class Prober:
    """Keeps one probe running per instance."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        try:
            while True:
                self._follow(self._router.fleet)
                await asyncio.sleep(INTERVAL_S / 4)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _follow(self, fleet: Fleet) -> None:
        for instance in fleet.all:
            if instance.name not in self._tasks:
                self._tasks[instance.name] = asyncio.create_task(self._watch(instance))
        for name in [name for name in self._tasks if fleet.get(name) is None]:
            self._tasks.pop(name).cancel()

    async def _watch(self, instance: Instance) -> None:
        """Probe one instance for as long as it exists."""
        last: LatencySums | None = None
        pool: EnginePool | None = None
        while True:
            began_s = time.monotonic()
            if instance.pool is not pool:
                pool, last = instance.pool, None
            if instance.health.ejected:
                await self._probe_back(instance)
            elif pool is not None:
                last = await self._scrape(instance, pool, last)
            await asyncio.sleep(max(0.0, self._next_s(instance, began_s) - time.monotonic()))

    @staticmethod
    def _next_s(instance: Instance, began_s: float) -> float:
        if instance.health.ejected:
            return max(instance.health.probe_at_s, time.monotonic() + 0.01)
        return began_s + INTERVAL_S

    async def _scrape(
        self, instance: Instance, pool: EnginePool, last: LatencySums | None
    ) -> LatencySums | None:
        asked_s = time.time()
        try:
            status, text = await _get(pool, b"/metrics")
        except LegFailed as failed:
            self._missed(instance, pool, failed.failure)
            return None
        if status != 200:
            self._missed(instance, pool, "status")
            return None
        if instance.pool is not pool:
            return None  # it has moved meanwhile: this is another engine's word
        instance.missed_probes = 0
        instance.engine_requests, instance.engine_read_s = requests_in(text), asked_s
        instance.kv_usage = read_sample(text, _KV_USAGE)
        instance.kv_expired = read_sample(text, _KV_EXPIRED)
        _learn_blocks(instance, text)
        seconds, count = read_sample(text, _ITL_SUM), read_sample(text, _ITL_COUNT)
        if seconds is None or count is None:
            instance.itl_s = None
            return None
        ledger = instance.ledger
        sums = LatencySums(seconds, count, 0 if ledger.prefill_tokens else ledger.decode_tokens)
        instance.itl_s = sums.mean_since(last)
        if instance.itl_s and last and last.batch_tokens and sums.batch_tokens:
            # A second's latency belongs to that second's batch. With the batch at its end alone, every burst
            # that had just ended would teach that tokens cost nothing, and no flip to decode be wanted.
            instance.learn_decode(tokens=(last.batch_tokens + sums.batch_tokens) // 2, itl_s=instance.itl_s)
        return sums

    def _missed(self, instance: Instance, pool: EnginePool, reason: str) -> None:
        if instance.pool is not pool:
            return  # it has moved meanwhile
        instance.missed_probes += 1
        instance.itl_s = instance.kv_usage = instance.engine_requests = None
        if instance.missed_probes < MISSED_EJECT and reason != Failure.UNREACHABLE:
            return
        if instance.health.failed(time.monotonic(), at_once=True, hangs=reason in SILENT):
            self._router.ejected(instance, f"probe_{reason}")

    async def _probe_back(self, instance: Instance) -> None:
        """Ask an ejected instance for its health; an answer brings it back."""
        pool = instance.pool
        if pool is None or time.monotonic() < instance.health.probe_at_s:
            return
        hangs = False
        try:
            status, _ = await _get(pool, b"/health")
        except LegFailed as failed:
            status, hangs = 0, failed.failure in SILENT
        if instance.pool is not pool:
            return
        if status != 200:
            instance.missed_probes += 1
            instance.health.probe_failed(time.monotonic(), hangs=hangs)
            return
        instance.missed_probes = 0
        if instance.health.succeeded():
            instance.refresh()
            log.info("instance back", instance=instance.name)


def requests_in(text: bytes) -> int | None:
    """How many requests run or wait in an engine, by its exposition; None if it does not say."""
    running, waiting = read_sample(text, _RUNNING), read_sample(text, _WAITING)
    return None if running is None or waiting is None else int(running + waiting)


def block_size_in(text: bytes) -> int | None:
    """The engine's own word on the size of its KV blocks, in tokens; None: it does not say."""
    start = text.find(_CACHE) + 1
    found = _BLOCK_SIZE.search(text, start, text.find(b"\n", start)) if start else None
    return int(found[1]) if found else None


def _learn_blocks(instance: Instance, text: bytes) -> None:
    size, identity = block_size_in(text), instance.identity
    if size is None or size == instance.block_size:
        return
    instance.block_size = size
    if identity is not None and identity.block_size != size:
        said = identity.block_size
        log.warning("engine has other blocks than is said", instance=instance.name, has=size, said=said)
        instance.know(identity)


async def expired_handoffs(instance: Instance) -> float | None:
    """How many hand-offs the instance has let expire; None if it does not say."""
    pool = instance.pool
    if pool is None:
        return None
    try:
        status, text = await _get(pool, b"/metrics")
    except LegFailed:
        return None
    return read_sample(text, _KV_EXPIRED) if status == 200 and instance.pool is pool else None


async def _get(pool: EnginePool, path: bytes) -> tuple[int, bytes]:
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, pool.address)
    asking = ask(pool, head, b"", connect_s=PROBE_S, answer_s=PROBE_S, replaceable=False)
    status, content, _ = await from_task(asking)
    return status, content
