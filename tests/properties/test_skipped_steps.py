"""Skipping identical decode steps gives what executing each of them gives, bit for bit."""

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fulcrum_core.latency import StepModel
from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_simulator.engine import (
    Engine,
    EngineRequest,
    KvExportRequest,
    KvImportRequest,
    KvTransfer,
    NoKvTransfer,
    OutputToken,
)
from fulcrum_simulator.fleet.stepped_engine import SteppedEngine

BLOCK_TOKENS = 4
LEASE_S = 3.0
KINDS = ("plain", "plain", "plain", "export", "import", "abort", "observe", "advance", "look", "heartbeat")


@dataclass(frozen=True)
class Call:
    """What the outside does to the engine at one time."""

    at_s: float
    kind: str
    prompt: int
    output: int
    priority: int


CALLS = st.lists(
    st.builds(
        Call,
        at_s=st.floats(0, 12),
        kind=st.sampled_from(KINDS),
        prompt=st.integers(1, 20),
        output=st.integers(1, 40),
        priority=st.integers(0, 1),
    ),
    max_size=14,
)


def profile(blocks: int) -> EngineProfile:
    sizes = {"block_size": BLOCK_TOKENS, "kv_capacity_tokens": blocks * BLOCK_TOKENS}
    return load_profile("laptop").model_copy(update={**sizes, "token_budget": 12, "max_seqs": 4})


class Run:
    """Drives one engine through the calls, and records what happens when."""

    def __init__(
        self, blocks: int, seed: int | None, lookahead_steps: int, *, tracks_contents: bool = True
    ) -> None:
        rng = random.Random(seed)
        self.engine = Engine(
            profile(blocks),
            engine_id="e",
            lease_s=LEASE_S,
            draw_step_factor=None if seed is None else lambda: rng.uniform(0.9, 1.1),
            tracks_contents=tracks_contents,
        )
        self.steps = SteppedEngine(self.engine, lookahead_steps=lookahead_steps)
        self.trace: list[Any] = []
        self.tokens: dict[str, list[float]] = {}
        self.skipped = 0

    def play(self, calls: list[Call]) -> None:
        pending = sorted(enumerate(calls), key=lambda call: call[1].at_s)
        now_s = 0.0
        while pending or self.engine.busy:
            due_s = self.steps.due_s if self.engine.busy else None
            if due_s is not None and (not pending or due_s <= pending[0][1].at_s):
                now_s = due_s
                self.finish_step(now_s)
            else:
                number, call = pending.pop(0)
                now_s = call.at_s
                self.skip_to(now_s)
                if call.kind == "look":
                    self.steps.apply()
                    self.trace.append((now_s, self.engine.gauges, self.engine.stats.take_samples()))
                elif call.kind == "heartbeat":
                    self.steps.apply()
                    extended = [self.engine.extend_lease(f"r{n}", now_s) for n in range(number)]
                    self.trace.append((now_s, extended))
                elif call.kind != "advance":
                    if self.engine.busy:
                        self.steps.truncate()
                    self.apply(f"r{number}", call, now_s)
            if not self.engine.busy:
                self.start_step(now_s)

    def skip_to(self, now_s: float) -> None:
        ends_s = list(self.steps._ends_s)[self.steps._passed :]
        ids, count = self.steps.advance(now_s)
        self.skipped += count
        for name in ids if count else ():
            self.tokens.setdefault(name, []).extend(ends_s[:count])

    def finish_step(self, now_s: float) -> None:
        self.skip_to(now_s)
        events, continued = self.steps.finish()
        for name in continued:
            self.tokens.setdefault(name, []).append(now_s)
        for event in events:
            if isinstance(event, OutputToken):
                self.tokens.setdefault(event.request_id, []).append(now_s)
            else:
                self.trace.append((now_s, event))

    def start_step(self, now_s: float) -> None:
        self.steps.start(now_s)
        for fetch in self.engine.take_kv_fetches():
            self.trace.append((now_s, fetch))

    def apply(self, name: str, call: Call, now_s: float) -> None:
        if call.kind == "abort":
            victim = next(iter(self.engine._runs), "")
            self.trace.append((now_s, self.engine.abort(victim, now_s)))
        elif call.kind == "observe":
            for waiting in list(self.engine._runs):
                self.engine.complete_kv_fetch(waiting, waiting.encode(), now_s)
            self.trace.append((now_s, self.engine.gauges, self.engine.stats.take_samples()))
        elif call.prompt + call.output <= self.engine._pool.size * BLOCK_TOKENS:
            blocks = tuple(range(-(-call.prompt // BLOCK_TOKENS)))
            transfers: dict[str, KvTransfer] = {
                "plain": NoKvTransfer(),
                "export": KvExportRequest(),
                "import": KvImportRequest(engine_id="p", request_id="x", block_ids=blocks),
            }
            self.engine.submit(
                EngineRequest(
                    id=name,
                    arrival_s=now_s,
                    prompt_tokens=call.prompt,
                    max_tokens=call.output,
                    digest=name.encode(),
                    priority=call.priority,
                    kv_transfer=transfers[call.kind],
                )
            )

    def result(self) -> list[Any]:
        """Return everything that can be observed of the run and of the engine's state."""
        engine = self.engine
        held = {
            name: (run.blocks, run.computed_tokens, run.last_token_s) for name, run in engine._runs.items()
        }
        return [self.trace, self.tokens, engine.stats, engine.gauges, held, list(engine._pool._free_uncached)]


@given(calls=CALLS, blocks=st.integers(10, 40), seed=st.none() | st.integers(0, 99))
@settings(max_examples=150)
def test_skipping_steps_changes_nothing(calls: list[Call], blocks: int, seed: int | None) -> None:
    each, skipping = Run(blocks, seed, 1), Run(blocks, seed, 128)
    each.play(calls)
    skipping.play(calls)
    assert skipping.result() == each.result()
    assert each.skipped == 0


@given(calls=CALLS, blocks=st.integers(10, 40))
def test_without_the_contents_of_blocks_the_engine_does_the_same(calls: list[Call], blocks: int) -> None:
    with_contents, without = Run(blocks, 1, 128), Run(blocks, 1, 128, tracks_contents=False)
    with_contents.play(calls)
    without.play(calls)
    assert without.result() == with_contents.result()


def test_almost_all_steps_of_a_long_output_are_skipped() -> None:
    run = Run(40, 1, 128)
    run.play([Call(0.0, "plain", 5, 100, 0)])
    assert (run.skipped, run.engine.stats.steps) == (98, 100)


@given(
    coefficients=st.tuples(*[st.floats(0, 1, allow_subnormal=False)] * 5),
    decodes=st.integers(1, 300),
    context=st.integers(1, 10**6),
)
def test_durations_of_a_run_equal_those_of_its_steps(
    coefficients: tuple[float, ...], decodes: int, context: int
) -> None:
    model = StepModel(*coefficients)
    durations_s = model.decode_steps_s(decodes=decodes, context_tokens=context, steps=5)
    assert durations_s == [
        model.step_from_sums_s(
            prefill_tokens=0, attention=0, decodes=decodes, context_tokens=context + n * decodes
        )
        for n in range(5)
    ]
