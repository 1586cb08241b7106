"""Build responses of the router as bytes; errors have the shape that OpenAI clients parse.

Legs, `downstream` and `router_paths` send them. Responses of engines are forwarded as they are.
"""

from http import HTTPStatus

import orjson

from fulcrum_core.openai_errors import build_error_object
from fulcrum_router.http1.framing import frame_chunk

_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}
_REASON_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
"""An engine may answer with a status that has none."""

DO_NOT_RETRY = b"x-should-retry: false\r\n"
"""Header line that OpenAI's clients obey: by default they send a request with status 5xx twice more."""


def build_error_body(status: int, message: str, error_type: str | None = None) -> bytes:
    """Build the JSON body `{"error": {...}}`; the type follows from the status unless it is given."""
    error_type = (
        error_type
        or _ERROR_TYPES.get(status)
        or ("invalid_request_error" if status < 500 else "upstream_error")
    )
    return orjson.dumps(build_error_object(message, error_type=error_type, status=status))


def build_response(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    header_lines: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """Build a whole response with further `header_lines`; `head_only` omits the body (HEAD)."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        status,
        _REASON_PHRASES.get(status, b""),
        content_type,
        len(body),
        header_lines,
        b"connection: close\r\n" if close else b"",
        b"" if head_only else body,
    )


def build_refusal_response(reason: str, message: str, *, retry_after_s: int, close: bool) -> bytes:
    """Build the 429 for a request that is not admitted: with its reason, and when to send it again."""
    lines = b"x-fulcrum-refused: %b\r\nretry-after: %d\r\n" % (reason.encode(), retry_after_s)
    return build_error_response(429, message, error_type=reason, header_lines=lines, close=close)


def build_error_response(
    status: int,
    message: str,
    *,
    error_type: str | None = None,
    header_lines: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """Build an error response; a 503 has `retry-after: 1`, in seconds."""
    if status == 503:
        header_lines += b"retry-after: 1\r\n"
    body = build_error_body(status, message, error_type)
    return build_response(status, body, header_lines=header_lines, close=close, head_only=head_only)


def build_broken_stream_event(message: str) -> bytes:
    """Build the last event of a broken stream: an error; no `[DONE]` follows."""
    return b"data: %b\n\n" % build_error_body(502, message)


def frame_broken_stream_event(message: str) -> bytes:
    """Build the last event of a broken stream as an HTTP chunk."""
    return frame_chunk(build_broken_stream_event(message))


def frame_typed_error_event(message: str) -> bytes:
    """Build the last event of a broken stream of `/v1/responses` or `/v1/messages` as an HTTP chunk.

    The clients of both find the error where they look for it: by the event's name and by its field `error`.
    """
    error = {"type": "api_error", "message": message, "param": None, "code": "upstream_error"}
    data = orjson.dumps({"type": "error", "error": error})
    return frame_chunk(b"event: error\ndata: %b\n\n" % data)
