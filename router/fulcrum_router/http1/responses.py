"""Answers that the router gives itself, errors in the shape that OpenAI clients read."""

from http import HTTPStatus

import orjson

_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}


def build_error_body(status: int, message: str, error_type: str | None = None) -> bytes:
    """`{"error": {...}}` as JSON."""
    error_type = (
        error_type
        or _ERROR_TYPES.get(status)
        or ("invalid_request_error" if status < 500 else "upstream_error")
    )
    return orjson.dumps({"error": {"message": message, "type": error_type, "param": None, "code": status}})


def build_response(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    header_lines: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole response. `header_lines` holds further header lines; `head_only` leaves the body out (HEAD)."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        status,
        HTTPStatus(status).phrase.encode(),
        content_type,
        len(body),
        header_lines,
        b"connection: close\r\n" if close else b"",
        b"" if head_only else body,
    )


def build_error_response(
    status: int,
    message: str,
    *,
    error_type: str | None = None,
    header_lines: bytes = b"",
    close: bool = False,
) -> bytes:
    """An error response; 503 asks the client to come back in a second."""
    if status == 503 and b"retry-after" not in header_lines:
        header_lines += b"retry-after: 1\r\n"
    return build_response(
        status, build_error_body(status, message, error_type), header_lines=header_lines, close=close
    )


def build_error_event(message: str) -> bytes:
    """The last event of a stream that broke: an error, and no `[DONE]`."""
    return b"data: %b\n\n" % orjson.dumps(
        {"error": {"message": message, "type": "upstream_error", "code": 502}}
    )
