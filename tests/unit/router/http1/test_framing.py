"""Framing of engine responses that are read in arbitrary pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_router.http1.framing import (
    CHUNKED,
    MAX_CHUNKS,
    UNTIL_CLOSE,
    ChunkDecoder,
    ChunkScanner,
    FramingError,
    dechunk,
    frame_chunk,
    parse_head,
)


def head(*lines: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join((status, *lines, "", "")).encode()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(head("Content-Length: 12"), (200, 12, True, False), id="content-length"),
        pytest.param(head("transfer-encoding: chunked"), (200, CHUNKED, True, False), id="chunked"),
        pytest.param(
            head(), (200, UNTIL_CLOSE, False, False), id="without either the body ends when the engine closes"
        ),
        pytest.param(
            head("content-length: 1", "Connection: Close"), (200, 1, False, False), id="connection: close"
        ),
        pytest.param(
            head("content-length: 1", status="HTTP/1.0 200 OK"),
            (200, 1, False, False),
            id="HTTP/1.0 closes by default",
        ),
        pytest.param(
            head("content-length: 1", "connection: keep-alive", status="HTTP/1.0 200 OK"),
            (200, 1, True, False),
            id="HTTP/1.0 with keep-alive",
        ),
        pytest.param(
            head("Transfer-Encoding: chunked", "Content-Type: text/event-stream; charset=utf-8"),
            (200, CHUNKED, True, True),
            id="an event stream",
        ),
        pytest.param(
            head("content-length: 1", "x-note: text/event-stream"),
            (200, 1, True, False),
            id="only content-type makes an event stream",
        ),
        pytest.param(head(status="HTTP/1.1 204 No Content"), (204, 0, True, False), id="204 has no body"),
        pytest.param(
            head("content-length: 5", status="HTTP/1.1 304 Same"), (304, 0, True, False), id="304 has no body"
        ),
        pytest.param(
            head("x-content-length: 5", "content-length: 7"),
            (200, 7, True, False),
            id="header names are matched whole",
        ),
    ],
)
def test_a_response_head_gives_status_length_keep_alive_and_stream(
    raw: bytes, expected: tuple[int, int, bool, bool]
) -> None:
    read = parse_head(raw)
    assert (read.status, read.length, read.keep_alive, read.is_event_stream) == expected


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"220 mail ready\r\n\r\n", id="not HTTP"),
        pytest.param(head(status="HTTP/1.1 abc OK"), id="status is not a number"),
        pytest.param(head("content-length: -1"), id="a negative length"),
        pytest.param(head("content-length: 1", "transfer-encoding: chunked"), id="both a length and chunks"),
        pytest.param(head("transfer-encoding: gzip, chunked"), id="transfer-encoding other than chunked"),
        pytest.param(head("content-length: 1", "Content-Length: 1"), id="a repeated length"),
        pytest.param(head("transfer-encoding: chunked", "transfer-encoding: chunked"), id="repeated chunks"),
        pytest.param(head("content-length: " + "1" * 19), id="a length of 19 digits"),
        pytest.param(head("content-length: 1 2"), id="two numbers"),
        pytest.param(head("content-length : 1"), id="a space before the colon"),
        pytest.param(head("x: a", " content-length: 1"), id="a folded line"),
        pytest.param(head("x: a\ncontent-length: 1"), id="a line feed alone"),
        pytest.param(head("x: a\rcontent-length: 1"), id="a carriage return alone"),
        pytest.param(head("x: a\0b"), id="a null byte"),
        pytest.param(head("no colon"), id="a line without a colon"),
        pytest.param(head(status="HTTP/2.0 200 OK"), id="another version"),
        pytest.param(head(status="HTTP/1.1 999 No"), id="no such status"),
        pytest.param(head("transfer-encoding: chunked", status="HTTP/1.1 204 None"), id="chunks in a 204"),
    ],
)
def test_a_malformed_response_head_raises_framing_error(raw: bytes) -> None:
    with pytest.raises(FramingError):
        parse_head(raw)


def test_router_headers_come_first_and_hop_by_hop_headers_are_dropped() -> None:
    raw = head("Connection: keep-alive", "a: 1", "Keep-Alive: timeout=5", "b: 2")
    assert parse_head(raw).prepend_headers(b"x-ours: 1\r\n") == head("x-ours: 1", "a: 1", "b: 2")
    assert parse_head(head("a: 1")).prepend_headers(b"") == head("a: 1")
    assert parse_head(head()).prepend_headers(b"") == head()


EVENTS = [b"data: one\n\n", b"data: two and more\n\n", b"data: [DONE]\n\n"]
ENDS = [b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\nother: 2\r\n\r\n", b"00;ext=1\r\n\r\n"]
BODIES = [b"".join(map(frame_chunk, EVENTS)) + end for end in ENDS]


@pytest.mark.parametrize("body", BODIES, ids=["plain", "with trailers", "with an extension"])
def test_the_end_of_a_chunked_body_is_found_at_every_split(body: bytes) -> None:
    for first in range(len(body) + 1):
        for second in range(first, len(body) + 1):
            scanner = ChunkScanner()
            pieces = [piece for piece in (body[:first], body[first:second], body[second:]) if piece]
            ends = [(scanner.feed(piece), scanner.done) for piece in pieces]
            assert ends[-1] == (len(pieces[-1]), True)
            assert not any(done for _, done in ends[:-1])


def test_the_boundary_is_always_the_end_of_a_whole_chunk() -> None:
    body = BODIES[0]
    boundaries = {0, len(body)}
    for count in range(1, len(EVENTS) + 1):
        boundaries.add(len(b"".join(map(frame_chunk, EVENTS[:count]))))
    for split in range(1, len(body)):
        scanner = ChunkScanner()
        assert scanner.feed(body[:split]) in boundaries


def test_a_body_fed_byte_by_byte_reports_each_whole_chunk() -> None:
    scanner = ChunkScanner()
    whole = [scanner.feed(BODIES[1][i : i + 1]) for i in range(len(BODIES[1]))]
    assert (sum(whole), scanner.done) == (len(EVENTS) + 1, True), "one boundary per chunk, and the end"


def test_bytes_after_the_last_chunk_are_not_counted() -> None:
    scanner = ChunkScanner()
    assert (scanner.feed(BODIES[0] + b"HTTP/1.1 200"), scanner.done) == (len(BODIES[0]), True)


def feed_all(*pieces: bytes) -> None:
    scanner = ChunkScanner()
    for piece in pieces:
        scanner.feed(piece)


NOT_SIZES = [
    b"zz",
    b"-5",
    b"",
    b";x",
    b"+5",
    b"0x5",
    b"1_0",
    b" 5",
    b"5 ",
    b"5 ;x",
    b"5\n",
    b"1" * 9,
    b"5;\0",
    "٣".encode(),
]


@pytest.mark.parametrize("line", [*(size + b"\r\n" for size in NOT_SIZES), b"5\n"], ids=repr)
def test_a_malformed_chunk_size_raises_framing_error(line: bytes) -> None:
    with pytest.raises(FramingError):
        ChunkScanner().feed(line)


@pytest.mark.parametrize("body", [b"3\r\nabcd\r\n", b"3\r\nabc\n\r\n", b"3\r\nab\r\n0\r\n\r\n"], ids=repr)
def test_a_chunk_that_does_not_end_after_its_size_raises_framing_error_at_every_split(body: bytes) -> None:
    for split in range(len(body)):
        with pytest.raises(FramingError):
            feed_all(body[:split], body[split:], b"0\r\n\r\n")


@pytest.mark.parametrize(
    "trailer", [b"Content-Length: 5", b"transfer-encoding: chunked", b"no colon"], ids=repr
)
def test_a_trailer_that_names_a_length_raises_framing_error(trailer: bytes) -> None:
    with pytest.raises(FramingError):
        feed_all(b"0\r\n" + trailer + b"\r\n\r\n")


def test_endless_trailers_raise_framing_error() -> None:
    with pytest.raises(FramingError):
        feed_all(b"0\r\n", *[b"x: yyyyyyyyyyyyy\r\n"] * 1_000)


def test_an_endless_chunk_size_line_raises_framing_error() -> None:
    scanner = ChunkScanner()
    for _ in range(40):
        scanner.feed(b"0" * 100)
    with pytest.raises(FramingError):
        scanner.feed(b"0" * 100)


@pytest.mark.parametrize("body", BODIES, ids=["plain", "with trailers", "with an extension"])
def test_dechunk_returns_the_content(body: bytes) -> None:
    assert dechunk(body) == b"".join(EVENTS)


def test_more_chunks_in_one_read_than_may_be_searched_are_refused() -> None:
    tiny = b"1\r\na\r\n" * MAX_CHUNKS
    with pytest.raises(FramingError, match="chunks at once"):
        ChunkScanner().feed(tiny + b"1\r\na\r\n")
    with pytest.raises(FramingError, match="buffered whole"):
        dechunk(tiny + b"0\r\n\r\n")


def test_an_event_stream_that_fills_a_read_is_not_refused() -> None:
    event = frame_chunk(b'data: {"a":1}\n\n')
    events = event * (262_144 // len(event))
    assert ChunkScanner().feed(events) == len(events)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.lists(st.integers(0, 250), max_size=6))
def test_the_content_of_chunks_is_found_however_they_are_split(
    contents: list[bytes], cuts: list[int]
) -> None:
    framed = b"".join(frame_chunk(content) for content in contents) + b"0\r\nx: y\r\n\r\n"
    places = sorted({0, len(framed), *(cut for cut in cuts if cut < len(framed))})
    decoder = ChunkDecoder()
    got = b"".join(decoder.feed(framed[a:b]) for a, b in pairwise(places))
    assert (got, decoder.done) == (b"".join(contents), True)
