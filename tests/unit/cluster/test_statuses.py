"""Errors on the wire: what one end raises, the other end raises too."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_cluster.statuses import error_of, status_of
from fulcrum_core.errors import (
    AlreadyExists,
    Conflict,
    FulcrumError,
    Gone,
    InvalidInput,
    NotFound,
    StoreUnavailable,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound("no chat"), 404),
        (AlreadyExists("a chat"), 409),
        (Conflict("another chat"), 409),
        (Gone("old chat"), 410),
        (InvalidInput("spec.instances", 0, "is less than 1"), 422),
        (StoreUnavailable("no store"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_comes_through_with_its_text_and_code(error: FulcrumError, code: int) -> None:
    status = status_of(error)
    back = error_of(status)
    assert (type(back), str(back), status["code"]) == (type(error), str(error), code)


@given(st.text(), st.text(), st.text())
def test_any_refusal_comes_through_whole(path: str, value: str, rule: str) -> None:
    back = error_of(status_of(InvalidInput(path, value, rule)))
    assert isinstance(back, InvalidInput)
    assert (back.path, back.value, back.rule) == (path, value, rule)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param(
            {"code": 410, "reason": "Gone", "message": "m"}, Gone("m"), id="the older reason of 410"
        ),
        pytest.param({"code": 410, "message": "m"}, Gone("m"), id="410 without a reason"),
        pytest.param({"code": 503, "message": "m"}, StoreUnavailable("m"), id="a server in trouble"),
        pytest.param({}, StoreUnavailable("the store gave no reason"), id="no word at all"),
        pytest.param(
            {"reason": "Invalid", "message": "m"}, InvalidInput("object", "refused", "m"), id="no cause given"
        ),
        pytest.param(
            {"reason": "Invalid", "details": {"causes": [{"field": "spec", "message": "must be so"}]}},
            InvalidInput("spec", "refused", "must be so"),
            id="a cause in other words",
        ),
        pytest.param(
            {
                "reason": "Invalid",
                "details": {"causes": [{"field": "spec.x", "message": 'Invalid value: "object": no good'}]},
            },
            InvalidInput("spec.x", "object", "no good"),
            id="a cause as API servers write it",
        ),
    ],
)
def test_what_an_api_server_may_say_is_understood(status: dict[str, Any], expected: FulcrumError) -> None:
    error = error_of(status)
    assert (type(error), str(error)) == (type(expected), str(expected))
