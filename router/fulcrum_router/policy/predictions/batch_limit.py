"""Finds how many requests the engines of a pool decode together (max_num_seqs), from their own counts.

No engine reports this limit. An engine whose batch is full runs the same number of requests in each probe
while others wait for a place. One probe proves nothing: the request may wait for the next step. Three probes
may be equal by chance: a limit is forgotten when an engine runs more requests, and when no full batch has
shown it for some time.

The router's `EngineProber` and the simulator's router call `BatchLimits`. Dispatch reads `max_seqs` of an
instance, and so does the autoscaler, from the router's state.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fulcrum_core.values import Role
from fulcrum_router.policy.instance_record import InstanceRecord

PROBES_MIN = 3
"""Consecutive probes in which requests wait and as many run as before."""
RUNNING_MIN, RUNNING_MAX = 32, 16_384
"""A smaller batch is never taken for a full one: few requests often stay as many by chance, and such a limit
would hold instances in decode for good. A larger count is not believed."""
KV_WAITING = 0.8
"""Share of the KV cache above which a request that waits may wait for blocks."""
MEMORY_S = 900.0
"""Time for which a limit is believed after the last full batch: a false one, or one from before the engines
were started with another option, ends then."""


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """One instance: in its last `probes` probes, `running` requests ran while others waited."""

    running: int
    probes: int
    read_at_s: float


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """What is known of the engines of one pool."""

    max_seqs: int | None = None
    """Requests that an engine decodes together; None: not known."""
    shown_at_s: float = -math.inf
    """When a full batch last showed it, on the caller's clock."""
    steady: tuple[tuple[str, SteadyBatch], ...] = ()
    """Steady batch of each instance, by name."""

    def observe(self, decode: Sequence[InstanceRecord], *, now_s: float) -> "BatchLimit":
        """Return the limit after these probes.

        A full batch that no instance exceeds replaces an unknown or smaller limit. A known one stays until an
        instance runs more, or until no full batch has shown it for `MEMORY_S`.
        """
        before = dict(self.steady)
        steady = {
            instance.name: batch
            for instance in decode
            if (batch := _follow(before.get(instance.name), instance, now_s)) is not None
        }
        most_running = count_most_running(decode)
        full = max((batch.running for batch in steady.values() if batch.probes >= PROBES_MIN), default=0)
        known, shown_at_s = self.max_seqs, self.shown_at_s
        if known is not None and (known < most_running or now_s - shown_at_s > MEMORY_S):
            known = None
        if full and full >= max(most_running, known or 0):
            known, shown_at_s = full, now_s
        return BatchLimit(known, shown_at_s, tuple(steady.items()))


def count_most_running(decode: Iterable[InstanceRecord]) -> int:
    """Return the largest number of requests that one of these engines runs, among those that make tokens."""
    return max(map(_count_running, decode), default=0)


def _count_running(instance: InstanceRecord) -> int:
    running = instance.engine_running or 0
    return running if instance.itl_s is not None and running <= RUNNING_MAX else 0


def _follow(before: SteadyBatch | None, instance: InstanceRecord, now_s: float) -> SteadyBatch | None:
    """Count one more probe with the same batch, if it is a new probe.

    None if the batch cannot be a full one: no request waits or decodes, a request may wait for a prompt or
    for KV blocks, or too few run.
    """
    if not instance.engine_waiting or instance.itl_s is None:
        return None
    if before is not None and instance.engine_read_at_s == before.read_at_s:
        return before
    if instance.ledger.has_uncomputed_prompt(now_s) or (instance.kv_usage or 0.0) >= KV_WAITING:
        return None
    running = _count_running(instance)
    if running < RUNNING_MIN:
        return None
    probes = before.probes + 1 if before is not None and before.running == running else 1
    return SteadyBatch(running, probes, instance.engine_read_at_s)


class BatchLimits:
    """The limits of all pools, whose engines usually run on the same hardware with the same options."""

    def __init__(self) -> None:
        self._by_pool: dict[str, BatchLimit] = {}

    def observe(self, instances: Iterable[InstanceRecord], *, now_s: float) -> None:
        """Learn from the last probe of each instance, and set `max_seqs` and `max_seqs_shown` of all of them.

        A pool whose limit is not known has the smallest known one, or as many places as one of its engines
        uses: dispatch would prefer instances without a limit to all that are full. That is no limit for the
        autoscaler, which moves instances by it: one bad engine would bend the split of all pools.
        """
        pools: defaultdict[str, list[InstanceRecord]] = defaultdict(list)
        for instance in instances:
            pools[instance.pool].append(instance)
        decode = {
            pool: [i for i in members if i.serving and i.role is not Role.PREFILL]
            for pool, members in pools.items()
        }
        self._by_pool = {
            pool: self._by_pool.get(pool, BatchLimit()).observe(decode[pool], now_s=now_s) for pool in pools
        }
        smallest = min((limit.max_seqs for limit in self._by_pool.values() if limit.max_seqs), default=None)
        for pool, members in pools.items():
            max_seqs = shown = self._by_pool[pool].max_seqs
            if max_seqs is None and smallest is not None:
                max_seqs = max(smallest, count_most_running(decode[pool]))
            for instance in members:
                instance.max_seqs, instance.max_seqs_shown = max_seqs, shown
