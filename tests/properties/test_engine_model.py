"""Two engine models, a prefill instance P and a decode instance D, under any order of calls.

After every call: no block is lost or held without a reference; every request ends exactly once; prompt tokens
are computed, cached or pulled; a lease protects its blocks, and a read without a lease is right exactly until
the blocks are overwritten with other KV, or the last one by another prompt.
"""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_simulator.engine import (
    Engine,
    EngineEvent,
    EngineRequest,
    ExportedKv,
    Finished,
    KvExportRequest,
    KvFetch,
    KvImportRequest,
    KvTransfer,
    NoKvTransfer,
    OutputToken,
    Preempted,
    block_hashes,
    pulled_digest,
)
from fulcrum_simulator.text import prompt_digest

BLOCK_TOKENS, BLOCK_BYTES = 4, 16
LEASE_S = 6.0


def profile(blocks: int) -> EngineProfile:
    sizes = {"block_size": BLOCK_TOKENS, "kv_capacity_tokens": blocks * BLOCK_TOKENS}
    return load_profile("laptop").model_copy(update={**sizes, "token_budget": 12, "max_seqs": 4})


# Prompts of one to six blocks over two letters: prefixes are shared and blocks reused all the time.
PROMPTS = st.builds(
    lambda blocks, tail: "".join(letter * BLOCK_BYTES for letter in blocks).encode() + b"z" * 4 * tail,
    st.text("ab", min_size=1, max_size=5),
    st.integers(0, 3),
)


class TrackedEngine:
    """One engine with the records that the checks need."""

    def __init__(self, name: str, blocks: int) -> None:
        self.engine = Engine(profile(blocks), engine_id=name, lease_s=LEASE_S)
        self.live: dict[str, EngineRequest] = {}
        self.tokens: Counter[str] = Counter()
        self.ends: list[Finished] = []
        self.exports: dict[str, tuple[ExportedKv, bytes]] = {}
        self.fetches: dict[str, KvFetch] = {}
        self.due_s = 0.0
        self.prompts: dict[bytes, bytes] = {}

    def submit(self, name: str, prompt: bytes, kv_transfer: KvTransfer, now_s: float, **fields: Any) -> None:
        request = EngineRequest(
            id=name,
            arrival_s=now_s,
            prompt_tokens=len(prompt) // 4,
            digest=prompt_digest(prompt),
            block_hashes=block_hashes(prompt, block_bytes=BLOCK_BYTES),
            kv_transfer=kv_transfer,
            **fields,
        )
        self.engine.submit(request)
        self.live[name] = request
        self.prompts[request.digest] = prompt

    def advance(self, now_s: float) -> list[EngineEvent]:
        """Start a step, or end the one under way."""
        if self.engine.busy:
            events = self.engine.finish_step(max(now_s, self.due_s))
            for event in events:
                self.record(event)
            return events
        step = self.engine.start_step(now_s)
        for fetch in self.engine.take_kv_fetches():
            self.fetches[fetch.request_id] = fetch
        if step is not None:
            assert step.prefill_tokens + step.decodes <= self.engine.profile.token_budget
            self.due_s = now_s + step.duration_s
        return []

    def record(self, event: EngineEvent) -> None:
        if isinstance(event, OutputToken):
            assert event.index == self.tokens[event.request_id], "tokens come in order, none twice"
            self.tokens[event.request_id] += 1
        elif isinstance(event, Finished):
            self.record_end(event)
        else:
            assert isinstance(event, Preempted)
            assert event.request_id in self.live

    def record_end(self, end: Finished) -> None:
        request = self.live.pop(end.request_id)  # KeyError: the request ended twice
        self.fetches.pop(end.request_id, None)
        self.ends.append(end)
        accounted = end.computed_tokens + end.cached_tokens + end.external_tokens
        assert accounted == (request.prompt_tokens if end.output_tokens else 0)
        assert min(end.computed_tokens, end.cached_tokens, end.external_tokens) >= 0
        assert end.output_tokens == self.tokens[end.request_id]
        assert min(end.queue_s, end.prefill_s, end.decode_s, end.tpot_s) >= 0
        if end.export is not None:
            self.exports[end.request_id] = (end.export, self.prompts[request.digest])

    def abort(self, name: str, now_s: float) -> None:
        end = self.engine.abort(name, now_s)
        assert end is not None
        self.record_end(end)

    def count_references(self) -> Counter[int]:
        """Count the references on each block from the requests and leases that hold it."""
        runs = [run.blocks for run in self.engine._runs.values()]
        leases = [lease.blocks for lease in self.engine._leases._leases.values()]
        return Counter(block for blocks in (*runs, *leases) for block in blocks)

    def still_right(self, export: ExportedKv, prompt: bytes) -> bool:
        """Whether the pool's blocks still hold this prompt, compared by its bytes.

        The last block must have been written by this very prompt: a read infers the prompt from it.
        """
        pool = self.engine._pool
        if self.prompts[pool._written_by[export.block_ids[-1]].digest] != prompt:
            return False
        for i, block in enumerate(export.block_ids):
            wrote = self.prompts[pool._written_by[block].digest]
            end = (i + 1) * BLOCK_BYTES
            same = wrote == prompt or (len(prompt) >= end and wrote[:end] == prompt[:end])
            if pool._block_index[block] != i or not same:
                return False
        return True


class KvTransferMachine(RuleBasedStateMachine):
    """A prefill instance `p` and a decode instance `d` on one clock; both also serve plain requests."""

    @initialize(p_blocks=st.integers(8, 20), d_blocks=st.integers(8, 20))
    def start(self, p_blocks: int, d_blocks: int) -> None:
        self.now_s, self.count = 0.0, 0
        self.p, self.d = TrackedEngine("p", p_blocks), TrackedEngine("d", d_blocks)

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    @rule(on_d=st.booleans(), prompt=PROMPTS, output=st.integers(1, 8), priority=st.integers(-1, 1))
    def submit_plain(self, on_d: bool, prompt: bytes, output: int, priority: int) -> None:
        side = self.d if on_d else self.p
        side.submit(self.name(), prompt, NoKvTransfer(), self.now_s, max_tokens=output, priority=priority)

    @rule(prompt=PROMPTS, half_steps=st.integers(0, 2))
    def submit_prefill_leg(self, prompt: bytes, half_steps: int) -> None:
        self.p.submit(self.name(), prompt, KvExportRequest(), self.now_s, max_tokens=1)
        self.advance(on_d=False, half_steps=half_steps)

    @precondition(lambda self: self.p.exports)
    @rule(data=st.data(), output=st.integers(1, 8), half_steps=st.integers(0, 2))
    def submit_decode_leg(self, data: st.DataObject, output: int, half_steps: int) -> None:
        export, prompt = self.p.exports[data.draw(st.sampled_from(sorted(self.p.exports)))]
        kv_transfer = KvImportRequest(engine_id="p", request_id=export.request_id, block_ids=export.block_ids)
        self.d.submit(self.name(), prompt, kv_transfer, self.now_s, max_tokens=output)
        self.advance(on_d=True, half_steps=half_steps)

    @rule(on_d=st.booleans(), half_steps=st.integers(1, 8))
    def advance(self, *, on_d: bool, half_steps: int) -> None:
        side = self.d if on_d else self.p
        for _ in range(half_steps):  # an odd count leaves a step under way
            side.advance(self.now_s)
            self.now_s = max(self.now_s, side.due_s)

    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.d.fetches)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_fetch(self, data: st.DataObject, fails: bool) -> None:
        fetch = self.d.fetches.pop(data.draw(st.sampled_from(sorted(self.d.fetches))))
        remote_id = fetch.source.request_id or ""
        if fails:
            self.d.engine.fail_kv_fetch(fetch.request_id, self.now_s)
            return
        own = self.d.live[fetch.request_id].digest
        held = pulled_digest(self.p.engine.read_blocks(fetch.remote_block_ids), own_digest=own)
        alive = self.p.engine.release_lease(remote_id, self.now_s)
        assert held == own or not alive, "a lease protects what it pins"
        self.d.engine.complete_kv_fetch(fetch.request_id, held, self.now_s)
        self.d.prompts.setdefault(held, b"")

    @precondition(lambda self: self.p.exports)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.p.engine.extend_lease(data.draw(st.sampled_from(sorted(self.p.exports))), self.now_s)

    @precondition(lambda self: self.p.live or self.d.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        side = data.draw(st.sampled_from([side for side in (self.p, self.d) if side.live]))
        side.abort(data.draw(st.sampled_from(sorted(side.live))), self.now_s)

    @invariant()
    def blocks_are_counted(self) -> None:
        for side in (self.p, self.d):
            pool, held = side.engine._pool, side.count_references()
            assert {block: pool.reference_count(block) for block in range(pool.size)} == {
                block: held[block] for block in range(pool.size)
            }
            assert pool.available == pool.size - len(held)
            assert 0.0 <= side.engine.gauges.kv_usage <= 1.0

    @invariant()
    def every_live_request_is_running_or_waiting(self) -> None:
        for side in (self.p, self.d):
            gauges = side.engine.gauges
            assert gauges.running + gauges.waiting == len(side.live)
            assert gauges.running <= side.engine.profile.max_seqs

    @invariant()
    def reads_are_right_until_a_block_is_overwritten(self) -> None:
        for export, prompt in self.p.exports.values():
            own = prompt_digest(prompt)
            read = pulled_digest(self.p.engine.read_blocks(export.block_ids), own_digest=own)
            assert (read == own) == self.p.still_right(export, prompt)

    def teardown(self) -> None:
        """Let every request end and every lease expire: no block is left in use."""
        if not hasattr(self, "p"):
            return
        for _ in range(2000):
            if not (self.p.live or self.d.live):
                break
            self.now_s += 1.0
            for name in list(self.d.fetches):
                self.d.fetches.pop(name)
                self.d.engine.fail_kv_fetch(name, self.now_s)
            self.p.advance(self.now_s)
            self.d.advance(self.now_s)
        assert (self.p.live, self.d.live) == ({}, {})
        for side in (self.p, self.d):
            side.engine.expire_leases(self.now_s + 10 * LEASE_S)
            assert (side.engine.gauges.kv_usage, side.engine.next_lease_expiry_s()) == (0.0, None)
            assert sum(side.engine.stats.finished.values()) == len(side.ends)
        assert len(self.p.ends) + len(self.d.ends) == self.count


KvTransferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)


TestKvTransferMachine = KvTransferMachine.TestCase


def run_random_requests(seed: int) -> list[object]:
    """Run random requests on one engine; returns all events and times."""
    rng = random.Random(seed)
    side = TrackedEngine("e", 12)
    noise_rng = random.Random(seed)
    side.engine = Engine(profile(12), engine_id="e", draw_step_factor=lambda: noise_rng.uniform(0.95, 1.05))
    now_s, events = 0.0, list[object]()
    for i in range(60):
        prompt = rng.choice(["aa", "ab", "abb", "ba"]) * 4 * rng.randint(1, 4)
        side.submit(f"r{i}", prompt.encode(), NoKvTransfer(), now_s, max_tokens=rng.randint(1, 8))
        for _ in range(rng.randint(0, 6)):
            events += side.advance(now_s)
            now_s = max(now_s, side.due_s)
            events.append(now_s)
    return events


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_the_same_calls_give_the_same_events(seed: int) -> None:
    assert run_random_requests(seed) == run_random_requests(seed)
