"""What the router reads from a client, h11 reads the same way: uvicorn, which serves vLLM, parses with it."""

import random
import re
from typing import NamedTuple

import h11
import pytest

from fulcrum_router.http1.limits import RequestMemory
from fulcrum_router.http1.requests import MAX_HEAD_BYTES, PIECE_BYTES, RequestReader
from tests.integration.fuzz.conftest import RunFuzzer
from tests.integration.fuzz.fuzzing import limit_turn, split_randomly
from tests.integration.fuzz.smuggling import CASES

_SPACES = re.compile(rb" {2,}")


class Read(NamedTuple):
    """One request as a server reads it."""

    method: bytes
    path: bytes
    body: bytes


class Reading(NamedTuple):
    """All requests of one connection, and the status of the rejection after them."""

    requests: list[Read]
    closes: list[bool]
    rejection: int | None


def read_with_router(pieces: list[bytes]) -> Reading:
    """Read a connection as `ClientConnection` does: on to the next request once one is served."""
    memory = RequestMemory()
    reader = RequestReader(memory)
    requests, closes = [], []
    for piece in pieces:
        rest = piece
        while rest and not reader.ended:
            rest = reader.feed(rest)
            while reader.requests:
                request = reader.requests.popleft()
                requests.append(Read(request.method, request.path, request.body))
                closes.append(not request.keep_alive)
                memory.release(len(request.body))
                reader.held_bytes -= len(request.body)
    assert memory.held_bytes == reader.held_bytes <= sum(map(len, pieces))
    return Reading(requests, closes, reader.rejection.status if reader.rejection else None)


def read_with_h11(data: bytes, count: int) -> list[Read]:
    """Up to `count` requests as h11 reads them, each on a connection of its own.

    The router accepts two things that h11 does not: empty lines before a request, and more than one space
    in its first line. Both are removed; neither moves the end of a request.
    """
    found: list[Read] = []
    while len(found) < count:
        line, end, rest = data.lstrip(b"\r\n").partition(b"\r\n")
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES + 2 * PIECE_BYTES)
        connection.receive_data(_SPACES.sub(b" ", line) + end + rest)
        try:
            read = _read_request(connection)
        except h11.ProtocolError:
            return found
        if read is None:
            return found
        found.append(read)
        data = connection.trailing_data[0]
    return found


def _read_request(connection: h11.Connection) -> Read | None:
    head, body = None, b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return Read(head.method, head.target.partition(b"?")[0], body)
        else:
            return None


@pytest.mark.parametrize("name", CASES)
def test_the_router_serves_or_rejects(name: str) -> None:
    case = CASES[name]
    reading = read_with_router([case.data])
    assert ([request.body for request in reading.requests], reading.rejection) == (
        case.bodies,
        case.rejection,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_router_reads_the_same_at_every_split(name: str) -> None:
    data = CASES[name].data
    whole = read_with_router([data])
    for split in range(1, len(data), max(1, len(data) // 500)):
        assert read_with_router([data[:split], data[split:]]) == whole
    assert read_with_router([data[i : i + 1] for i in range(len(data))]) == whole


def test_h11_reads_what_the_router_reads(run_fuzzer: RunFuzzer, seed: int) -> None:
    rng = random.Random(seed)

    def compare(data: bytes) -> tuple[object, ...]:
        with limit_turn():
            reading = read_with_router([data])
        split = read_with_router(split_randomly(data, rng))
        if 431 in (reading.rejection, split.rejection):  # how exact this limit is depends on the reads
            count = min(len(reading.requests), len(split.requests))
            assert split.requests[:count] == reading.requests[:count]
        else:
            assert split == reading
        assert read_with_h11(data, len(reading.requests)) == reading.requests
        return len(reading.requests), reading.rejection, tuple(reading.closes)[:3]

    tokens = [
        b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b";", b",", b"\0", b"\x0b", b"\xff", b"?q", b"#f",
        b"content-length: 2\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n", b"host: x\r\n",
        b"connection: upgrade\r\nupgrade: x\r\n", b"expect: 100-continue\r\n", b"GET ", b"POST ", b"HEAD ",
        b"0\r\n\r\n", b"HTTP/1.0", b"chunked", b"identity", b"ffffffffffffffff\r\n", b"y" * 9_000,
        b"x: " + b"z" * 20_000, b"2001\r\n" + b"x" * 8_193 + b"\r\n",
    ]  # fmt: skip
    run_fuzzer(compare, [case.data for case in CASES.values()], tokens)
