"""Status objects and errors: our errors survive a round trip, and those of API servers become our errors."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_cluster.error_status import error_from_status, status_from_error
from fulcrum_core.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    FulcrumError,
    Gone,
    InvalidInput,
    NamespaceNotFound,
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
        (Forbidden("not your chat"), 403),
        (InvalidInput("spec.instances", 0, "is less than 1"), 422),
        (StoreUnavailable("no store"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_round_trips_with_text_and_code(error: FulcrumError, code: int) -> None:
    status = status_from_error(error)
    back = error_from_status(status)
    assert (type(back), str(back), status["code"]) == (type(error), str(error), code)


@given(st.text(), st.text(), st.text())
def test_invalid_input_round_trips_with_path_value_and_rule(path: str, value: str, rule: str) -> None:
    back = error_from_status(status_from_error(InvalidInput(path, value, rule)))
    assert isinstance(back, InvalidInput)
    assert (back.path, back.value, back.rule) == (path, value, rule)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param(
            {"code": 410, "reason": "Gone", "message": "m"}, Gone("m"), id="the older reason of 410"
        ),
        pytest.param({"code": 410, "message": "m"}, Gone("m"), id="410 without a reason"),
        pytest.param(
            {"code": 404, "reason": "NotFound", "message": "m", "details": {"kind": "namespaces"}},
            NamespaceNotFound("m"),
            id="the namespace is gone",
        ),
        pytest.param({"code": 503, "message": "m"}, StoreUnavailable("m"), id="a server error"),
        pytest.param({}, StoreUnavailable("the store gave no reason"), id="an empty status"),
        pytest.param(
            {"reason": "Invalid", "message": "m"}, InvalidInput("object", "refused", "m"), id="no cause"
        ),
        pytest.param(
            {"reason": "Invalid", "details": {"causes": [{"field": "spec", "message": "must be so"}]}},
            InvalidInput("spec", "refused", "must be so"),
            id="a cause without a value",
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
def test_api_server_statuses_become_our_errors(status: dict[str, Any], expected: FulcrumError) -> None:
    error = error_from_status(status)
    assert (type(error), str(error)) == (type(expected), str(expected))


SENT = {"spec": {"instances": 3, "pools": [{"name": "a"}, {"name": "b", "nonsense": 1}]}}
"""The object that the API server refused: the refused value is read from it."""


def status(code: int, reason: str, message: str, *causes: dict[str, str]) -> dict[str, Any]:
    return {"code": code, "reason": reason, "message": message, "details": {"causes": list(causes)}}


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        pytest.param(
            status(
                400,
                "BadRequest",
                'PDService in version "v1alpha1" cannot be handled as a PDService: strict decoding error: '
                'unknown field "spec.pools[1].nonsense"',
            ),
            InvalidInput("spec.pools[1].nonsense", 1, "is not a field"),
            id="strict decoding",
        ),
        pytest.param(
            status(
                422,
                "Invalid",
                "m",
                {
                    "reason": "FieldValueInvalid",
                    "field": "patch",
                    "message": 'Invalid value: {"spec":{}}: strict decoding error: unknown field "spec.x"',
                },
            ),
            InvalidInput("spec.x", "null", "is not a field"),
            id="strict decoding of a patch",
        ),
        pytest.param(
            status(
                500,
                "",
                "failed to create typed patch object (default/chat; fulcrum.dev/v1alpha1, Kind=PDService): "
                ".spec.nonsense: field not declared in schema",
            ),
            InvalidInput("spec.nonsense", "null", "is not a field"),
            id="an unknown field in an apply",
        ),
        pytest.param(
            status(
                422,
                "Invalid",
                "m",
                {
                    "reason": "FieldValueInvalid",
                    "field": "spec.instances",
                    "message": "Invalid value: 3: spec.instances in body should be less than or equal to 2",
                },
            ),
            InvalidInput("spec.instances", 3, "should be less than or equal to 2"),
            id="a bound of the schema",
        ),
        pytest.param(
            status(
                422,
                "Invalid",
                "m",
                {"reason": "FieldValueRequired", "field": "spec.model", "message": "Required value"},
            ),
            InvalidInput("spec.model", "nothing", "is required"),
            id="a required field",
        ),
        pytest.param(
            status(
                403,
                "Forbidden",
                'pdservices.fulcrum.dev is forbidden: User "system:serviceaccount:a:b" cannot list resource '
                '"pdservices" in API group "fulcrum.dev" in the namespace "team"',
            ),
            Forbidden("system:serviceaccount:a:b cannot list pdservices.fulcrum.dev in namespace team"),
            id="a missing permission in a namespace",
        ),
        pytest.param(
            status(
                403,
                "Forbidden",
                'nodes is forbidden: User "me" cannot watch resource "nodes" in API group "" '
                "at the cluster scope",
            ),
            Forbidden("me cannot watch nodes at cluster scope"),
            id="a missing permission at cluster scope",
        ),
        pytest.param(
            status(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: compute'),
            Forbidden('pods "x" is forbidden: exceeded quota: compute'),
            id="a quota",
        ),
        pytest.param(
            status(401, "Unauthorized", "Unauthorized"),
            Forbidden("the API server does not accept these credentials: Unauthorized"),
            id="invalid credentials",
        ),
        pytest.param(
            status(
                409,
                "Conflict",
                'Apply failed with 1 conflict: conflict with "you": .spec.instances',
                {
                    "reason": "FieldManagerConflict",
                    "field": ".spec.instances",
                    "message": 'conflict with "you"',
                },
            ),
            Conflict('spec.instances (conflict with "you")'),
            id="a field that another manager applied",
        ),
    ],
)
def test_api_server_refusals_become_path_value_and_rule(
    refusal: dict[str, Any], expected: FulcrumError
) -> None:
    error = error_from_status(refusal, SENT)
    assert (type(error), str(error)) == (type(expected), str(expected))


def test_retry_after_seconds_are_kept() -> None:
    error = error_from_status({"code": 503, "message": "m", "details": {"retryAfterSeconds": 3}})
    assert isinstance(error, StoreUnavailable)
    assert error.retry_after_s == 3
