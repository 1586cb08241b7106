"""Prefill times are learned from a busy instance and from cached prompts, as from an idle one."""

import math
import random

import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy.predictions.prefill_samples import (
    RESPONSES_MAX,
    PrefillSample,
    PrefillSampler,
)
from fulcrum_router.policy.prefill_steps import TOGETHER_S

TRUTH = PrefillModel(c0=0.01, c1=5e-5, c2=2e-9)
LENGTHS = (100, 1000, 8000)


def add(
    sampler: PrefillSampler, tokens: int, computed_for_s: float | None, *, cached: int = 0, more: bool = True
) -> list[PrefillSample]:
    return sampler.add(
        tokens=tokens, cached_tokens=cached, computed_for_s=computed_for_s, more_in_flight=more
    )


def test_a_sample_ends_when_no_prompt_is_left() -> None:
    sampler = PrefillSampler()
    assert add(sampler, 10, 0.25) == []
    assert add(sampler, 20, 0.5, more=False) == [PrefillSample(30, 500, 0.75, responses=2)]


def test_a_sample_of_an_instance_that_is_never_idle_ends_after_some_responses() -> None:
    sampler = PrefillSampler()
    assert [add(sampler, 10, 0.25) for _ in range(RESPONSES_MAX)] == [[]] * RESPONSES_MAX
    assert add(sampler, 20, 0.5) == [
        PrefillSample(10 * RESPONSES_MAX, 100 * RESPONSES_MAX, 0.25 * RESPONSES_MAX, responses=RESPONSES_MAX)
    ]


def test_prompts_that_are_answered_together_are_one_sample() -> None:
    sampler = PrefillSampler()
    add(sampler, 10, 0.1)
    assert add(sampler, 20, TOGETHER_S / 2, more=False) == [
        PrefillSample(30, 500, pytest.approx(0.1 + TOGETHER_S / 2))  # type: ignore[arg-type]
    ]


def test_a_prompt_that_overtakes_belongs_to_the_time_of_the_overtaken_one() -> None:
    sampler = PrefillSampler()
    assert add(sampler, 20, None) == []
    assert add(sampler, 10, 0.3, more=False) == [PrefillSample(30, 500, 0.3)]


def test_cached_tokens_are_not_computed() -> None:
    assert add(PrefillSampler(), 100, 0.1, cached=64, more=False) == [PrefillSample(36, 100**2 - 64**2, 0.1)]
    assert add(PrefillSampler(), 100, 0.1, cached=128, more=False) == [PrefillSample(0, 0, 0.1)]


def test_after_clear_nothing_of_before_is_in_a_sample() -> None:
    sampler = PrefillSampler()
    add(sampler, 10, 0.1)
    add(sampler, 20, None)
    sampler.clear()
    assert add(sampler, 30, 0.3, more=False) == [PrefillSample(30, 900, 0.3)]


def predict(instance: Instance) -> list[float]:
    return [instance.prefill_model.ttft_s(n) for n in LENGTHS]


def test_an_instance_that_is_never_idle_is_learned_all_the_same() -> None:
    """Prompts arrive faster than they are computed, one after another: three are always in flight."""
    rng, instance, now_s = random.Random(7), Instance("p1"), 0.0
    lengths = [rng.randrange(50, 8000) for _ in range(1200)]
    entries = [
        instance.ledger.add_prefill(tokens=n, predicted_s=instance.prefill_model.ttft_s(n), now_s=now_s)
        for n in lengths[:3]
    ]
    for number, tokens in enumerate(lengths[:-3]):
        entry, waiting = entries[number], lengths[number + 3]
        predicted_s = instance.prefill_model.ttft_s(waiting)
        entries.append(instance.ledger.add_prefill(tokens=waiting, predicted_s=predicted_s, now_s=now_s))
        now_s += TRUTH.ttft_s(tokens)
        instance.record_prefill(tokens=tokens, cached_tokens=0, computed_for_s=entry.release(now_s))
    assert predict(instance) == pytest.approx([TRUTH.ttft_s(n) for n in LENGTHS], rel=0.05, abs=0.003)
    assert instance.drift[0] == pytest.approx(1.0, rel=0.05)


def test_prompts_that_share_engine_steps_are_learned_without_bias() -> None:
    """An engine fills the last step of a prompt with the begin of the next one, up to 2,048 tokens.

    So a prompt comes out long by the part of the next one in its last step, and the next one as much shorter.
    """
    rng, instance, now_s = random.Random(7), Instance("p1"), 0.0
    truth = PrefillModel(c0=0.0, c1=5e-4, c2=0.0)
    for _ in range(300):
        lengths = [rng.randrange(50, 6000) for _ in range(3)]
        entries = [instance.ledger.add_prefill(tokens=n, predicted_s=1.0, now_s=now_s) for n in lengths]
        began_s, done = now_s, 0
        for entry, tokens in zip(entries, lengths, strict=True):
            done += tokens
            computed = min(sum(lengths), 2048 * math.ceil(done / 2048))
            now_s = max(now_s, began_s + truth.ttft_s(computed))
            instance.record_prefill(tokens=tokens, cached_tokens=0, computed_for_s=entry.release(now_s))
    assert predict(instance)[1:] == pytest.approx([truth.ttft_s(n) for n in LENGTHS[1:]], rel=0.15)


def test_hits_of_the_prefix_cache_do_not_make_long_prompts_look_short() -> None:
    instance = Instance("p1", prefill=TRUTH)
    for _ in range(64):
        entry = instance.ledger.add_prefill(tokens=8000, predicted_s=0.5, now_s=0.0)
        took_s = TRUTH.c0 + TRUTH.c1 * 16 + TRUTH.c2 * (8000**2 - 7984**2)
        instance.record_prefill(tokens=8000, cached_tokens=7984, computed_for_s=entry.release(took_s))
    assert predict(instance) == pytest.approx([TRUTH.ttft_s(n) for n in LENGTHS], rel=0.05)


def test_nothing_is_learned_from_prompts_beside_decode_legs() -> None:
    instance = Instance("p1", prefill=TRUTH)
    instance.ledger.add_decode(tokens=10)
    for _ in range(64):
        entry = instance.ledger.add_prefill(tokens=1000, predicted_s=0.5, now_s=0.0)
        instance.record_prefill(tokens=1000, cached_tokens=0, computed_for_s=entry.release(9.0))
    assert (instance.prefill_model, instance.drift) == (TRUTH, (None, None))
