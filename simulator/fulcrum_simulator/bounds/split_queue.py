"""A quick model of instances that are split into prefill and decode, good enough to compare splits with.

It assumes that prompts are served first come, first served, each alone on the prefill instance that is free
first; that requests then decode in one evenly loaded pool (`decode_pool`) after their KV transfer; and that
an instance changes its role at once and at no cost, where a prompt under way still ends on it. TTFT ends with
the prompt, so the KV transfer is part of TPOT. Engine schedules, control delays and whatever a router cannot
know are left to a simulation of the engines.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fulcrum_simulator.bounds.decode_pool import Decode, DecodePool
from fulcrum_simulator.bounds.fleet import UniformFleet
from fulcrum_simulator.workload.requests import WorkloadRequest


class Task(NamedTuple):
    """What the model needs of one request, except for its arrival."""

    prefill_s: float
    transfer_s: float
    input_tokens: int
    decodes: int


def make_tasks(requests: Iterable[WorkloadRequest], fleet: UniformFleet) -> list[Task]:
    """Return a task for each request."""
    profile = fleet.profile
    return [
        Task(
            fleet.prefill_alone_s(request),
            profile.link_setup_s
            + request.input_tokens * profile.kv_bytes_per_token / profile.link_bytes_per_s,
            request.input_tokens,
            request.output_tokens - 1,
        )
        for request in requests
    ]


class SplitQueue:
    """State of the model at one time: `advance` moves it on under a split, `copy` branches it."""

    def __init__(self, tasks: Sequence[Task], arrivals_s: Sequence[float], fleet: UniformFleet) -> None:
        self._tasks, self._arrivals_s, self._fleet = tasks, arrivals_s, fleet
        self._pool = DecodePool(fleet.profile)
        self._next = 0  # the first request whose prompt has not begun
        self._free_s: list[float] = []  # a heap: when each prefill instance is free
        self._left_s = [0.0] * fleet.instances  # a heap: the same of the decode instances
        self._ready: list[tuple[float, float, int]] = []  # a heap: end of transfer, first token, request
        self._now_s = 0.0
        self.late = 0

    def copy(self) -> "SplitQueue":
        """Return an independent state of the same time."""
        other = SplitQueue(self._tasks, self._arrivals_s, self._fleet)
        other._pool, other._next = self._pool.copy(), self._next
        other._free_s, other._left_s = self._free_s.copy(), self._left_s.copy()
        other._ready = self._ready.copy()
        other._now_s, other.late = self._now_s, self.late
        return other

    def advance(self, prefill: int, until_s: float) -> None:
        """Run until `until_s` with `prefill` prefill instances; the others decode."""
        self._set_prefill(prefill)
        self._start_prompts(until_s)
        decode = self._fleet.instances - prefill
        while self._ready and self._ready[0][0] <= until_s:
            ready_s, first_s, index = heapq.heappop(self._ready)
            self._count_decodes(self._pool.advance(ready_s, decode))
            task = self._tasks[index]
            self._pool.add(Decode(first_s, task.input_tokens + 1, task.decodes), decode)
        self._count_decodes(self._pool.advance(until_s, decode))
        self._now_s = until_s

    def rank(self, prefill: int) -> tuple[int, float]:
        """Return how bad the state is: requests that are late or will be, then the work that waits."""
        waiting = self._prompts_waiting()
        late = self.late + self._count_late_prompts(waiting)
        slo_s = self._fleet.slo.tpot_s
        late += sum(tpot_s > slo_s for tpot_s in self._pool.expected_tpots_s(self._fleet.instances - prefill))
        prompts_s = sum(self._tasks[index].prefill_s for index in waiting)
        running_s = sum(max(0.0, free_s - self._now_s) for free_s in self._free_s)
        return late, prompts_s + running_s + self._pool.remaining_work_s()

    def _set_prefill(self, prefill: int) -> None:
        """Take away or add the instances that are free first; one that returns may still compute a prompt."""
        while len(self._free_s) > prefill:
            heapq.heappush(self._left_s, heapq.heappop(self._free_s))
        while len(self._free_s) < prefill:
            heapq.heappush(self._free_s, max(self._now_s, heapq.heappop(self._left_s)))

    def _start_prompts(self, until_s: float) -> None:
        slo_s = self._fleet.slo.ttft_s
        while self._next < len(self._tasks):
            arrival_s, task = self._arrivals_s[self._next], self._tasks[self._next]
            start_s = max(arrival_s, self._free_s[0])
            if start_s >= until_s:
                return
            end_s = start_s + task.prefill_s
            heapq.heapreplace(self._free_s, end_s)
            in_time = end_s - arrival_s <= slo_s
            self.late += not in_time
            if task.decodes:
                # A late prompt is decoded, too, but counted once: its TPOT from infinity is never late.
                first_s = end_s if in_time else math.inf
                heapq.heappush(self._ready, (end_s + task.transfer_s, first_s, self._next))
            self._next += 1

    def _count_decodes(self, tpots_s: Iterable[float]) -> None:
        self.late += sum(tpot_s > self._fleet.slo.tpot_s for tpot_s in tpots_s)

    def _prompts_waiting(self) -> range:
        end = self._next
        while end < len(self._tasks) and self._arrivals_s[end] <= self._now_s:
            end += 1
        return range(self._next, end)

    def _count_late_prompts(self, waiting: range) -> int:
        free_s, late = self._free_s.copy(), 0
        for index in waiting:
            end_s = max(self._now_s, free_s[0]) + self._tasks[index].prefill_s
            heapq.heapreplace(free_s, end_s)
            late += end_s - self._arrivals_s[index] > self._fleet.slo.ttft_s
        return late
