"""Finds how many requests an engine decodes together, from its own counts. Used by `balanced`.

No engine reports this limit. An engine whose batch is full runs the same number of requests in each probe
while others wait. One probe proves nothing: the request may wait for the next step, or for its KV. With many
instances, three probes may be equal by chance: a limit is forgotten when an engine runs more requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_core.router_state import InstanceState

PROBES_MIN = 3
"""Consecutive probes in which requests wait and as many run as before."""
RUNNING_MIN = 32
"""A smaller batch is never taken for a full one: few requests often stay as many by chance, and such a limit
would hold instances in decode for good."""
KV_WAITING = 0.8
"""Share of the KV cache above which a request that waits may wait for blocks."""


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """One instance: in its last `probes` probes, `running` requests ran while others waited."""

    running: int
    probes: int
    read_at_s: float


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """Requests that an engine decodes together; infinite: not known, no batch was full."""

    requests: float = math.inf
    steady: tuple[tuple[str, SteadyBatch], ...] = ()
    """Steady batch of each instance, by name."""

    def observe(self, decode: Sequence[InstanceState]) -> "BatchLimit":
        """Return the limit that follows from these states: the largest full batch that none exceeds now."""
        before = dict(self.steady)
        steady = {
            state.name: batch
            for state in decode
            if (batch := _follow(before.get(state.name), state)) is not None
        }
        most_running = max(map(_count_running, decode), default=0)
        full = (float(batch.running) for batch in steady.values() if batch.probes >= PROBES_MIN)
        known = [limit for limit in (self.requests, *full) if most_running <= limit < math.inf]
        return BatchLimit(max(known, default=math.inf), tuple(steady.items()))


def _count_running(state: InstanceState) -> int:
    return 0 if state.engine_requests is None else state.engine_requests - (state.engine_waiting or 0)


def _follow(before: SteadyBatch | None, state: InstanceState) -> SteadyBatch | None:
    """Count one more probe with the same batch, if it is a new probe.

    None if the batch cannot be a full one: no request waits, a request may wait for a prompt or for KV
    blocks, or fewer than `RUNNING_MIN` run.
    """
    if before is not None and state.engine_read_at_s <= before.read_at_s:
        return before
    if not state.engine_waiting or state.engine_requests is None:
        return None
    if state.prefill_tokens or (state.kv_usage or 0.0) >= KV_WAITING:
        return None
    running = _count_running(state)
    if running < RUNNING_MIN:
        return None
    probes = before.probes + 1 if before is not None and before.running == running else 1
    return SteadyBatch(running, probes, state.engine_read_at_s)


UNKNOWN_LIMIT = BatchLimit()
"""The limit before any full batch was seen."""
