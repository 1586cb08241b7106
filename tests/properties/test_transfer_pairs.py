"""Pairing holds for all identities: with itself always, both ways only between equals."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.transfer import can_transfer
from fulcrum_core.values import Identity

IDENTITIES = st.builds(
    Identity,
    model=st.sampled_from(["m", "M"]),
    engine=st.sampled_from(["v1", "v2"]),
    kv_dtype=st.sampled_from(["bf16", "fp8"]),
    block_size=st.sampled_from([16, 32]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    kv_heads=st.just(2),
)


@given(IDENTITIES)
def test_equals_always_pair(one: Identity) -> None:
    assert can_transfer(one, one).allowed


@given(IDENTITIES, IDENTITIES)
def test_both_ways_only_between_equals_and_splits_without_copies(one: Identity, other: Identity) -> None:
    """So what a pool that flips, and needs it both ways, may differ in is how KV heads are split."""
    both = can_transfer(one, other).allowed and can_transfer(other, one).allowed
    split = max(one.tensor_parallel, other.tensor_parallel) <= one.kv_heads
    assert both == (one == other or (split and one == replace(other, tensor_parallel=one.tensor_parallel)))


@given(IDENTITIES, IDENTITIES, st.sampled_from([1, 2, 4, 8]))
def test_a_finer_split_of_decode_never_breaks_a_pair(one: Identity, other: Identity, factor: int) -> None:
    finer = replace(other, tensor_parallel=other.tensor_parallel * factor)
    assert can_transfer(one, finer).allowed >= can_transfer(one, other).allowed


@given(IDENTITIES, IDENTITIES, IDENTITIES)
def test_pairing_is_transitive(one: Identity, two: Identity, three: Identity) -> None:
    if can_transfer(one, two).allowed and can_transfer(two, three).allowed:
        assert can_transfer(one, three).allowed
