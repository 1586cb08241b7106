"""The engine model: vLLM-V1-like steps over a paged KV cache, on the caller's clock.

A step decodes every running request first, then fills the token budget with prompt chunks: those begun
earlier, then the waiting queue by (priority, arrival, sequence). A prompt's blocks are taken when it is
admitted (vLLM's `scheduler-reserve-full-isl`), a decode's one by one; when none is free, the running
request that is last in order loses its blocks and computes again later. What output tokens mean is left to
the caller: a token names the prompt whose KV cache it follows from.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile
from fulcrum_simulator.engine.blocks import BlockPool, Prompt
from fulcrum_simulator.engine.events import (
    EngineDead,
    Event,
    FetchStart,
    Finished,
    FinishReason,
    KvExport,
    Preempted,
    Step,
    TokenOut,
)
from fulcrum_simulator.engine.leases import HEARTBEATS_PER_LEASE, Leases
from fulcrum_simulator.engine.requests import EngineRequest, ExportKv, ImportKv
from fulcrum_simulator.engine.run import Order, Run, RunState
from fulcrum_simulator.engine.stats import EngineStats, Gauges


class Engine:
    """One engine instance on the caller's clock.

    The caller's loop: `step = start_step(now)`, then `take_fetches()`; wait `step.duration_s`;
    `finish_step(now)` returns the events; again. With no step to run (None), wait for a submit, a fetch's
    end or `next_deadline_s`. Everything but `start_step` may be called while a step is under way. After
    EngineDead nothing may be called but `dead`, `stats` and `gauges`.
    """

    def __init__(
        self,
        profile: EngineProfile,
        *,
        engine_id: str,
        lease_s: float = 30.0,
        step_noise: Callable[[], float] | None = None,
    ) -> None:
        """`engine_id` must be new at every start. `step_noise` gives a factor on each step's duration."""
        self.profile = profile
        self.engine_id = engine_id
        self.stats = EngineStats()
        self.dead = False  # an assertion of the real engine failed
        self.busy = False  # a step is under way
        self._model = profile.step_model
        self._noise = step_noise
        self._lease_s = lease_s
        self._pool = BlockPool(profile.kv_blocks)
        self._leases = Leases(lease_s)
        self._runs: dict[str, Run] = {}
        self._submitted = 0
        self._waiting: list[tuple[Order, Run]] = []  # a heap; aborted runs are skipped when met
        self._ready: deque[Run] = deque()
        self._prefilling: list[Run] = []
        self._decoding: list[Run] = []
        self._chunks: list[tuple[Run, int]] = []  # of the step under way
        self._preempted: list[Preempted] = []
        self._fetches: list[FetchStart] = []

    # The caller's requests

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. InvalidInput for what cannot run: empty, too long for the cache, an id in use."""
        self._require_runnable(request)
        run = self._runs[request.id] = Run(request, self._submitted)
        self._submitted += 1
        heapq.heappush(self._waiting, (run.order, run))

    def _require_runnable(self, request: EngineRequest) -> None:
        most = self._pool.size * self.profile.block_size
        limits = {"prompt_tokens": request.prompt_tokens, "max_tokens": request.max_tokens}
        if request.stop_after is not None:
            limits["stop_after"] = request.stop_after
        for path, tokens in limits.items():
            if tokens < 1:
                raise InvalidInput(path, tokens, "must be at least 1")
        if request.prompt_tokens + request.max_tokens > most:
            rule = f"and max_tokens ({request.max_tokens}) exceed the KV cache of {most} tokens"
            raise InvalidInput("prompt_tokens", request.prompt_tokens, rule)
        if request.id in self._runs:
            raise InvalidInput("request id", request.id, "is in use")

    def abort(self, request_id: str, now_s: float) -> Finished | None:
        """End a request now and free what it holds; None if there is none of that id (it finished already).

        Its token of a step under way is lost. EngineDead if its import lacks the peer's request id.
        """
        self.expire_leases(now_s)
        run = self._runs.get(request_id)
        if run is None:
            return None
        handoff = run.request.handoff
        if run.state is RunState.FETCHING and isinstance(handoff, ImportKv) and handoff.request_id is None:
            self._die("a hand-off without remote_request_id was given up")
        self._leave(run)
        return self._end(run, FinishReason.ABORT, None, now_s)

    # Steps

    def start_step(self, now_s: float) -> Step | None:
        """Schedule the next step; None if there is nothing to compute. EngineDead on a malformed import."""
        if self.dead:
            raise EngineDead("the engine is dead")
        if self.busy:
            raise RuntimeError("a step is under way: finish it first")
        self.expire_leases(now_s)
        evicted = self._room_for_decodes()
        self._chunks.clear()
        budget = self._continue_prefills(self.profile.token_budget - len(self._decoding))
        if not evicted or not (self._decoding or self._chunks):  # as vLLM, admit nobody beside an eviction
            self._admit(budget, now_s)
        if not self._decoding and not self._chunks:
            return None
        self.busy = True
        return self._measure()

    def finish_step(self, now_s: float) -> list[Event]:
        """End the step under way: its preemptions first, then tokens, then the ends of requests."""
        if not self.busy:
            raise RuntimeError("no step is under way: start one first")
        self.expire_leases(now_s)
        self.busy = False
        events: list[Event] = [event for event in self._preempted if event.request_id in self._runs]
        self._preempted.clear()
        ended = self._finish_decodes(events, now_s)
        for run, chunk in self._chunks:
            if run.state is RunState.PREFILLING and self._finish_chunk(run, chunk, events, now_s):
                ended.append(run)
        events.extend(self._complete(run, now_s) for run in ended)
        return events

    # The taker's side of a hand-off

    @property
    def heartbeat_interval_s(self) -> float:
        """How often a taker tells the giver that it still wants the blocks: a sixth of the lease."""
        return self._lease_s / HEARTBEATS_PER_LEASE

    def take_fetches(self) -> list[FetchStart]:
        """KV fetches accepted since last asked; ask after every start_step, also when it gave None."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def kv_fetch_done(self, request_id: str, digest: bytes, now_s: float) -> None:
        """The blocks arrived and hold the prompt with this digest (`held_digest` of what was read).

        Only the prompt's last token is computed here. A request that is gone or does not fetch is ignored.
        """
        self.expire_leases(now_s)
        run = self._fetching(request_id)
        if run is None:
            return
        first = run.computed // self.profile.block_size
        arrived = run.blocks[first:]
        if digest != run.prompt.digest:
            self._pool.overwrite(arrived, Prompt(digest, ()), first)
            run.digest = digest
        self._pool.remember(run.prompt, arrived, first)
        run.external = run.request.prompt_tokens - run.computed
        run.computed = run.request.prompt_tokens - 1
        self.stats.external_hits += run.external
        self._make_ready(run)

    def kv_fetch_failed(self, request_id: str, now_s: float) -> None:
        """The pull failed: count it and compute the prompt here (kv_load_failure_policy=recompute)."""
        self.expire_leases(now_s)
        run = self._fetching(request_id)
        if run is not None:
            self.stats.failed_transfers += 1
            self._make_ready(run)

    # The giver's side of a hand-off

    def heartbeat(self, request_id: str, now_s: float) -> bool:
        """A taker still wants its blocks: at least 2/3 lease_s from now. False if the lease is gone."""
        self.expire_leases(now_s)
        return self._leases.extend(request_id, now_s)

    def notify_pulled(self, request_id: str, now_s: float) -> bool:
        """The taker has read its blocks, or will not: free them. False, and counted, if the lease is gone."""
        self.expire_leases(now_s)
        blocks = self._leases.end(request_id)
        if blocks is None:
            self.stats.notifications_after_expiry += 1
            return False
        self._pool.release(blocks)
        return True

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of leases that ran out; every call that is given a time does this first."""
        for blocks in self._leases.expire(now_s):
            self.stats.kv_expired += 1
            self._pool.release(blocks)

    def next_deadline_s(self) -> float | None:
        """When the next lease runs out; None without leases."""
        return self._leases.next_deadline_s()

    def read_blocks(self, block_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        """Per block the digest of the prompt whose KV it holds now, as a peer reads it; no lease is checked.

        InvalidInput for a block that does not exist.
        """
        return self._pool.read(block_ids)

    # What is seen from outside

    @property
    def gauges(self) -> Gauges:
        """What it holds now."""
        waiting = [run for _, run in self._waiting if run.state is RunState.WAITING]
        ready = sum(run.state is RunState.READY for run in self._ready)
        fetching = sum(run.state is RunState.FETCHING for run in self._runs.values())
        return Gauges(
            running=len(self._prefilling) + len(self._decoding),
            waiting_capacity=len(waiting) + ready,
            waiting_deferred=fetching,
            fetch_waiting_to_start=sum(run.fetch is not None for run in waiting),
            fetch_in_progress=fetching,
            fetch_completed_waiting=ready,
            kv_usage=1 - self._pool.available / self._pool.size,
            leases=len(self._leases),
        )

    # Scheduling

    def _room_for_decodes(self) -> bool:
        """A block for each decode that outgrows its own; True if others were evicted, last in order first."""
        evictions = self.stats.preemptions
        for run in [run for run in self._decoding if run.computed == run.room]:
            while run.state is RunState.DECODING and not self._pool.available:
                self._preempt(max(self._decoding + self._prefilling, key=lambda victim: victim.order))
            if run.state is RunState.DECODING:
                run.blocks += self._pool.take(1, run.prompt, len(run.blocks))
                run.room += self.profile.block_size
        return self.stats.preemptions > evictions

    def _preempt(self, run: Run) -> None:
        self._leave(run)
        self._pool.release(run.blocks)
        run.blocks, run.room, run.computed = [], 0, 0
        run.state, run.fetch, run.digest = RunState.WAITING, None, run.prompt.digest
        run.preemptions += 1
        self.stats.preemptions += 1
        self._preempted.append(Preempted(run.id))
        heapq.heappush(self._waiting, (run.order, run))

    def _continue_prefills(self, budget: int) -> int:
        """Chunks of prompts begun earlier; the budget that is left."""
        for run in self._prefilling:
            budget -= self._plan_chunk(run, budget)
        return budget

    def _admit(self, budget: int, now_s: float) -> None:
        """Fetched requests, which hold blocks already, then the queue until its head does not fit."""
        while budget > 0 and len(self._prefilling) + len(self._decoding) < self.profile.max_seqs:
            run = self._next_admitted()
            if run is None:
                return
            if run.state is not RunState.FETCHING:
                budget -= self._start_run(run, budget, now_s)

    def _next_admitted(self) -> Run | None:
        """The next request that has its blocks, to run or to fetch; None if none or the head does not fit."""
        while self._ready:
            run = self._ready.popleft()
            if run.state is RunState.READY:
                return run
        while self._waiting and self._waiting[0][1].state is not RunState.WAITING:
            heapq.heappop(self._waiting)
        if not self._waiting or not self._take_blocks(self._waiting[0][1]):
            return None
        return heapq.heappop(self._waiting)[1]

    def _take_blocks(self, run: Run) -> bool:
        """Blocks for all that the next token needs, cached ones first; False if too few are free."""
        size = self.profile.block_size
        needed = -(-run.target // size)
        if run.fetch:
            self._require_remote_blocks(run.fetch, needed)
        prefix = self._pool.find_prefix(run.prompt.hashes, (run.target - 1) // size)
        if not self._pool.fits(prefix, needed - len(prefix)):
            return False
        self._pool.hold(prefix)
        run.blocks = prefix + self._pool.take(needed - len(prefix), run.prompt, len(prefix))
        run.room = needed * size
        run.computed = len(prefix) * size
        run.digest = self._pool.foreign_digest(run.prompt, prefix) or run.prompt.digest
        self._account_prefix(run)
        if run.fetch:
            self._start_fetch(run, run.fetch, len(prefix))
        return True

    def _account_prefix(self, run: Run) -> None:
        """Count a first admission's cache hits; what is computed again after a preemption counts once."""
        if run.first_token_s is None:
            run.cached, run.external = run.computed, 0
        if not run.preemptions:
            self.stats.prefix_queries += run.request.prompt_tokens
            self.stats.prefix_hits += run.computed
            self.stats.external_queries += run.request.prompt_tokens - run.computed

    def _start_run(self, run: Run, budget: int, now_s: float) -> int:
        """Enter the running set; the budget used. With one token left to compute it decodes at once."""
        if run.scheduled_s is None:
            run.scheduled_s = now_s
        if run.target - run.computed == 1:
            run.state = RunState.DECODING
            self._decoding.append(run)
            return 1
        run.state = RunState.PREFILLING
        self._prefilling.append(run)
        return self._plan_chunk(run, budget)

    def _plan_chunk(self, run: Run, budget: int) -> int:
        chunk = min(budget, run.target - run.computed)
        if chunk:
            self._chunks.append((run, chunk))
        return chunk

    def _measure(self) -> Step:
        """The step that is now scheduled, with its duration."""
        prefill_tokens = attention = 0
        for run, chunk in self._chunks:
            prefill_tokens += chunk
            attention += chunk * (2 * run.computed + chunk)
        decodes = len(self._decoding)
        context_tokens = sum([run.computed for run in self._decoding]) + decodes
        duration_s = self._model.step_of_sums_s(
            prefill_tokens=prefill_tokens, attention=attention, decodes=decodes, context_tokens=context_tokens
        )
        self.stats.steps += 1
        self.stats.samples.iteration_tokens.append(prefill_tokens + decodes)
        return Step(
            duration_s=duration_s * self._noise() if self._noise else duration_s,
            prefill_tokens=prefill_tokens,
            decodes=decodes,
            context_tokens=context_tokens,
        )

    # Hand-offs

    def _require_remote_blocks(self, fetch: ImportKv, needed: int) -> None:
        """The real engine asserts this in its scheduler, and is gone when it does not hold."""
        if fetch.block_ids is None:
            self._die("a hand-off came without remote_block_ids")
        if needed > len(fetch.block_ids):
            self._die(f"a prompt of {needed} KV blocks was handed over in {len(fetch.block_ids)}")

    def _start_fetch(self, run: Run, fetch: ImportKv, prefix_blocks: int) -> None:
        run.state, run.fetch = RunState.FETCHING, None
        if fetch.request_id is None or fetch.block_ids is None:
            return  # the real engine waits for ever
        count = len(run.blocks) - prefix_blocks
        self._fetches.append(
            FetchStart(
                request_id=run.id,
                source=fetch,
                remote_block_ids=fetch.block_ids[-count:],
                tokens=run.request.prompt_tokens - run.computed,
                kv_bytes=count * self.profile.block_size * self.profile.kv_bytes_per_token,
            )
        )

    def _fetching(self, request_id: str) -> Run | None:
        run = self._runs.get(request_id)
        return run if run is not None and run.state is RunState.FETCHING else None

    def _make_ready(self, run: Run) -> None:
        run.state = RunState.READY
        self._ready.append(run)

    def _export(self, run: Run, now_s: float) -> KvExport:
        """Pin the run's blocks under a lease."""
        expires_s = self._leases.grant(run.id, run.blocks, now_s)
        return KvExport(
            request_id=run.id, block_ids=tuple(run.blocks), tokens=run.computed, expires_s=expires_s
        )

    # Ends of steps

    def _finish_decodes(self, events: list[Event], now_s: float) -> list[Run]:
        """One token of each decode; those at their limit. The model's hot loop."""
        ended = []
        itl_s = self.stats.samples.itl_s
        for run in self._decoding:
            run.computed += 1
            index = run.output
            run.output = index + 1
            events.append(TokenOut(run.id, index, run.digest))
            if index:
                itl_s.append(now_s - run.last_token_s)
                run.last_token_s = now_s
            else:
                self._first_token(run, now_s)
            if run.output >= run.limit:
                ended.append(run)
        self.stats.generation_tokens += len(self._decoding)
        return ended

    def _finish_chunk(self, run: Run, chunk: int, events: list[Event], now_s: float) -> bool:
        """Move a prompt on, with a token if that was its last piece; True if it is at its limit."""
        size = self.profile.block_size
        first = run.computed // size
        run.computed += chunk
        self._pool.remember(run.prompt, run.blocks[first : run.computed // size], first)
        if run.computed < run.target:
            return False
        self._prefilling.remove(run)
        self._decoding.append(run)
        run.state = RunState.DECODING
        events.append(TokenOut(run.id, run.output, run.digest))
        if run.output:
            self.stats.samples.itl_s.append(now_s - run.last_token_s)
            run.last_token_s = now_s
        else:
            self._first_token(run, now_s)
        run.output += 1
        self.stats.generation_tokens += 1
        return run.output >= run.limit

    def _first_token(self, run: Run, now_s: float) -> None:
        run.first_token_s = run.last_token_s = now_s
        self.stats.samples.ttft_s.append(now_s - run.request.arrival_s)
        self.stats.prompt_local_cache_hit += run.cached
        self.stats.prompt_external += run.external
        self.stats.prompt_local_compute += run.request.prompt_tokens - run.cached - run.external

    def _complete(self, run: Run, now_s: float) -> Finished:
        """A run reached its limit: free its blocks, or pin them for its taker."""
        self._leave(run)
        if not isinstance(run.request.handoff, ExportKv):
            return self._end(run, run.end_reason, None, now_s)
        export = self._export(run, now_s)
        run.blocks = []
        return self._end(run, run.end_reason, export, now_s)

    def _leave(self, run: Run) -> None:
        """Leave the running set, where the run is in it; queues drop it when they meet it."""
        if run.state is RunState.DECODING:
            self._decoding.remove(run)
        elif run.state is RunState.PREFILLING:
            self._prefilling.remove(run)

    def _end(self, run: Run, reason: FinishReason, export: KvExport | None, now_s: float) -> Finished:
        self._pool.release(run.blocks)
        run.blocks = []
        run.state = RunState.ENDED
        del self._runs[run.id]
        self.stats.finished[reason] += 1
        return run.ended(reason, export, now_s)

    def _die(self, why: str) -> NoReturn:
        self.dead = True
        raise EngineDead(why)
