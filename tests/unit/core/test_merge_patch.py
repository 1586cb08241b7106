"""Merge patches: the examples of RFC 7386, and round trips of computing and applying a patch."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.merge_patch import apply_merge_patch, create_merge_patch

values = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda children: st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        pytest.param({"a": "b"}, {"a": "c"}, {"a": "c"}, id="a value is replaced"),
        pytest.param({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}, id="a key is added"),
        pytest.param({"a": "b"}, {"a": None}, {}, id="null removes a key"),
        pytest.param({"a": "b"}, {"x": None}, {"a": "b"}, id="null for an absent key changes nothing"),
        pytest.param({"a": ["b"]}, {"a": ["c", "d"]}, {"a": ["c", "d"]}, id="a list is replaced whole"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}, id="objects merge"),
        pytest.param({"a": 1}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}, id="nulls are never stored"),
        pytest.param({"a": "foo"}, "bar", "bar", id="a patch that is not an object replaces everything"),
    ],
)
def test_patch_is_merged_as_in_rfc_7386(target: Any, patch: Any, expected: Any) -> None:
    assert apply_merge_patch(target, patch) == expected


@given(documents, documents)
def test_patch_between_two_documents_turns_one_into_the_other(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert apply_merge_patch(before, create_merge_patch(before, after)) == after


@given(documents)
def test_patch_between_equal_documents_is_empty(document: dict[str, Any]) -> None:
    assert create_merge_patch(document, document) == {}


@given(documents, documents)
def test_merging_a_patch_twice_equals_merging_it_once(target: dict[str, Any], patch: dict[str, Any]) -> None:
    once = apply_merge_patch(target, patch)
    assert apply_merge_patch(once, patch) == once
