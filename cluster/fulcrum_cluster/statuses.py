"""Our errors as Kubernetes' Status objects, and back: what the socket's two ends agree on."""

import json
from collections.abc import Mapping
from typing import Any

from fulcrum_core.errors import (
    AlreadyExists,
    Conflict,
    FulcrumError,
    Gone,
    InvalidInput,
    NotFound,
    StoreUnavailable,
)

_INVALID = "Invalid value: "
_REASONS: Mapping[type[FulcrumError], tuple[int, str]] = {
    InvalidInput: (422, "Invalid"),
    NotFound: (404, "NotFound"),
    AlreadyExists: (409, "AlreadyExists"),
    Conflict: (409, "Conflict"),
    Gone: (410, "Expired"),
}
_ERRORS = {reason: error for error, (_, reason) in _REASONS.items()} | {"Gone": Gone}


def status_of(error: FulcrumError) -> dict[str, Any]:
    """The Status object that says this error."""
    code, reason = _REASONS.get(type(error), (500, "InternalError"))
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason}
    status["message"] = str(error)
    if isinstance(error, InvalidInput):
        status["details"] = {"causes": [_cause(error)]}
    return status


def error_of(status: Mapping[str, Any]) -> FulcrumError:
    """The error that a Status object says; what cannot be read as one of ours is `StoreUnavailable`."""
    message = str(status.get("message", "the store gave no reason"))
    reason = status.get("reason")
    if reason == "Invalid":
        return _invalid(status, message)
    error = _ERRORS.get(str(reason), Gone if status.get("code") == 410 else StoreUnavailable)
    return error(message)


def _cause(error: InvalidInput) -> dict[str, Any]:
    message = f"{_INVALID}{json.dumps(str(error.value))}: {error.rule}"
    return {"reason": "FieldValueInvalid", "field": error.path, "message": message}


def _invalid(status: Mapping[str, Any], message: str) -> InvalidInput:
    causes = status.get("details", {}).get("causes") or [{}]
    path, text = causes[0].get("field", "object"), causes[0].get("message", message)
    try:
        value, end = json.JSONDecoder().raw_decode(text.removeprefix(_INVALID))
    except ValueError:
        return InvalidInput(path, "refused", text)
    return InvalidInput(path, value, text.removeprefix(_INVALID)[end:].removeprefix(": "))
