"""The engine model: steps like those of vLLM V1 over a paged KV cache, on the caller's clock.

A step computes a token of every decoding request, then fills the token budget: first prefills already begun,
then requests whose KV was fetched, then the waiting queue by (priority, arrival, sequence). All blocks of a
prompt are allocated at its admission (vLLM's `scheduler-reserve-full-isl`), those of its output one by one.
When no block is free, the running request that is last in order is preempted and computed again later. The
text of tokens is left to the caller: a token names the prompt whose KV cache it continues.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile
from fulcrum_simulator.engine.batch import Batch
from fulcrum_simulator.engine.blocks import BlockPool, PromptKey
from fulcrum_simulator.engine.leases import HEARTBEATS_PER_LEASE, Leases
from fulcrum_simulator.engine.outputs import (
    DecodeRun,
    EngineDead,
    EngineEvent,
    ExportedKv,
    Finished,
    FinishReason,
    KvFetch,
    OutputToken,
    Preempted,
    Step,
)
from fulcrum_simulator.engine.request_run import QueueOrder, RequestRun, RequestRunState
from fulcrum_simulator.engine.requests import (
    EngineRequest,
    KvExportRequest,
    KvImportRequest,
    check_runnable,
)
from fulcrum_simulator.engine.stats import EngineGauges, EngineStats
from fulcrum_simulator.engine.step_factors import StepFactors


class Engine:
    """One engine instance.

    The caller's loop: `step = start_step(now)`, `take_kv_fetches()`, wait `step.duration_s`,
    `finish_step(now)` for the events, repeat. If `start_step` returns None, wait for a submit, the end of a
    fetch or `next_lease_expiry_s`. All methods but `start_step` may be called while a step is under way.
    After EngineDead only `dead`, `stats` and `gauges` may be used.
    """

    def __init__(
        self,
        profile: EngineProfile,
        *,
        engine_id: str,
        lease_s: float = 30.0,
        draw_step_factor: Callable[[], float] | None = None,
        tracks_contents: bool = True,
    ) -> None:
        """`engine_id` must be new at every start. `draw_step_factor` returns the factor of a step. Without
        `tracks_contents`, `read_blocks` must not be called.
        """
        self.profile = profile
        self.engine_id = engine_id
        self.stats = EngineStats()
        self.dead = False  # an assertion of the real engine failed
        self.busy = False  # a step is under way
        self._model = profile.step_model
        self._step_factors = StepFactors(draw_step_factor)
        self._lease_s = lease_s
        self._pool = BlockPool(profile.kv_blocks, tracks_contents=tracks_contents)
        self._leases = Leases(lease_s)
        self._runs: dict[str, RequestRun] = {}
        self._next_sequence = 0
        self._waiting: list[tuple[QueueOrder, RequestRun]] = []  # a heap; aborted runs stay until popped
        self._ready: deque[RequestRun] = deque()
        self._batch = Batch()
        self._preempted: list[Preempted] = []
        self._fetches: list[KvFetch] = []

    # The caller's requests

    def submit(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidInput: if the request is empty, too long for the KV cache, or its id is in use.
        """
        check_runnable(request, capacity_tokens=self._pool.size * self.profile.block_size)
        if request.id in self._runs:
            raise InvalidInput("request id", request.id, "is in use")
        run = self._runs[request.id] = RequestRun(request, self._next_sequence)
        self._next_sequence += 1
        heapq.heappush(self._waiting, (run.order, run))

    def abort(self, request_id: str, now_s: float) -> Finished | None:
        """End a request now and free its blocks; None if there is no request of that id.

        A token of the step under way is lost.

        Raises:
            EngineDead: if the request hangs in an import without the prefill instance's request id.
        """
        self.expire_leases(now_s)
        run = self._runs.get(request_id)
        if run is None:
            return None
        kv_transfer, fetching = run.request.kv_transfer, run.state is RequestRunState.FETCHING
        if fetching and isinstance(kv_transfer, KvImportRequest) and kv_transfer.request_id is None:
            self._die("a KV transfer without remote_request_id was aborted")
        self._batch.remove(run)
        return self._end_run(run, FinishReason.ABORT, None, now_s)

    # Steps

    def start_step(self, now_s: float) -> Step | None:
        """Schedule the next step; None if there is nothing to compute.

        Raises:
            EngineDead: if an admitted import is malformed.
        """
        if self.dead:
            raise EngineDead("the engine is dead")
        if self.busy:
            raise RuntimeError("a step is under way: finish it first")
        self.expire_leases(now_s)
        preempted = self._allocate_decode_blocks()
        batch = self._batch
        batch.chunks.clear()
        budget = batch.continue_prefills(self.profile.token_budget - len(batch.decoding))
        # Like vLLM, admit no request in a step with a preemption, unless nothing else would run.
        if not preempted or not (batch.decoding or batch.chunks):
            self._admit(budget, now_s)
        if not batch.decoding and not batch.chunks:
            return None
        self.busy = True
        fetches_s = min(len(self._fetches), self.profile.max_seqs) * self.profile.fetch_start_s
        step = batch.measure_step(self._model, fetches_s=fetches_s, factor=self._step_factors.take())
        self.stats.record_steps(1, tokens=step.prefill_tokens + step.decodes)
        return step

    def finish_step(self, now_s: float, *, continued: list[str] | None = None) -> list[EngineEvent]:
        """End the step under way; returns its events: preemptions, then tokens, then ends of requests.

        With a list `continued`, a token that is neither the first nor the last of its request gives no event:
        the request's id is appended to that list instead.
        """
        if not self.busy:
            raise RuntimeError("no step is under way: start one first")
        self.expire_leases(now_s)
        self.busy = False
        events: list[EngineEvent] = [event for event in self._preempted if event.request_id in self._runs]
        self._preempted.clear()
        ended = self._finish_decodes(events, continued, now_s)
        for run, chunk in self._batch.chunks:
            if run.state is RequestRunState.PREFILLING and self._finish_chunk(run, chunk, events, now_s):
                ended.append(run)
        events.extend(self._complete(run, now_s) for run in ended)
        return events

    def plan_decode_run(self, now_s: float, step: Step, *, steps_max: int) -> DecodeRun:
        """Look ahead from the step that started at `now_s` over the identical steps that follow it.

        The run holds until the next call of another method. It ends at the latest with the step in which a
        request ends, gets its first token or lacks a KV block, or a lease expires.
        """
        ends_s = [now_s + step.duration_s]
        count = 1
        if not self._preempted:
            count = self._batch.count_identical_steps(self._pool, self.profile.block_size, steps_max)
        if count > 1:
            expiry_s = self._leases.earliest_expiry_s
            now_s, context_tokens = ends_s[0], step.context_tokens + step.decodes
            durations_s = self._model.decode_steps_s(
                decodes=step.decodes, context_tokens=context_tokens, steps=count - 1
            )
            for duration_s, factor in zip(durations_s, self._step_factors.peek(count - 1), strict=True):
                if now_s >= expiry_s:
                    break
                now_s += duration_s * factor
                ends_s.append(now_s)
        return DecodeRun(ends_s, [run.id for run in self._batch.decoding])

    def skip_steps(self, ends_s: list[float]) -> None:
        """End the step under way and start the next identical one, once for each of these end times.

        Pass any number of a `DecodeRun.ends_s`, from its first on, but not its last. The effect is that of
        `finish_step` and `start_step` at each of these times, except that the tokens are not returned.
        """
        count, decodes = len(ends_s), len(self._batch.decoding)
        self._batch.allocate_ahead(self._pool, self.profile.block_size, count)
        self.stats.samples.itl_s.extend(self._batch.add_tokens(ends_s))
        self._step_factors.skip(count)
        self.stats.generation_tokens += count * decodes
        self.stats.record_steps(count, tokens=decodes)

    # KV transfer, on the decode instance

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between heartbeats for blocks that a decode instance still needs: a sixth of the lease."""
        return self._lease_s / HEARTBEATS_PER_LEASE

    def take_kv_fetches(self) -> list[KvFetch]:
        """Return the KV fetches to start since the last call. Call it after every `start_step`."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def complete_kv_fetch(self, request_id: str, digest: bytes, now_s: float) -> None:
        """End a fetch: the blocks have arrived and hold the prompt with this digest (see `pulled_digest`).

        The prompt's last token is computed here. Ignored if the request has ended or does not fetch.
        """
        self.expire_leases(now_s)
        run = self._find_fetching(request_id)
        if run is None:
            return
        first = run.computed_tokens // self.profile.block_size
        arrived = run.blocks[first:]
        if digest != run.prompt.digest:
            self._pool.mark_written(arrived, PromptKey(digest, ()), first)
            run.digest = digest
        self._pool.add_to_cache(run.prompt, arrived, first)
        run.external_tokens = run.request.prompt_tokens - run.computed_tokens
        run.computed_tokens = run.request.prompt_tokens - 1
        self.stats.external_hits += run.external_tokens
        self._make_ready(run)

    def fail_kv_fetch(self, request_id: str, now_s: float) -> None:
        """End a failed fetch: count it and compute the prompt here (kv_load_failure_policy=recompute)."""
        self.expire_leases(now_s)
        run = self._find_fetching(request_id)
        if run is not None:
            self.stats.failed_transfers += 1
            self._make_ready(run)

    # KV transfer, on the prefill instance

    def extend_lease(self, request_id: str, now_s: float) -> bool:
        """Extend the lease on a heartbeat, to at least 2/3 lease_s from now. False if there is none."""
        self.expire_leases(now_s)
        return self._leases.extend(request_id, now_s)

    def release_lease(self, request_id: str, now_s: float) -> bool:
        """Free the blocks of a lease, pulled or not. False if there is none, which is counted."""
        self.expire_leases(now_s)
        blocks = self._leases.end(request_id)
        if blocks is None:
            self.stats.notifications_after_expiry += 1
            return False
        self._pool.release(blocks)
        return True

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of expired leases. All calls with `now_s` do it, except `plan_decode_run`."""
        for blocks in self._leases.expire(now_s):
            self.stats.expired_leases += 1
            self._pool.release(blocks)

    def next_lease_expiry_s(self) -> float | None:
        """Return the time at which the next lease expires; None without leases."""
        return self._leases.next_lease_expiry_s()

    def read_blocks(self, block_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        """Return for each block the digest of the prompt whose KV the block has now.

        A decode instance that pulls the blocks gets this KV. Leases are not checked.

        Raises:
            InvalidInput: if a block does not exist.
        """
        return self._pool.read(block_ids)

    # Gauges

    @property
    def kv_usage(self) -> float:
        """The used share of the KV cache, 0 to 1."""
        return 1 - self._pool.available / self._pool.size

    @property
    def gauges(self) -> EngineGauges:
        """The current queue lengths and KV cache usage."""
        waiting = [run for _, run in self._waiting if run.state is RequestRunState.WAITING]
        ready = sum(run.state is RequestRunState.READY for run in self._ready)
        fetching = sum(run.state is RequestRunState.FETCHING for run in self._runs.values())
        return EngineGauges(
            running=len(self._batch),
            waiting_capacity=len(waiting) + ready,
            waiting_deferred=fetching,
            fetch_waiting_to_start=sum(run.pending_import is not None for run in waiting),
            fetch_in_progress=fetching,
            fetch_completed_waiting=ready,
            kv_usage=self.kv_usage,
            leases=len(self._leases),
        )

    # Scheduling of a step

    def _allocate_decode_blocks(self) -> bool:
        """Allocate a block for each decode that needs one; True if another request was preempted for it."""
        preemptions_before = self.stats.preemptions
        for run in [run for run in self._batch.decoding if run.computed_tokens == run.room_tokens]:
            while run.state is RequestRunState.DECODING and not self._pool.available:
                running = self._batch.decoding + self._batch.prefilling
                self._preempt(max(running, key=lambda victim: victim.order))
            if run.state is RequestRunState.DECODING:
                run.blocks += self._pool.allocate(1, run.prompt, len(run.blocks))
                run.room_tokens += self.profile.block_size
        return self.stats.preemptions > preemptions_before

    def _preempt(self, run: RequestRun) -> None:
        self._batch.remove(run)
        self._pool.release(run.blocks)
        run.blocks, run.room_tokens, run.computed_tokens = [], 0, 0
        run.state, run.pending_import, run.digest = RequestRunState.WAITING, None, run.prompt.digest
        run.preemptions += 1
        self.stats.preemptions += 1
        self._preempted.append(Preempted(run.id))
        heapq.heappush(self._waiting, (run.order, run))

    def _admit(self, budget: int, now_s: float) -> None:
        """Admit fetched requests, which have blocks already, then the queue until its head does not fit."""
        while budget > 0 and len(self._batch) < self.profile.max_seqs:
            run = self._pop_admissible()
            if run is None:
                return
            if run.state is not RequestRunState.FETCHING:
                budget -= self._schedule(run, budget, now_s)

    def _pop_admissible(self) -> RequestRun | None:
        """Return the next request that has its blocks; None if there is none or the head does not fit."""
        while self._ready:
            run = self._ready.popleft()
            if run.state is RequestRunState.READY:
                return run
        while self._waiting and self._waiting[0][1].state is not RequestRunState.WAITING:
            heapq.heappop(self._waiting)
        if not self._waiting or not self._allocate_blocks(self._waiting[0][1]):
            return None
        return heapq.heappop(self._waiting)[1]

    def _allocate_blocks(self, run: RequestRun) -> bool:
        """Allocate all blocks that the next token needs, cached ones first; False if too few are free."""
        size = self.profile.block_size
        needed = -(-run.tokens_needed // size)
        if run.pending_import:
            self._require_remote_blocks(run.pending_import, needed)
        prefix = self._pool.find_prefix(run.prompt.hashes, (run.tokens_needed - 1) // size)
        if not self._pool.can_allocate(prefix, needed - len(prefix)):
            return False
        self._pool.add_reference(prefix)
        run.blocks = prefix + self._pool.allocate(needed - len(prefix), run.prompt, len(prefix))
        run.room_tokens = needed * size
        run.computed_tokens = len(prefix) * size
        run.digest = self._pool.find_foreign_digest(run.prompt, prefix) or run.prompt.digest
        self._count_prefix_hits(run)
        if run.pending_import:
            self._start_fetch(run, run.pending_import, len(prefix))
        return True

    def _count_prefix_hits(self, run: RequestRun) -> None:
        """Count the cache hits of an admission; an admission after a preemption is not counted again."""
        if run.first_token_s is None:
            run.cached_tokens, run.external_tokens = run.computed_tokens, 0
        if not run.preemptions:
            self.stats.prefix_queries += run.request.prompt_tokens
            self.stats.prefix_hits += run.computed_tokens
            self.stats.external_queries += run.request.prompt_tokens - run.computed_tokens

    def _schedule(self, run: RequestRun, budget: int, now_s: float) -> int:
        """Add the request to the running set; it decodes if one token is left. Returns the budget used."""
        if run.scheduled_s is None:
            run.scheduled_s = now_s
        if run.tokens_needed - run.computed_tokens == 1:
            run.state = RequestRunState.DECODING
            self._batch.decoding.append(run)
            return 1
        run.state = RequestRunState.PREFILLING
        self._batch.prefilling.append(run)
        return self._batch.plan_chunk(run, budget)

    # KV transfers

    def _require_remote_blocks(self, fetch: KvImportRequest, needed: int) -> None:
        """Kill the engine if an assertion of the real engine's scheduler would fail."""
        if fetch.block_ids is None:
            self._die("a KV transfer has no remote_block_ids")
        if needed > len(fetch.block_ids):
            self._die(f"a KV transfer has {len(fetch.block_ids)} blocks, the prompt needs {needed}")

    def _start_fetch(self, run: RequestRun, fetch: KvImportRequest, prefix_blocks: int) -> None:
        run.state, run.pending_import = RequestRunState.FETCHING, None
        if fetch.request_id is None or fetch.block_ids is None:
            return  # like the real engine, never start the pull: the request hangs
        count = len(run.blocks) - prefix_blocks
        self._fetches.append(
            KvFetch(
                request_id=run.id,
                source=fetch,
                remote_block_ids=fetch.block_ids[-count:],
                tokens=run.request.prompt_tokens - run.computed_tokens,
                kv_bytes=count * self.profile.block_size * self.profile.kv_bytes_per_token,
            )
        )

    def _find_fetching(self, request_id: str) -> RequestRun | None:
        run = self._runs.get(request_id)
        return run if run is not None and run.state is RequestRunState.FETCHING else None

    def _make_ready(self, run: RequestRun) -> None:
        run.state = RequestRunState.READY
        self._ready.append(run)

    def _export_kv(self, run: RequestRun, now_s: float) -> ExportedKv:
        """Pin the request's blocks under a lease."""
        expires_s = self._leases.grant(run.id, run.blocks, now_s)
        return ExportedKv(
            request_id=run.id, block_ids=tuple(run.blocks), tokens=run.computed_tokens, expires_s=expires_s
        )

    # End of a step

    def _finish_decodes(
        self, events: list[EngineEvent], continued: list[str] | None, now_s: float
    ) -> list[RequestRun]:
        """Emit one token for each decode; returns those at their limit. The model's hot loop."""
        ended = []
        itl_s = self.stats.samples.itl_s
        for run in self._batch.decoding:
            run.computed_tokens += 1
            index = run.output_tokens
            run.output_tokens = index + 1
            if index:
                itl_s.append(now_s - run.last_token_s)
                run.last_token_s = now_s
            else:
                self._record_first_token(run, now_s)
            if run.output_tokens >= run.output_limit:
                ended.append(run)
            elif index and continued is not None:
                continued.append(run.id)
                continue
            events.append(OutputToken(run.id, index, run.digest))
        self.stats.generation_tokens += len(self._batch.decoding)
        return ended

    def _finish_chunk(self, run: RequestRun, chunk: int, events: list[EngineEvent], now_s: float) -> bool:
        """Record a computed chunk, with a token if it ends the prompt; True if the request is at its
        limit.
        """
        size = self.profile.block_size
        first = run.computed_tokens // size
        run.computed_tokens += chunk
        self._pool.add_to_cache(run.prompt, run.blocks[first : run.computed_tokens // size], first)
        if run.computed_tokens < run.tokens_needed:
            return False
        self._batch.prefilling.remove(run)
        self._batch.decoding.append(run)
        run.state = RequestRunState.DECODING
        events.append(OutputToken(run.id, run.output_tokens, run.digest))
        if run.output_tokens:
            self.stats.samples.itl_s.append(now_s - run.last_token_s)
            run.last_token_s = now_s
        else:
            self._record_first_token(run, now_s)
        run.output_tokens += 1
        self.stats.generation_tokens += 1
        return run.output_tokens >= run.output_limit

    def _record_first_token(self, run: RequestRun, now_s: float) -> None:
        run.first_token_s = run.last_token_s = now_s
        self.stats.samples.ttft_s.append(now_s - run.request.arrival_s)
        self.stats.prompt_local_cache_hit += run.cached_tokens
        self.stats.prompt_external += run.external_tokens
        self.stats.prompt_local_compute += run.request.prompt_tokens - run.cached_tokens - run.external_tokens

    def _complete(self, run: RequestRun, now_s: float) -> Finished:
        """End a request at its limit: free its blocks, or pin them for a decode instance."""
        self._batch.remove(run)
        if not isinstance(run.request.kv_transfer, KvExportRequest):
            return self._end_run(run, run.end_reason, None, now_s)
        export = self._export_kv(run, now_s)
        run.blocks = []
        return self._end_run(run, run.end_reason, export, now_s)

    def _end_run(
        self, run: RequestRun, reason: FinishReason, export: ExportedKv | None, now_s: float
    ) -> Finished:
        self._pool.release(run.blocks)
        run.blocks = []
        run.state = RequestRunState.ENDED
        del self._runs[run.id]
        self.stats.finished[reason] += 1
        return run.build_finished(reason, export, now_s)

    def _die(self, reason: str) -> NoReturn:
        self.dead = True
        raise EngineDead(reason)
