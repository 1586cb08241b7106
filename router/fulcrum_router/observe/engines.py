"""Probe the engines: read their metrics once a second, eject those that do not respond, readmit healthy ones.

An ejected instance gets requests for `/health` instead, at growing intervals. `EngineProber.run` also calls
`outliers`, which judges the instances that respond. What was read is stored in the instance, and teaches its
latency model of decode. Full batches show how many requests an engine decodes together (`batch_limit`).

The metrics hold what the data path cannot measure: inter-token latency of requests that are not streamed, KV
cache use and size, expired KV transfers, and the requests of other routers. They also show that an engine has
died and was started again: it counts its tokens anew. The longest context is read once, from `/v1/models`. A
probe uses the instance's connection pool, as requests do. Each probe also lets the instance's old errors
decay (`Health.decay`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from fulcrum_router.fleet.engine_metrics import (
    EXPIRED_TRANSFERS,
    ITL_COUNT,
    ITL_SUM,
    KV_USAGE,
    fetch_page,
    read_block_size,
    read_context_tokens,
    read_kv_capacity,
    read_request_counts,
    read_tokens_computed,
    read_wait_causes,
    sum_samples,
)
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.upstream import ConnectionPool
from fulcrum_router.observe.outliers import OutlierDetector
from fulcrum_router.policy.intervals import PROBE_INTERVAL_S
from fulcrum_router.policy.predictions.batch_limit import BatchLimits

log = structlog.get_logger()

MISSED_PROBES_TO_EJECT = 3
"""Failed probes in a row that eject an instance, a refused connection included; one is enough if its host
cannot be reached (`Failure.UNREACHABLE`). One that sends data while probes time out stays."""
NO_RESPONSE_FAILURES = frozenset({Failure.TIMEOUT, Failure.UNREACHABLE, Failure.REFUSED})
"""Failures that mean that the engine does not respond at all."""


@dataclass(frozen=True, slots=True)
class LatencySums:
    """An engine's inter-token latency since its start, as read at one time."""

    seconds: float
    count: float
    batch_tokens: int = 0
    """KV tokens of the decode batch at that time; 0: no batch, or the engine was also computing prompts."""

    def mean_since(self, previous: "LatencySums | None") -> float | None:
        """Compute the mean latency in seconds since `previous`.

        None: nothing to compare with, no tokens, or counters that went back (the engine was restarted).
        """
        if previous is None:
            return None
        count, seconds = self.count - previous.count, self.seconds - previous.seconds
        return seconds / count if count > 0 and seconds >= 0 else None


class EngineProber:
    """Runs one probe task per instance of a fleet.

    Args:
        fleet: Instances to probe, added and removed by others.
        on_ejection: Called with an instance that a probe has ejected, and the reason as a metric label.
        on_death: Called with an instance whose engine has died since its last answered probe; again at each
            probe that finds that.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        on_ejection: Callable[[Instance, str], None],
        on_death: Callable[[Instance], None],
    ) -> None:
        self._fleet, self._on_ejection, self._on_death = fleet, on_ejection, on_death
        self._outliers = OutlierDetector(fleet, on_ejection=on_ejection)
        self._batch_limits = BatchLimits()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Start and stop probe tasks as instances are added and removed, until cancelled."""
        try:
            while True:
                self._sync_tasks()
                self._outliers.tick(time.monotonic())
                self._batch_limits.observe(self._fleet.instances, now_s=time.monotonic())
                await asyncio.sleep(PROBE_INTERVAL_S / 4)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _sync_tasks(self) -> None:
        for instance in self._fleet.instances:
            task = self._tasks.get(instance.name)
            if task is not None and task.done():
                error = None if task.cancelled() else task.exception()
                log.error("probes ended; started again", instance=instance.name, exc_info=error)
            if task is None or task.done():
                self._tasks[instance.name] = asyncio.create_task(self._probe_until_cancelled(instance))
        for name in [name for name in self._tasks if self._fleet.get(name) is None]:
            self._tasks.pop(name).cancel()

    async def _probe_until_cancelled(self, instance: Instance) -> None:
        previous: LatencySums | None = None
        pool: ConnectionPool | None = None
        while True:
            began_s = time.monotonic()
            if instance.connection_pool is not pool:
                pool, previous = (
                    instance.connection_pool,
                    None,
                )  # another engine process, whose sums start at 0
            if instance.health.ejected and not self._serves_ejected_legs(instance):
                await self._probe_ejected(instance)
            elif pool is not None:
                previous = await self._scrape(instance, pool, previous)
            instance.health.decay(time.monotonic())
            instance.update_error_share()
            await asyncio.sleep(max(0.0, self._next_probe_s(instance, began_s) - time.monotonic()))

    @staticmethod
    def _serves_ejected_legs(instance: Instance) -> bool:
        """Whether to go on reading an instance that was ejected by judgement: it still has legs."""
        return instance.health.judged and time.monotonic() < instance.health.probe_at_s

    @staticmethod
    def _next_probe_s(instance: Instance, began_s: float) -> float:
        if instance.health.ejected and not instance.health.judged:
            return max(instance.health.probe_at_s, time.monotonic() + 0.01)
        return began_s + PROBE_INTERVAL_S

    async def _scrape(
        self, instance: Instance, pool: ConnectionPool, previous: LatencySums | None
    ) -> LatencySums | None:
        """Read the metrics of an instance into its record; returns its latency sums."""
        requested_at_s, began_s = time.time(), time.monotonic()
        try:
            status, text = await fetch_page(pool, b"/metrics")
        except LegFailed as failed:
            self._record_missed_probe(instance, pool, failed.failure, began_s=began_s)
            return None
        if status != 200:
            self._record_missed_probe(instance, pool, Failure.STATUS, began_s=began_s)
            return None
        if instance.connection_pool is not pool:
            return None  # the endpoint changed during the request: the response is from another engine
        instance.missed_probes = 0
        _update_counts(instance, text, requested_at_s)
        tokens, tokens_before = read_tokens_computed(text), instance.tokens_computed
        if tokens is not None and tokens_before is not None and tokens < tokens_before:
            self._on_death(instance)  # and was started again since
        instance.record_progress(tokens, now_s=time.monotonic())
        instance.answered_at_s = began_s
        instance.kv_usage = sum_samples(text, KV_USAGE)
        instance.kv_capacity_tokens = read_kv_capacity(text)
        instance.expired_transfers = sum_samples(text, EXPIRED_TRANSFERS)
        _update_block_size(instance, text)
        if previous is None and instance.context_tokens is None:
            await _fetch_context(instance, pool)
        return _update_latency(instance, text, previous)

    def _record_missed_probe(
        self, instance: Instance, pool: ConnectionPool, failure: Failure, *, began_s: float
    ) -> None:
        if instance.connection_pool is not pool:
            return  # the endpoint changed during the request: another engine failed
        instance.itl_s = instance.kv_usage = instance.engine_requests = None
        instance.engine_running = instance.engine_waiting = None
        if failure is Failure.NO_SOCKET:
            return  # of the router, which says nothing about the engine
        if failure is Failure.TIMEOUT and pool.last_streamed_s > began_s:
            instance.missed_probes = 0  # it is slow, but works
            return
        instance.missed_probes += 1
        if failure is Failure.REFUSED:
            self._on_death(instance)
        if instance.missed_probes < MISSED_PROBES_TO_EJECT and failure is not Failure.UNREACHABLE:
            return
        if instance.health.eject(
            now_s=time.monotonic(), judged=False, unresponsive=failure in NO_RESPONSE_FAILURES
        ):
            self._on_ejection(instance, f"probe_{failure}")

    async def _probe_ejected(self, instance: Instance) -> None:
        """Request the health of an ejected instance when its probe is due; status 200 readmits it."""
        pool = instance.connection_pool
        if pool is None or time.monotonic() < instance.health.probe_at_s:
            return
        unresponsive, began_s = False, time.monotonic()
        try:
            status, _ = await fetch_page(pool, b"/health")
        except LegFailed as failed:
            status, unresponsive = 0, failed.failure in NO_RESPONSE_FAILURES
        if instance.connection_pool is not pool:
            return
        if status != 200:
            instance.missed_probes += 1
            instance.health.record_failed_probe(time.monotonic(), unresponsive=unresponsive)
            return
        instance.missed_probes = 0
        # Tokens of an engine that has died meanwhile: that death is known.
        instance.answered_at_s, instance.tokens_computed = began_s, None
        if instance.health.record_probe(now_s=time.monotonic()):
            instance.update_serving()
            log.info("instance readmitted", instance=instance.name)


async def _fetch_context(instance: Instance, pool: ConnectionPool) -> None:
    """Fetch the longest context of an engine, which never changes; without API key it may stay unknown."""
    try:
        status, page = await fetch_page(pool, b"/v1/models")
    except LegFailed:
        return
    if status == 200 and instance.connection_pool is pool:
        instance.context_tokens = read_context_tokens(page)


def _update_latency(instance: Instance, text: bytes, previous: LatencySums | None) -> LatencySums | None:
    seconds, count = sum_samples(text, ITL_SUM), sum_samples(text, ITL_COUNT)
    if seconds is None or count is None:
        instance.itl_s = None
        return None
    batch_tokens = instance.measure_batch()
    sums = LatencySums(seconds, count, batch_tokens)
    itl_s = sums.mean_since(previous)
    instance.itl_s = instance.discount_deflected(itl_s, since_s=time.monotonic() - PROBE_INTERVAL_S)
    if itl_s and previous and previous.batch_tokens and sums.batch_tokens:
        # The latency of a second belongs to the mean batch of that second. With the batch at its end, a burst
        # that has just ended would teach that tokens cost nothing, and no flip to decode would be proposed.
        instance.learn_decode(tokens=(previous.batch_tokens + sums.batch_tokens) // 2, itl_s=itl_s)
    return sums


def _update_counts(instance: Instance, text: bytes, requested_at_s: float) -> None:
    counts, causes = read_request_counts(text), read_wait_causes(text)
    instance.engine_read_at_s = requested_at_s
    instance.engine_requests = None if counts is None else sum(counts)
    instance.engine_running, instance.engine_waiting = counts or (None, None)
    if causes is not None:
        instance.wait_causes.record(fetching=causes[0], queued=causes[1])
        instance.engine_waiting = int(causes[1])


def _update_block_size(instance: Instance, text: bytes) -> None:
    size, identity = read_block_size(text), instance.identity
    if size is None or size == instance.reported_block_size:
        return
    instance.reported_block_size = size
    if identity is not None and identity.block_size != size:
        log.warning(
            "KV block size differs from the PDInstance; using the engine's",
            instance=instance.name,
            engine=size,
            declared=identity.block_size,
        )
        instance.set_identity(identity)
