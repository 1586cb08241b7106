"""Invariants of `can_transfer`, for any two or three engine identities."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import EngineIdentity

IDENTITIES = st.builds(
    EngineIdentity,
    model=st.sampled_from(["m", "M"]),
    engine=st.sampled_from(["v1", "v2"]),
    kv_dtype=st.sampled_from(["bf16", "fp8"]),
    block_size=st.sampled_from([16, 32]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    kv_heads=st.just(2),
)


@given(IDENTITIES)
def test_an_identity_can_always_transfer_to_itself(one: EngineIdentity) -> None:
    assert can_transfer(one, one).allowed


@given(IDENTITIES, IDENTITIES)
def test_transfer_in_both_directions_needs_identities_equal_up_to_the_head_split(
    one: EngineIdentity, other: EngineIdentity
) -> None:
    """A pool that flips needs both directions: its engines may differ only in how KV heads are split."""
    both = can_transfer(one, other).allowed and can_transfer(other, one).allowed
    split = max(one.tensor_parallel, other.tensor_parallel) <= one.kv_heads
    assert both == (one == other or (split and one == replace(other, tensor_parallel=one.tensor_parallel)))


@given(IDENTITIES, IDENTITIES, st.sampled_from([1, 2, 4, 8]))
def test_more_tensor_parallelism_on_decode_never_forbids_a_transfer(
    one: EngineIdentity, other: EngineIdentity, factor: int
) -> None:
    finer = replace(other, tensor_parallel=other.tensor_parallel * factor)
    assert can_transfer(one, finer).allowed >= can_transfer(one, other).allowed


@given(IDENTITIES, IDENTITIES, IDENTITIES)
def test_transferability_is_transitive(
    one: EngineIdentity, two: EngineIdentity, three: EngineIdentity
) -> None:
    if can_transfer(one, two).allowed and can_transfer(two, three).allowed:
        assert can_transfer(one, three).allowed
