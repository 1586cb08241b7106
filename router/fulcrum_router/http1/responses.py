"""Answers that the router gives itself, errors in the shape that OpenAI clients read."""

from http import HTTPStatus

import orjson

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}


def error_object(status: int, message: str, kind: str | None = None) -> bytes:
    """`{"error": {...}}` as JSON."""
    kind = kind or _TYPES.get(status) or ("invalid_request_error" if status < 500 else "upstream_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})


def answer(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    extra: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole answer. `extra` holds further header lines; `head_only` leaves the body out (HEAD)."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        status,
        HTTPStatus(status).phrase.encode(),
        content_type,
        len(body),
        extra,
        b"connection: close\r\n" if close else b"",
        b"" if head_only else body,
    )


def error(
    status: int, message: str, *, kind: str | None = None, extra: bytes = b"", close: bool = False
) -> bytes:
    """An error answer; 503 asks the client to come back in a second."""
    if status == 503 and b"retry-after" not in extra:
        extra += b"retry-after: 1\r\n"
    return answer(status, error_object(status, message, kind), extra=extra, close=close)


def error_event(message: str) -> bytes:
    """The last event of a stream that broke: an error, and no `[DONE]`."""
    return b"data: %b\n\n" % orjson.dumps(
        {"error": {"message": message, "type": "upstream_error", "code": 502}}
    )
