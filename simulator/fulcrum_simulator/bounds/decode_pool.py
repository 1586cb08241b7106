"""Decode instances as one pool that is always evenly loaded, stepped in closed form between two changes.

A step on k instances takes t0 + (d1·B + d2·Σctx)/min(k, B) seconds, and each of the B requests gets a token.
`split_queue` uses it as the decode half of its model.
"""

import heapq
import math
from collections import deque
from typing import NamedTuple

from fulcrum_core.profiles import EngineProfile


class Decode(NamedTuple):
    """A request that has its first token: when, the context so far, and the tokens left, at least 1."""

    first_token_s: float
    context_tokens: int
    tokens: int

    @property
    def reserved_tokens(self) -> int:
        """KV cache that the request needs at its end."""
        return self.context_tokens + self.tokens


class DecodePool:
    """The decoding requests at one time. Requests enter in order, each once its whole context fits."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._waiting: deque[Decode] = deque()
        self._running: list[tuple[float, Decode]] = []  # a heap by the last step of the request
        self._now_s = 0.0
        self._step = 0.0  # steps so far; within a step a fraction
        self._context_tokens = 0.0
        self._reserved_tokens = 0

    def copy(self) -> "DecodePool":
        """Return an independent pool of the same state."""
        other = DecodePool(self._profile)
        other._waiting, other._running = self._waiting.copy(), self._running.copy()
        other._now_s, other._step = self._now_s, self._step
        other._context_tokens, other._reserved_tokens = self._context_tokens, self._reserved_tokens
        return other

    def add(self, decode: Decode, instances: int) -> None:
        """Add a request at the time up to which `advance` has run."""
        self._waiting.append(decode)
        self._admit(instances)

    def advance(self, until_s: float, instances: int) -> list[float]:
        """Run until `until_s`; returns the TPOT of each request that ended."""
        tpots_s: list[float] = []
        while self._running:
            last_step, decode = self._running[0]
            end_s = self._now_s + self._duration_s(last_step - self._step, instances)
            if end_s > until_s:
                self._move(self._steps_within(until_s - self._now_s, instances))
                break
            heapq.heappop(self._running)
            self._move(last_step - self._step, ended=1)
            self._context_tokens -= decode.reserved_tokens
            self._reserved_tokens -= decode.reserved_tokens
            self._now_s = end_s
            tpots_s.append((end_s - decode.first_token_s) / decode.tokens)
            self._admit(instances)
        self._now_s = max(self._now_s, until_s)
        return tpots_s

    def expected_tpots_s(self, instances: int) -> list[float]:
        """Return the TPOT of each request if steps took as long as now, those that wait starting now."""
        step_s = self._duration_s(1, instances) if self._running else self._profile.t0
        left = [(last_step - self._step, decode) for last_step, decode in self._running]
        left += [(decode.tokens, decode) for decode in self._waiting]
        return [
            (self._now_s + steps * step_s - decode.first_token_s) / decode.tokens for steps, decode in left
        ]

    def remaining_work_s(self) -> float:
        """Return by how many seconds the remaining tokens of all requests make one instance's steps longer.

        The fixed time of a step is not among them.
        """
        steps = sum(last_step - self._step for last_step, _ in self._running)
        steps += sum(decode.tokens for decode in self._waiting)
        context = self._context_tokens / len(self._running) if self._running else 0.0
        return steps * (self._profile.d1 + self._profile.d2 * context)

    def _admit(self, instances: int) -> None:
        profile = self._profile
        while self._waiting and len(self._running) < instances * profile.max_seqs:
            decode = self._waiting[0]
            reserved = self._reserved_tokens + decode.reserved_tokens
            if reserved > instances * profile.kv_capacity_tokens and self._running:
                return
            self._waiting.popleft()
            heapq.heappush(self._running, (self._step + decode.tokens, decode))
            self._context_tokens += decode.context_tokens
            self._reserved_tokens = reserved

    def _move(self, steps: float, *, ended: int = 0) -> None:
        """Count `steps` for the running requests, `ended` of which have just been taken out."""
        self._step += steps
        self._context_tokens += steps * (len(self._running) + ended)

    def _coefficients(self, instances: int) -> tuple[float, float]:
        """Return the first step's duration and by how much each further one is longer."""
        batch = len(self._running)
        share = min(instances, batch)
        first_s = (
            self._profile.t0 + (self._profile.d1 * batch + self._profile.d2 * self._context_tokens) / share
        )
        return first_s, self._profile.d2 * batch / share

    def _duration_s(self, steps: float, instances: int) -> float:
        first_s, growth_s = self._coefficients(instances)
        return (first_s + growth_s * steps / 2) * steps

    def _steps_within(self, seconds: float, instances: int) -> float:
        """Solve growth/2·x² + first·x = seconds for x."""
        first_s, growth_s = self._coefficients(instances)
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * seconds))
