"""Field ownership: fields that an apply removes, conflicts, and fields that a patch takes over."""

from typing import Any

import pytest

from fulcrum_cluster.field_ownership import (
    UPDATE_MANAGER,
    check_conflicts,
    claim_changes,
    extract_owned_part,
    merge_applied,
    node_paths,
    replace_owned_part,
)
from fulcrum_core.errors import Conflict, InvalidInput


def owned(*fields: str) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(field.split(".")) for field in fields)


def test_status_and_system_metadata_have_no_owner() -> None:
    document = {
        "kind": "PDService",
        "metadata": {"name": "chat", "uid": "1", "labels": {"a": "b"}},
        "spec": {"model": "m"},
        "status": {"flips": 1},
    }
    assert extract_owned_part(document) == {"metadata": {"labels": {"a": "b"}}, "spec": {"model": "m"}}


def test_keyed_lists_round_trip() -> None:
    pools = [{"name": "b", "role": "Decode"}, {"name": "a", "role": "Prefill"}]
    document = {"kind": "PDService", "metadata": {"name": "chat"}, "spec": {"pools": pools}}
    part = extract_owned_part(document)
    assert part["spec"]["pools"] == {"b": pools[0], "a": pools[1]}
    assert replace_owned_part(document, part) == document


@pytest.mark.parametrize(
    ("pools", "line"),
    [
        pytest.param(
            [{"role": "Decode"}], "spec.pools[0].name (None) is required", id="an item without its key"
        ),
        pytest.param(
            [{"name": "a"}, {"name": "a"}], "spec.pools[1].name (a) is used twice", id="one key twice"
        ),
    ],
)
def test_keyed_list_with_missing_or_repeated_keys_is_refused(pools: list[Any], line: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        extract_owned_part({"metadata": {}, "spec": {"pools": pools}})
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("live", "applied", "managers", "expected"),
    [
        pytest.param({"a": 1}, {"b": 2}, {}, {"a": 1, "b": 2}, id="a field without an owner stays"),
        pytest.param(
            {"a": 1, "b": 2}, {"b": 2}, {"me": owned("a", "b")}, {"b": 2}, id="an omitted field is removed"
        ),
        pytest.param(
            {"a": 1, "b": 2},
            {"b": 2},
            {"me": owned("a", "b"), "you": owned("a")},
            {"a": 1, "b": 2},
            id="an omitted field of another manager stays",
        ),
        pytest.param(
            {"a": {"b": 1, "c": 2}},
            {},
            {"me": owned("a", "a.b")},
            {},
            id="an omitted object is removed with its defaults",
        ),
        pytest.param(
            {"a": {"b": 1, "c": 2}},
            {},
            {"me": owned("a", "a.b"), "you": owned("a", "a.c")},
            {"a": {"c": 2}},
            id="the part of an object that another manager owns stays",
        ),
        pytest.param(
            {"a": {"b": 1}},
            {"a": {"b": 2}},
            {"me": owned("a", "a.b")},
            {"a": {"b": 2}},
            id="an own field changes",
        ),
    ],
)
def test_apply_removes_only_what_no_other_manager_owns(
    live: dict[str, Any], applied: dict[str, Any], managers: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert merge_applied(live, applied, managers, "me") == expected


def test_conflict_names_the_field_both_values_and_the_owner() -> None:
    with pytest.raises(Conflict) as refused:
        check_conflicts({"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"b": 2}}, {"you": owned("a", "a.b")}, "me")
    assert str(refused.value) == 'a.b (2) is owned by field manager "you", which set 1'


def test_conflict_with_an_update_says_so() -> None:
    with pytest.raises(Conflict, match="owned by a create or patch"):
        check_conflicts({"a": 1}, {"a": 2}, {"a": 2}, {UPDATE_MANAGER: owned("a")}, "me")


@pytest.mark.parametrize(
    ("live", "new", "managers"),
    [
        pytest.param({"a": 1}, {"a": 1}, {"you": owned("a")}, id="an equal value is shared"),
        pytest.param({"a": 1}, {"a": 2}, {"me": owned("a")}, id="my own field"),
        pytest.param({"a": 1}, {"a": 2}, {}, id="a field without an owner"),
    ],
)
def test_equal_own_and_unowned_values_do_not_conflict(
    live: dict[str, Any], new: dict[str, Any], managers: dict[str, Any]
) -> None:
    check_conflicts(live, new, new, managers, "me")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(
            {"a": 1},
            {"a": 1},
            {"me": owned("a", "b"), UPDATE_MANAGER: owned()},
            id="an equal value keeps its owner",
        ),
        pytest.param(
            {"a": 1},
            {"a": 2},
            {"me": owned("b"), UPDATE_MANAGER: owned("a")},
            id="a changed field changes its owner",
        ),
        pytest.param(
            {"a": 1}, {}, {"me": owned("b"), UPDATE_MANAGER: owned()}, id="a removed field has no owner"
        ),
        pytest.param(
            {},
            {"c": {"d": 1}},
            {"me": owned("a", "b"), UPDATE_MANAGER: owned("c", "c.d")},
            id="an added object and its fields",
        ),
    ],
)
def test_update_takes_ownership_of_changed_fields(
    before: dict[str, Any], after: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert claim_changes(before, after, {"me": owned("a", "b")}) == expected


def test_node_paths_include_inner_keys() -> None:
    assert set(node_paths({"a": {"b": [1], "c": {}}})) == {("a",), ("a", "b"), ("a", "c")}
