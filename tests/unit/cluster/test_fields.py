"""Field ownership: what an apply removes, what it may not touch, what a plain write takes over."""

from typing import Any

import pytest

from fulcrum_cluster.fields import (
    UPDATES,
    check_conflicts,
    claim_changes,
    merge_applied,
    nodes,
    owned_part,
    with_owned_part,
)
from fulcrum_core.errors import Conflict, InvalidInput


def owned(*fields: str) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(field.split(".")) for field in fields)


def test_status_and_what_the_store_gives_belong_to_nobody() -> None:
    document = {
        "kind": "PDService",
        "metadata": {"name": "chat", "uid": "1", "labels": {"a": "b"}},
        "spec": {"model": "m"},
        "status": {"flips": 1},
    }
    assert owned_part(document) == {"metadata": {"labels": {"a": "b"}}, "spec": {"model": "m"}}


def test_keyed_lists_come_back_as_they_were() -> None:
    pools = [{"name": "b", "role": "Decode"}, {"name": "a", "role": "Prefill"}]
    document = {"kind": "PDService", "metadata": {"name": "chat"}, "spec": {"pools": pools}}
    part = owned_part(document)
    assert part["spec"]["pools"] == {"b": pools[0], "a": pools[1]}
    assert with_owned_part(document, part) == document


@pytest.mark.parametrize(
    ("pools", "line"),
    [
        pytest.param(
            [{"role": "Decode"}], "spec.pools[0].name (None) is required", id="an item without its key"
        ),
        pytest.param(
            [{"name": "a"}, {"name": "a"}], "spec.pools[1].name (a) is there twice", id="one key twice"
        ),
    ],
)
def test_a_keyed_list_with_bad_keys_is_refused(pools: list[Any], line: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        owned_part({"metadata": {}, "spec": {"pools": pools}})
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("live", "applied", "managers", "expected"),
    [
        pytest.param({"a": 1}, {"b": 2}, {}, {"a": 1, "b": 2}, id="what nobody owns stays"),
        pytest.param(
            {"a": 1, "b": 2}, {"b": 2}, {"me": owned("a", "b")}, {"b": 2}, id="what I left out goes"
        ),
        pytest.param(
            {"a": 1, "b": 2},
            {"b": 2},
            {"me": owned("a", "b"), "you": owned("a")},
            {"a": 1, "b": 2},
            id="what you own too stays",
        ),
        pytest.param(
            {"a": {"b": 1, "c": 2}},
            {},
            {"me": owned("a", "a.b")},
            {},
            id="an object I alone had goes with its defaults",
        ),
        pytest.param(
            {"a": {"b": 1, "c": 2}},
            {},
            {"me": owned("a", "a.b"), "you": owned("a", "a.c")},
            {"a": {"c": 2}},
            id="an object you hold a part of stays with that",
        ),
        pytest.param(
            {"a": {"b": 1}}, {"a": {"b": 2}}, {"me": owned("a", "a.b")}, {"a": {"b": 2}}, id="mine changes"
        ),
    ],
)
def test_an_apply_keeps_adds_and_removes(
    live: dict[str, Any], applied: dict[str, Any], managers: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert merge_applied(live, applied, managers, "me") == expected


def test_a_conflict_names_the_field_both_values_and_the_owner() -> None:
    with pytest.raises(Conflict) as refused:
        check_conflicts({"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"b": 2}}, {"you": owned("a", "a.b")}, "me")
    assert str(refused.value) == 'a.b (2) is owned by field manager "you", which set 1'


def test_a_conflict_with_a_plain_write_says_so() -> None:
    with pytest.raises(Conflict, match="owned by another writer"):
        check_conflicts({"a": 1}, {"a": 2}, {"a": 2}, {UPDATES: owned("a")}, "me")


@pytest.mark.parametrize(
    ("live", "new", "managers"),
    [
        pytest.param({"a": 1}, {"a": 1}, {"you": owned("a")}, id="an equal value is shared"),
        pytest.param({"a": 1}, {"a": 2}, {"me": owned("a")}, id="my own field"),
        pytest.param({"a": 1}, {"a": 2}, {}, id="nobody's field"),
    ],
)
def test_no_conflict(live: dict[str, Any], new: dict[str, Any], managers: dict[str, Any]) -> None:
    check_conflicts(live, new, new, managers, "me")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(
            {"a": 1}, {"a": 1}, {"me": owned("a", "b"), UPDATES: owned()}, id="nothing changes hands"
        ),
        pytest.param({"a": 1}, {"a": 2}, {"me": owned("b"), UPDATES: owned("a")}, id="a changed field does"),
        pytest.param({"a": 1}, {}, {"me": owned("b"), UPDATES: owned()}, id="a removed field is nobody's"),
        pytest.param(
            {},
            {"c": {"d": 1}},
            {"me": owned("a", "b"), UPDATES: owned("c", "c.d")},
            id="an added object with all in it",
        ),
    ],
)
def test_a_plain_write_owns_what_it_changed(
    before: dict[str, Any], after: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert claim_changes(before, after, {"me": owned("a", "b")}) == expected


def test_nodes_are_every_key_on_the_way() -> None:
    assert set(nodes({"a": {"b": [1], "c": {}}})) == {("a",), ("a", "b"), ("a", "c")}
