"""Merge patches: the examples of RFC 7386, and what ties writing a patch to applying it."""

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
        pytest.param({"a": "b"}, {"a": None}, {}, id="null removes"),
        pytest.param({"a": "b"}, {"x": None}, {"a": "b"}, id="null of an absent key is nothing"),
        pytest.param({"a": ["b"]}, {"a": ["c", "d"]}, {"a": ["c", "d"]}, id="a list is replaced whole"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}, id="objects merge"),
        pytest.param({"a": 1}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}, id="nulls never get in"),
        pytest.param({"a": "foo"}, "bar", "bar", id="what is no object replaces all"),
    ],
)
def test_a_patch_is_merged_as_the_rfc_says(target: Any, patch: Any, expected: Any) -> None:
    assert apply_merge_patch(target, patch) == expected


@given(documents, documents)
def test_the_difference_of_two_documents_turns_one_into_the_other(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert apply_merge_patch(before, create_merge_patch(before, after)) == after


@given(documents)
def test_equal_documents_differ_by_an_empty_patch(document: dict[str, Any]) -> None:
    assert create_merge_patch(document, document) == {}


@given(documents, documents)
def test_merging_twice_changes_nothing_more(target: dict[str, Any], patch: dict[str, Any]) -> None:
    once = apply_merge_patch(target, patch)
    assert apply_merge_patch(once, patch) == once
