"""Converts our errors to Kubernetes' Status objects and back, for `store_server` and `client`.

API servers word a refusal differently for a schema, a CEL rule, strict decoding, an apply and the authorizer;
only this module parses those texts. Whether to retry is decided by callers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

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

_INVALID_VALUE_PREFIX = "Invalid value: "
_REASONS: Mapping[type[FulcrumError], tuple[int, str]] = {
    InvalidInput: (422, "Invalid"),
    NotFound: (404, "NotFound"),
    AlreadyExists: (409, "AlreadyExists"),
    Conflict: (409, "Conflict"),
    Gone: (410, "Expired"),
    Forbidden: (403, "Forbidden"),
}
_ERRORS_BY_REASON = {reason: error for error, (_, reason) in _REASONS.items()} | {"Gone": Gone}
_ERRORS_BY_CODE = {401: Forbidden, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone}

_UNKNOWN_FIELD = re.compile(r'(?:unknown|duplicate) field "([^"]+)"')
_UNDECLARED_FIELD = re.compile(r"(\.[^\s:]+): field not declared in schema")
_MISMATCH = re.compile(r"(\.[^\s:]+): (expected [^\n]+)")
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" '
    r'in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_IN_BODY_PREFIX = re.compile(r"^\S+ in body ")


def status_from_error(error: FulcrumError) -> dict[str, Any]:
    """Convert an error to a Status object."""
    code, reason = _REASONS.get(type(error), (500, "InternalError"))
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason}
    status["message"] = str(error)
    if isinstance(error, InvalidInput):
        status["details"] = {"causes": [_cause(error)]}
    return status


def error_from_status(status: Mapping[str, Any], sent: Mapping[str, Any] | None = None) -> FulcrumError:
    """Convert a Status object to an error; an unknown Status is `StoreUnavailable`.

    `sent` is the refused object: the value at the refused path is read from it.
    """
    message = " ".join(str(status.get("message", "the store gave no reason")).split())
    reason, code = status.get("reason"), status.get("code")
    if reason == "Invalid":
        return _invalid(status, message, sent)
    if reason == "BadRequest" or code in (400, 422) or _UNDECLARED_FIELD.search(message):
        return _bad_request(message, sent)
    if reason == "Forbidden":
        return Forbidden(_missing_permission(message))
    if reason == "Conflict":
        return Conflict(_conflicting_fields(status) or message)
    if code == 401:
        return Forbidden(f"the API server does not accept these credentials: {message}")
    details = status.get("details") or {}
    error = _ERRORS_BY_REASON.get(str(reason)) or _ERRORS_BY_CODE.get(code if isinstance(code, int) else 0)
    if error is NotFound and details.get("kind") == "namespaces":
        return NamespaceNotFound(message)
    if error:
        return error(message)
    wait_s = details.get("retryAfterSeconds")
    return StoreUnavailable(message, retry_after_s=wait_s)


def _cause(error: InvalidInput) -> dict[str, Any]:
    message = f"{_INVALID_VALUE_PREFIX}{json.dumps(str(error.value))}: {error.rule}"
    return {"reason": "FieldValueInvalid", "field": error.path, "message": message}


def _invalid(status: Mapping[str, Any], message: str, sent: Mapping[str, Any] | None) -> InvalidInput:
    causes = (status.get("details") or {}).get("causes") or [{}]
    path, text = causes[0].get("field", "object"), str(causes[0].get("message", message))
    if "strict decoding error" in text:  # refusal of a patch with an unknown field
        return _bad_request(text, sent)
    value, rule = _value_and_rule(text)
    if causes[0].get("reason") == "FieldValueRequired":
        return InvalidInput(path, "nothing", "is required")
    found = _value_at(sent, path)
    return InvalidInput(path, value if found is None else _shorten(found), _IN_BODY_PREFIX.sub("", rule))


def _value_and_rule(text: str) -> tuple[Any, str]:
    """Split Kubernetes' `Invalid value: "x": rule` into value and rule."""
    if not text.startswith(_INVALID_VALUE_PREFIX):
        return "refused", text
    rest = text.removeprefix(_INVALID_VALUE_PREFIX)
    try:
        value, end = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return "refused", text
    return value, rest[end:].removeprefix(": ")


def _bad_request(message: str, sent: Mapping[str, Any] | None) -> InvalidInput:
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        path = unknown[1]
        rule = "is written twice" if unknown[0].startswith("duplicate") else "is not a field"
        return InvalidInput(path, _shorten(_value_at(sent, path)), rule)
    undeclared = _UNDECLARED_FIELD.search(message)
    if undeclared:
        path = undeclared[1].lstrip(".")
        return InvalidInput(path, _shorten(_value_at(sent, path)), "is not a field")
    mismatch = _MISMATCH.search(message)
    if mismatch:
        path = mismatch[1].lstrip(".")
        return InvalidInput(path, _shorten(_value_at(sent, path)), mismatch[2])
    return InvalidInput("object", "refused", message)


def _missing_permission(message: str) -> str:
    """Account, verb, resource and namespace of the authorizer's refusal; other texts stay unchanged."""
    match = _FORBIDDEN.search(message)
    if not match:
        return message
    resource = ".".join(part for part in (match["resource"], match["group"]) if part)
    where = f"in namespace {match['namespace']}" if match["namespace"] else "at cluster scope"
    return f"{match['user']} cannot {match['verb']} {resource} {where}"


def _conflicting_fields(status: Mapping[str, Any]) -> str:
    """Conflicting fields of an apply, each with the manager that owns it."""
    causes = (status.get("details") or {}).get("causes") or ()
    conflicts = [cause for cause in causes if cause.get("reason") == "FieldManagerConflict"]
    return ", ".join(f"{cause['field'].lstrip('.')} ({cause['message']})" for cause in conflicts)


def _value_at(sent: Any, path: str) -> Any:
    """The value at `spec.pools[0].name`, or None."""
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(sent, Mapping):
            sent = sent.get(part)
        elif isinstance(sent, list | tuple) and part.isdecimal() and int(part) < len(sent):
            sent = sent[int(part)]
        else:
            return None
    return sent


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
