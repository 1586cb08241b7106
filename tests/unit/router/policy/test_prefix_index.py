"""The index of prefix caches: what it predicts, what it forgets, and what it keeps under a flood."""

import math
import random

import pytest

from fulcrum_router.policy.prefix_index import NO_HITS, PrefixIndex, PromptPrefix

ENDS = range(100, 100_001, 100)


def prefix(*hashes: int) -> PromptPrefix:
    """A prompt with these blocks, of 100 tokens each."""
    return PromptPrefix(hashes, ENDS)


def send(
    index: PrefixIndex, name: str, prompt: PromptPrefix, *, cached: int = 0, room: float = math.inf
) -> None:
    """Send a prompt to an instance, which reports `cached` tokens."""
    hits = index.find_hits(prompt)
    index.record(prompt, name, new_tokens=prompt.count_tokens(len(prompt.hashes)), room_tokens=room)
    index.report(name, hits, prompt, cached_tokens=cached)


def make_index(*names: str, blocks: int = 1024) -> PrefixIndex:
    """An index of instances whose engines report cached tokens."""
    index = PrefixIndex(blocks)
    for name in names:
        send(index, name, prefix(1), cached=1)
    return index


def test_an_instance_has_the_blocks_up_to_the_first_that_differs() -> None:
    index = make_index("a", "b")
    send(index, "a", prefix(10, 11, 12))
    send(index, "b", prefix(10, 21))
    found = [index.find_hits(p).tokens for p in (prefix(10, 11, 12, 13), prefix(10, 21), prefix(9))]
    assert found == [{"a": 300, "b": 100}, {"a": 100, "b": 200}, {}]


def test_a_gap_in_the_blocks_of_an_instance_ends_its_hit() -> None:
    index = make_index("a", "b")
    send(index, "a", prefix(10, 11, 12))
    send(index, "b", prefix(11, 12))  # not as the beginning of a prompt
    assert index.find_hits(prefix(10, 11, 12)).tokens == {"a": 300}


def test_an_engine_that_reports_no_cached_tokens_has_no_hits() -> None:
    index = PrefixIndex(64)
    send(index, "a", prefix(10, 11))
    send(index, "a", prefix(10, 11))
    assert index.find_hits(prefix(10, 11)).tokens == {}


@pytest.mark.parametrize("event", ["forget", "remove"], ids=["restart or new salt", "removal"])
def test_an_instance_without_its_cache_has_no_hits(event: str) -> None:
    index = make_index("a", "b")
    send(index, "a", prefix(10, 11))
    send(index, "b", prefix(10))
    if event == "forget":
        index.forget("a")
    else:
        index.keep_only(["b"])
        send(index, "c", prefix(99), cached=1)  # it gets the place of the removed one
    assert index.find_hits(prefix(10, 11)).tokens == {"b": 100}


@pytest.mark.parametrize("times", [1, 70, 200], ids=["once", "more often than bits", "often"])
def test_what_others_use_later_is_no_hit_of_an_instance_without_its_cache(times: int) -> None:
    index = make_index("a", "b", "gone")
    for name in ("a", "b", "gone"):
        send(index, name, prefix(10, 11))
    index.keep_only(["a", "b"])
    for _ in range(times):
        index.forget("a")
        send(index, "a", prefix(20))
    for number in range(times):
        send(index, "b", prefix(10, 11), cached=200)
        send(index, f"new {number}", prefix(30), cached=1)
    found = [index.find_hits(prompt).tokens for prompt in (prefix(10, 11), prefix(20))]
    assert found == [{"b": 200}, {"a": 100}]


def test_an_instance_that_was_forgotten_is_learned_anew() -> None:
    index = make_index("a")
    send(index, "a", prefix(10, 11))
    index.forget("a")
    send(index, "a", prefix(10))
    assert index.find_hits(prefix(10, 11)).tokens == {"a": 100}


def test_what_does_not_fit_into_the_cache_beside_newer_prompts_counts_as_evicted() -> None:
    index = make_index("a")
    send(index, "a", prefix(10), room=1000)
    for number in range(20, 40):
        send(index, "a", prefix(number), room=1000)
    found = [index.find_hits(prefix(key)).tokens for key in (10, 39)]
    assert found == [{}, {"a": 100}]


def test_fewer_reported_tokens_evict_all_that_was_used_no_later() -> None:
    index = make_index("a")
    send(index, "a", prefix(20, 21))
    send(index, "a", prefix(10, 11, 12, 13, 14))
    send(index, "a", prefix(30, 31))
    hits = index.find_hits(prefix(10, 11, 12, 13, 14))
    index.report("a", hits, prefix(10, 11, 12, 13, 14), cached_tokens=100)
    found = [index.find_hits(prefix(*keys)).tokens for keys in ((20, 21), (10, 11), (30, 31))]
    assert found == [{}, {}, {"a": 200}]


def test_a_report_nearly_as_predicted_changes_nothing() -> None:
    index = make_index("a")
    prompt = prefix(*range(10, 30))
    send(index, "a", prompt)
    hits = index.find_hits(prompt)
    index.report("a", hits, prompt, cached_tokens=1700)
    assert index.find_hits(prompt).tokens == {"a": 2000}


def test_predicted_and_reported_tokens_are_counted() -> None:
    index = make_index("a")
    send(index, "a", prefix(10, 11, 12))
    before = index.predicted_tokens, index.reported_tokens
    send(index, "a", prefix(10, 11, 13), cached=190)
    assert (index.predicted_tokens - before[0], index.reported_tokens - before[1]) == (200, 190)


def test_prompts_that_nobody_repeats_push_out_none_that_was_repeated(seed: int) -> None:
    index = make_index("a", "b", blocks=1 << 12)
    draw = random.Random(seed).getrandbits
    kept = [
        prefix(*(draw(50) << 9 | first + block for block in range(8)))  # no two in one of the 512 sets
        for first in range(0, 80, 8)
    ]
    for prompt in kept * 3:
        send(index, "a", prompt)
    for _ in range(2_000):  # ten times as many blocks as the index holds
        send(index, "b", prefix(*(draw(63) for _ in range(20))))
    assert [index.find_hits(prompt).tokens for prompt in kept] == [{"a": 800}] * 10


def test_the_least_recently_used_block_goes_first() -> None:
    index = make_index("a", blocks=64)
    same_set = [8 * number + 8 for number in range(5)]  # eight sets
    for key in same_set:
        send(index, "a", prefix(key))
    assert [bool(index.find_hits(prefix(key)).tokens) for key in same_set] == [False, True, True, True, True]


def test_more_instances_than_a_word_has_bits() -> None:
    names = [f"i{number}" for number in range(150)]
    index = make_index(*names)
    for name in names:
        send(index, name, prefix(10, 11))
    for name in ("i100", "i0"):  # the second time they move to the places of blocks that are used again
        send(index, name, prefix(20, 21))
    found = [index.find_hits(prompt).tokens for prompt in (prefix(10, 11, 12), prefix(20, 21))]
    assert found == [dict.fromkeys(names, 200), {"i0": 200, "i100": 200}]


def test_a_million_blocks_take_at_most_64_mb() -> None:
    assert PrefixIndex(1 << 20).memory_bytes <= 64_000_000


def test_a_prompt_without_blocks_has_no_hits() -> None:
    assert make_index("a").find_hits(prefix()) is NO_HITS
