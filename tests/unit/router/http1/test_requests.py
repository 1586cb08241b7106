"""The request reader's memory; what it accepts and rejects is tested with its fuzz target."""

import tracemalloc

from fulcrum_router.http1.limits import RequestMemory
from fulcrum_router.http1.requests import MAX_PIECES, PIECE_BYTES, RequestReader

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_body_in_tiny_chunks_takes_hardly_more_memory_than_its_bytes() -> None:
    size, memory = 200_000, RequestMemory()
    reader = RequestReader(memory)
    reader.feed(HEAD)
    pieces = b"2\r\nab\r\n" * 1_000
    tracemalloc.start()
    try:
        for _ in range(size // 2_000):
            reader.feed(pieces)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory.held_bytes == size
    assert held_bytes < 2 * size
    reader.feed(b"0\r\n\r\n")
    assert reader.requests.popleft().body == b"ab" * (size // 2)


def test_tiny_chunks_are_read_in_several_turns() -> None:
    reader = RequestReader(RequestMemory())
    reader.feed(HEAD)
    chunks = b"1\r\na\r\n" * 40_000
    rest = reader.feed(chunks)
    assert len(chunks) - len(rest) == MAX_PIECES * PIECE_BYTES
    while rest:
        rest = reader.feed(rest)
    reader.feed(b"0\r\n\r\n")
    assert reader.requests.popleft().body == b"a" * 40_000
