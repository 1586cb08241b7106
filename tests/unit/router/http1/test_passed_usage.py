"""The token counts of responses that are forwarded as they come: whole, streamed, large, or misleading."""

import json
from typing import Any

import pytest

from fulcrum_router.http1.engine_events import Usage
from fulcrum_router.http1.passed_usage import MAX_PARSED_BYTES, PassedUsage

USAGE = {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 800}
FREE = {"input_tokens": 1, "output_tokens": 1}
READ = Usage(20, None, 800)


def read(content: bytes, *, streaming: bool = False, piece_bytes: int = 1_000) -> tuple[Usage | None, bool]:
    usage = PassedUsage(streaming=streaming)
    for start in range(0, len(content), piece_bytes):
        usage.add(content[start : start + piece_bytes])
    return usage.read()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param({"usage": USAGE}, READ, id="at the top"),
        pytest.param({"usage": USAGE, "tools": [{"usage": FREE}]}, READ, id="no object of the client"),
        pytest.param({"text": json.dumps({"usage": FREE}), "usage": USAGE}, READ, id="no generated text"),
        pytest.param({"text": "x" * 10_000, "usage": USAGE}, READ, id="of a long response"),
        pytest.param(
            {"usage": {"input_tokens": 4, "cache_read_input_tokens": 16, "output_tokens": 800}},
            READ,
            id="with cached tokens apart",
        ),
        pytest.param({"usage": None}, None, id="none yet"),
        pytest.param({"usage": {"output_tokens": 3}}, Usage(0, None, 3), id="without a prompt"),
        pytest.param({"usage": {"output_tokens": -3}}, Usage(0, None, 0), id="a number that is no count"),
        pytest.param({"usage": {"output_tokens": 1e300}}, Usage(0, None, 0), id="no whole number"),
        pytest.param([], None, id="no object"),
    ],
)
def test_the_usage_of_a_whole_response_is_its_own(body: Any, found: Usage | None) -> None:
    assert read(json.dumps(body).encode()) == (found, True)


def test_the_usage_of_a_response_that_is_too_large_is_searched_for_at_its_end() -> None:
    body = json.dumps({"text": "x" * 3 * MAX_PARSED_BYTES, "usage": USAGE}).encode()
    assert read(body, piece_bytes=65_536) == (READ, False)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.completed", "response": {"tools": [{"usage": FREE}], "usage": USAGE}},
        {"type": "message_delta", "usage": USAGE},
    ],
    ids=["response", "message"],
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 100_000])
def test_the_usage_of_a_stream_is_in_its_last_event(event: dict[str, Any], piece_bytes: int) -> None:
    first = {"type": "response.created", "response": {"usage": FREE, "text": "x" * 20_000}}
    content = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in (first, event))
    assert read(content + b"0\r\n\r\n", streaming=True, piece_bytes=piece_bytes) == (READ, False)


def test_text_that_looks_like_a_usage_is_none() -> None:
    content = b"data: " + json.dumps({"delta": json.dumps({"usage": FREE})}).encode() + b"\n\n"
    assert read(content, streaming=True) == (None, False)


def test_no_more_of_a_stream_is_kept_than_its_end() -> None:
    usage = PassedUsage(streaming=True)
    for _ in range(1_000):
        usage.add(b"x" * 1_000)
    assert sum(map(len, usage._parts)) <= 8_192
