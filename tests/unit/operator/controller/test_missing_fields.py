"""Fields that the CRDs lack are left out of writes, named, and tried again."""

from typing import Any

import pytest

from fulcrum_core.api import PDAssignment, PDInstance, PDPool, Resource
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.controller.missing_fields import MissingFields
from fulcrum_operator.plan.observed import FailureCause


def missing(kind: type[Resource], *paths: str) -> MissingFields:
    fields = MissingFields()
    for path in paths:
        assert fields.note(kind, InvalidInput(path, "x", "is not a field"))
    return fields


@pytest.mark.parametrize(
    ("path", "document", "pruned"),
    [
        pytest.param("status.a", {"status": {"a": 1, "b": 2}}, {"status": {"b": 2}}, id="a field"),
        pytest.param("status.a", {"status": {"a": 1}}, {}, id="the only field"),
        pytest.param("status.m.a", {"status": {"m": {"a": 1}, "b": {}}}, {"status": {"b": {}}}, id="nested"),
        pytest.param(
            "spec.pools[0].a",
            {"spec": {"pools": [{"a": 1, "b": 1}, {"a": 2, "b": 2}]}},
            {"spec": {"pools": [{"b": 1}, {"b": 2}]}},
            id="in each item of a list",
        ),
        pytest.param("status.a", {"spec": {"a": 1}}, {"spec": {"a": 1}}, id="elsewhere"),
        pytest.param("status.a.b", {"status": {"a": None}}, {"status": {"a": None}}, id="a removed parent"),
    ],
)
def test_a_missing_field_is_left_out(path: str, document: dict[str, Any], pruned: dict[str, Any]) -> None:
    assert missing(PDPool, path).prune(PDPool, document) == pruned


def test_a_field_of_one_assignment_entry_is_left_out_of_all() -> None:
    fields = missing(PDAssignment, "spec.roles.chat-0.a")
    document = {"spec": {"roles": {"chat-0": {"a": 1, "b": 1}, "chat-1": {"a": 1, "b": 1}}}}
    pruned = {"spec": {"roles": {"chat-0": {"b": 1}, "chat-1": {"b": 1}}}}
    assert fields.prune(PDAssignment, document) == pruned


def test_a_refusal_for_another_reason_is_not_a_missing_field() -> None:
    assert not MissingFields().note(PDPool, InvalidInput("spec.a", 1, "is greater than 0"))


def test_missing_fields_are_named_until_they_are_accepted() -> None:
    fields = missing(PDPool, "spec.a", "status.b")
    fields.note(PDInstance, InvalidInput("status.c", "x", "is not a field"))
    text = (
        "the CRDs are older than the operator and lack pdinstances status.c, pdpools spec.a, pdpools status.b"
    )
    assert fields.causes() == (FailureCause("CRDsOutdated", f"{text}; apply the operator's CRDs"),)
    fields.retry_all()
    assert fields.prune(PDPool, {"spec": {"a": 1}}) == {"spec": {"a": 1}}, "it is tried once more"
    assert fields.note(PDPool, InvalidInput("spec.a", "x", "is not a field"))
    assert fields.prune(PDPool, {"spec": {"a": 1}}) == {}
    fields.note_accepted(PDPool, {"status": {"b": 1}})
    fields.note_accepted(PDInstance, {"status": {"c": 1}})
    named = "the CRDs are older than the operator and lack pdpools spec.a; apply the operator's CRDs"
    assert fields.causes() == (FailureCause("CRDsOutdated", named),)


def test_fields_that_are_not_sent_once_more_are_forgotten() -> None:
    fields = missing(PDPool, "spec.a", "spec.b")
    fields.retry_all()
    assert fields.note(PDPool, InvalidInput("spec.b", "x", "is not a field"))
    fields.forget_unsent()
    named = "the CRDs are older than the operator and lack pdpools spec.b; apply the operator's CRDs"
    assert fields.causes() == (FailureCause("CRDsOutdated", named),)
