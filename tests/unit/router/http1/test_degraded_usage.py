"""The usage of an answer says what admission limited its output to; all other bytes stay."""

import pytest

from fulcrum_router.http1.degraded_usage import add_limit_to_stream, add_output_limit, set_length
from fulcrum_router.http1.framing import frame_chunk, parse_head


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"usage":{"a":1}}', b'{"usage":{"degraded_max_tokens":7,"a":1}}'),
        (b'{"usage": {"a":1}}', b'{"usage": {"degraded_max_tokens":7,"a":1}}'),
        (b'{"usage":{},"text":"\\"usage\\":{"}', b'{"usage":{},"text":"\\"usage\\":{"}'),
        (b'{"usage":null}', b'{"usage":null}'),
        (b'{"usage":{"a":1},"usage":{"b":2}}', b'{"usage":{"a":1},"usage":{"degraded_max_tokens":7,"b":2}}'),
        (b"", b""),
    ],
)
def test_the_limit_is_added_to_the_last_usage(content: bytes, expected: bytes) -> None:
    assert add_output_limit(content, 7) == expected


def test_only_the_usage_event_of_a_stream_changes() -> None:
    token, done = frame_chunk(b'data: {"choices":[{"text":"a"}],"usage":{"a":1}}\n\n'), b"0\r\n\r\n"
    usage = b'data: {"choices":[],"usage":{"a":1}}\n\n'
    limited = b'data: {"choices":[],"usage":{"degraded_max_tokens":7,"a":1}}\n\n'
    assert add_limit_to_stream(token + frame_chunk(usage) + done, 7) == token + frame_chunk(limited) + done


def test_the_head_gets_the_length_of_the_changed_body() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-length: content-length: 5\r\n\r\n")
    changed = set_length(head, 31)
    assert (changed.length, changed.header_lines) == (
        31,
        b"content-length: 31\r\nx-length: content-length: 5\r\n\r\n",
    )
