"""Scheduling step by step: what runs, how long it takes, what it emits.

Coefficients are powers of two, so durations are exact: t0 1/2, b 1/8, d1 1/16, d2 1/32 s.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_simulator.engine import (
    Engine,
    EngineGauges,
    EngineRequest,
    Finished,
    FinishReason,
    OutputToken,
    Preempted,
    Samples,
    Step,
)

COEFFICIENTS = {"t0": 0.5, "b": 0.125, "c": 0.0, "d1": 0.0625, "d2": 0.03125, "mixed_factor": 2.0}
SIZES = {"block_size": 4, "kv_capacity_tokens": 64, "token_budget": 8, "max_seqs": 4}


def profile(**changes: float) -> EngineProfile:
    return load_profile("laptop").model_copy(update={**COEFFICIENTS, **SIZES, **changes})


def engine(**changes: float) -> Engine:
    return Engine(profile(**changes), engine_id="engine-1")


def request(name: str, prompt: int, output: int = 1, **fields: Any) -> EngineRequest:
    defaults: dict[str, Any] = {"arrival_s": 0.0, "digest": name.encode().ljust(16, b"\0")}
    return EngineRequest(id=name, prompt_tokens=prompt, max_tokens=output, **{**defaults, **fields})


def sizes_of(step: Step) -> tuple[int, int]:
    """Return the prompt tokens and the decodes of a step."""
    return step.prefill_tokens, step.decodes


def describe(event: object) -> str:
    match event:
        case OutputToken(name, index, _):
            return f"{name}{index}"
        case Preempted(name):
            return f"{name} preempted"
        case Finished():
            return f"{event.request_id} {event.reason}"
    raise AssertionError(event)


def steps_of(engine: Engine, now_s: float = 0.0) -> Iterator[tuple[tuple[int, int], list[str]]]:
    """Run until nothing is left; yields the sizes and the events of each step."""
    while (step := engine.start_step(now_s)) is not None:
        now_s += step.duration_s
        yield sizes_of(step), [describe(event) for event in engine.finish_step(now_s)]


def trace(*requests: EngineRequest, **changes: float) -> list[tuple[tuple[int, int], list[str]]]:
    it = engine(**changes)
    for each in requests:
        it.submit(each)
    return list(steps_of(it))


def test_one_request_goes_from_prompt_to_last_token() -> None:
    it = engine()
    it.submit(request("a", prompt=6, output=3))
    prefill = it.start_step(0.0)
    first = it.finish_step(1.25)
    decode = it.start_step(1.25)
    second = it.finish_step(2.0)
    it.start_step(2.0)
    last = it.finish_step(3.0)
    digest = request("a", 6).digest
    assert (prefill, first) == (
        Step(duration_s=0.5 + 6 * 0.125, prefill_tokens=6, decodes=0, context_tokens=0),
        [OutputToken("a", 0, digest)],
    )
    assert (decode, second) == (
        Step(duration_s=0.5 + 0.0625 + 7 * 0.03125, prefill_tokens=0, decodes=1, context_tokens=7),
        [OutputToken("a", 1, digest)],
    )
    assert last == [
        OutputToken("a", 2, digest),
        Finished(
            request_id="a",
            reason=FinishReason.LENGTH,
            export=None,
            prompt_tokens=6,
            output_tokens=3,
            max_tokens=3,
            computed_tokens=6,
            cached_tokens=0,
            external_tokens=0,
            preemptions=0,
            e2e_s=3.0,
            queue_s=0.0,
            prefill_s=1.25,
            decode_s=1.75,
            tpot_s=0.875,
        ),
    ]
    assert it.start_step(3.0) is None


@pytest.mark.parametrize(
    ("requests", "changes", "expected"),
    [
        pytest.param(
            [request("a", prompt=20)],
            {},
            [((8, 0), []), ((8, 0), []), ((4, 0), ["a0", "a length"])],
            id="a long prompt is computed in chunks of the token budget",
        ),
        pytest.param(
            [request("a", 5, 3), request("b", 9)],
            {},
            [((8, 0), ["a0"]), ((6, 1), ["a1", "b0", "b length"]), ((0, 1), ["a2", "a length"])],
            id="decodes come first, and the next prompt gets the rest of the budget",
        ),
        pytest.param(
            [request("a", 2, 2), request("b", 2, 2), request("c", 2)],
            {"max_seqs": 2},
            [
                ((4, 0), ["a0", "b0"]),
                ((0, 2), ["a1", "b1", "a length", "b length"]),
                ((2, 0), ["c0", "c length"]),
            ],
            id="no more requests run than max_seqs",
        ),
        pytest.param(
            [request("late", 8, arrival_s=2.0), request("early", 8, arrival_s=1.0)],
            {},
            [((8, 0), ["early0", "early length"]), ((8, 0), ["late0", "late length"])],
            id="the earlier arrival goes first whenever it was submitted",
        ),
        pytest.param(
            [request("a", 8, arrival_s=1.0), request("urgent", 8, arrival_s=2.0, priority=-1)],
            {},
            [((8, 0), ["urgent0", "urgent length"]), ((8, 0), ["a0", "a length"])],
            id="the lower priority goes before the earlier arrival",
        ),
        pytest.param(
            [request("a", 8, 8), request("big", 9), request("small", 2)],
            {"kv_capacity_tokens": 16},
            [
                ((8, 0), ["a0"]),
                *[((0, 1), [f"a{i}"]) for i in range(1, 7)],
                ((0, 1), ["a7", "a length"]),
                ((8, 0), []),
                ((3, 0), ["big0", "small0", "big length", "small length"]),
            ],
            id="a head of the queue that does not fit blocks smaller requests behind it",
        ),
        pytest.param(
            [request("a", 4, 4), request("b", 4, 3)],
            {"kv_capacity_tokens": 12},
            [
                ((8, 0), ["a0", "b0"]),
                ((0, 1), ["b preempted", "a1"]),
                ((0, 1), ["a2"]),
                ((0, 1), ["a3", "a length"]),
                ((5, 0), ["b1"]),
                ((0, 1), ["b2", "b length"]),
            ],
            id="the last in order is preempted, computed again, and continues where it stopped",
        ),
        pytest.param(
            [request("a", 4, 9, stop_after=2), request("b", 3, 2, stop_after=5)],
            {},
            [((7, 0), ["a0", "b0"]), ((0, 2), ["a1", "b1", "a stop", "b length"])],
            id="stop and length, whichever comes first",
        ),
    ],
)
def test_steps_are_scheduled_as_in_vllm(
    requests: list[EngineRequest],
    changes: dict[str, float],
    expected: list[tuple[tuple[int, int], list[str]]],
) -> None:
    assert trace(*requests, **changes) == expected


def test_a_preemption_follows_priority_and_not_the_running_order() -> None:
    it = engine(kv_capacity_tokens=12)
    it.submit(request("unimportant", 4, 4, priority=1))
    assert [next(iter(steps_of(it)))] == [((4, 0), ["unimportant0"])]
    it.submit(request("important", 4, 4))
    assert list(steps_of(it, 1.0))[:3] == [
        ((4, 1), ["unimportant1", "important0"]),
        ((0, 1), ["unimportant preempted", "important1"]),
        ((0, 1), ["important2"]),
    ]


def test_a_prompt_in_a_mixed_step_is_slowed_by_the_factor() -> None:
    it = engine()
    it.submit(request("a", 4, 3))
    it.start_step(0.0)
    it.finish_step(1.0)
    it.submit(request("b", 4))
    assert it.start_step(1.0) == Step(
        duration_s=0.5 + 2.0 * 4 * 0.125 + 0.0625 + 5 * 0.03125, prefill_tokens=4, decodes=1, context_tokens=5
    )


def test_a_drawn_factor_multiplies_the_duration_of_each_step() -> None:
    factors = iter([1.5, 0.5])
    it = Engine(profile(), engine_id="engine-1", draw_step_factor=lambda: next(factors))
    it.submit(request("a", 4, 2))
    first = it.start_step(0.0)
    it.finish_step(1.0)
    second = it.start_step(1.0)
    assert first is not None
    assert second is not None
    assert [first.duration_s, second.duration_s] == [1.5 * 1.0, 0.5 * (0.5 + 0.0625 + 5 * 0.03125)]


def hashes(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


def test_a_cached_prefix_is_not_computed_again() -> None:
    it = engine()
    it.submit(request("a", 12, block_hashes=hashes("h0", "h1", "h2")))
    list(steps_of(it))
    it.submit(request("b", 10, block_hashes=hashes("h0", "h1")))
    assert list(steps_of(it)) == [((2, 0), ["b0", "b length"])]
    assert (it.stats.prefix_queries, it.stats.prefix_hits, it.stats.prompt_local_compute) == (22, 8, 14)


def test_the_last_prompt_token_is_computed_even_if_all_is_cached() -> None:
    it = engine()
    for name in ("a", "b"):
        it.submit(request(name, 8, block_hashes=hashes("h0", "h1")))
        events = list(steps_of(it))
    assert events == [((4, 0), ["b0", "b length"])]


def test_a_prefix_shared_by_two_running_requests_is_held_once() -> None:
    it = engine()
    it.submit(request("a", 8, 9, block_hashes=hashes("h0", "h1")))
    it.start_step(0.0)
    it.finish_step(1.0)
    it.submit(request("b", 9, 9, block_hashes=hashes("h0", "h1")))
    it.start_step(1.0)
    assert it.gauges.kv_usage == (3 + 1) / 16


def test_the_least_recently_used_prefix_is_overwritten_first_from_its_tail() -> None:
    it = engine(kv_capacity_tokens=32)
    for name in ("a", "b"):
        it.submit(request(name, 16, block_hashes=hashes(*(f"{name}{i}" for i in range(4)))))
        list(steps_of(it))
    it.submit(request("c", 8))
    list(steps_of(it))
    it.submit(request("b again", 16, block_hashes=hashes("b0", "b1", "b2", "b3")))
    it.submit(request("a again", 16, block_hashes=hashes("a0", "a1", "a2", "a3"), arrival_s=1.0))
    ends = {e.request_id: e.cached_tokens for e in run_to_end(it) if isinstance(e, Finished)}
    assert ends == {"b again": 12, "a again": 8}  # c took the last two blocks of a


def run_to_end(engine: Engine, now_s: float = 0.0) -> list[object]:
    events: list[object] = []
    while (step := engine.start_step(now_s)) is not None:
        now_s += step.duration_s
        events += engine.finish_step(now_s)
    return events


def test_abort_frees_the_blocks_of_a_request_in_any_state() -> None:
    it = engine(max_seqs=2)
    for name, prompt in (("decoding", 4), ("prefilling", 20), ("waiting", 4)):
        it.submit(request(name, prompt, 9))
    it.start_step(0.0)
    it.finish_step(1.0)
    it.start_step(1.0)
    ends = [it.abort(name, 1.5) for name in ("decoding", "prefilling", "waiting", "unknown", "decoding")]
    assert [(end.reason, end.output_tokens, end.computed_tokens) if end else None for end in ends] == [
        (FinishReason.ABORT, 1, 4),
        (FinishReason.ABORT, 0, 0),
        (FinishReason.ABORT, 0, 0),
        None,
        None,
    ]
    assert (it.finish_step(2.0), it.start_step(2.0)) == ([], None)
    assert it.gauges == EngineGauges(
        running=0,
        waiting_capacity=0,
        waiting_deferred=0,
        fetch_waiting_to_start=0,
        fetch_in_progress=0,
        fetch_completed_waiting=0,
        kv_usage=0.0,
        leases=0,
    )


def test_latency_samples_count_from_arrival() -> None:
    it = engine()
    it.submit(request("a", 4, 3))
    for now_s in (1.0, 2.0, 4.0):
        it.start_step(now_s - 1.0)
        it.finish_step(now_s)
    assert it.stats.take_samples() == Samples(ttft_s=[1.0], itl_s=[1.0, 2.0], iteration_tokens=[4, 1, 1])
    assert it.stats.take_samples() == Samples()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", 0), "prompt_tokens (0) must be at least 1"),
        (request("a", 4, 0), "max_tokens (0) must be at least 1"),
        (request("a", 4, 1, stop_after=0), "stop_after (0) must be at least 1"),
        (request("a", 60, 5), "prompt_tokens (60) and max_tokens (5) exceed the KV cache of 64 tokens"),
        (request("live", 4), "request id (live) is in use"),
    ],
)
def test_a_request_that_can_never_run_is_rejected(bad: EngineRequest, message: str) -> None:
    it = engine()
    it.submit(request("live", 4))
    with pytest.raises(InvalidInput) as refusal:
        it.submit(bad)
    assert str(refusal.value) == message


def test_a_step_must_finish_before_the_next_starts() -> None:
    it = engine()
    it.submit(request("a", 4))
    with pytest.raises(RuntimeError, match="start one first"):
        it.finish_step(0.0)
    it.start_step(0.0)
    with pytest.raises(RuntimeError, match="finish it first"):
        it.start_step(0.5)


def test_each_chunk_of_a_prompt_attends_to_the_chunks_before_it() -> None:
    it = engine(c=0.25)
    it.submit(request("a", 20))
    durations_s = []
    while (step := it.start_step(0.0)) is not None:
        durations_s.append(step.duration_s)
        it.finish_step(0.0)
    expected = [(8, 8 * 8), (8, 16 * 16 - 8 * 8), (4, 20 * 20 - 16 * 16)]
    assert durations_s == [0.5 + 0.125 * chunk + 0.25 * attention for chunk, attention in expected]


def test_a_block_is_shared_only_once_it_is_full() -> None:
    it = engine(token_budget=6)
    it.submit(request("a", 10, block_hashes=hashes("h0", "h1")))
    it.start_step(0.0)
    it.finish_step(1.0)  # six tokens: one full block and a half
    it.abort("a", 1.0)
    it.submit(request("b", 10, block_hashes=hashes("h0", "h1")))
    assert [e.cached_tokens for e in run_to_end(it) if isinstance(e, Finished)] == [4]


def test_cached_blocks_without_references_are_not_counted_as_free_twice() -> None:
    it = engine(kv_capacity_tokens=16)
    it.submit(request("cached", 8, block_hashes=hashes("h0", "h1")))
    run_to_end(it)
    it.submit(request("holds one", 4, 3))
    it.start_step(0.0)
    it.finish_step(1.0)
    it.submit(request("long", 14, 1, block_hashes=hashes("h0", "h1", "h2")))
    assert it.start_step(1.0) == Step(
        duration_s=0.5 + 0.0625 + 5 * 0.03125, prefill_tokens=0, decodes=1, context_tokens=5
    )


def test_no_request_is_admitted_in_a_step_with_a_preemption() -> None:
    it = engine(kv_capacity_tokens=16)
    it.submit(request("a", 4, 9))
    it.submit(request("b", 4, 9, arrival_s=1.0))
    running = steps_of(it, 1.0)
    assert [next(running)[1] for _ in range(5)] == [[f"a{i}", f"b{i}"] for i in range(5)]
    it.submit(request("urgent", 4, priority=-1))
    assert [next(running) for _ in range(2)] == [
        ((0, 1), ["b preempted", "a5"]),
        ((4, 1), ["a6", "urgent0", "urgent length"]),
    ]


def test_a_prompt_computed_again_is_counted_once() -> None:
    it = engine(kv_capacity_tokens=12)
    it.submit(request("a", 4, 4))
    it.submit(request("b", 4, 3, block_hashes=hashes("h0")))
    ends = {e.request_id: e for e in run_to_end(it) if isinstance(e, Finished)}
    assert (ends["b"].preemptions, ends["b"].computed_tokens, ends["b"].cached_tokens) == (1, 4, 0)
    counted = (
        it.stats.prefix_queries,
        it.stats.prefix_hits,
        it.stats.prompt_tokens,
        it.stats.generation_tokens,
    )
    assert counted == (8, 0, 8, 7)
