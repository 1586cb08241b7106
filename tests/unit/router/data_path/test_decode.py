"""The bytes that a decode leg sends to the client, and until when another instance can take over."""

import math

import pytest

from fulcrum_router.data_path.decode import MAX_BUFFERED_CHUNK_BYTES, DecodeLeg
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.engine_events import Usage
from fulcrum_router.http1.framing import frame_chunk
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer
from fulcrum_router.policy.ledger import Ledger
from fulcrum_router.policy.pairs import TransferPairs

STATUS = b"HTTP/1.1 200 OK\r\n"
FULCRUM_HEADERS = b"x-fulcrum-decode: d-0\r\n"
HEADERS = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HEAD_TO_CLIENT = STATUS + FULCRUM_HEADERS + HEADERS
TOKEN = frame_chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
USAGE = frame_chunk(b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n')
DONE = frame_chunk(b"data: [DONE]\n\n")
LARGE = frame_chunk(b"data: " + b"a" * 2 * MAX_BUFFERED_CHUNK_BYTES + b"\n\n")
LARGE_BEGINNING = LARGE[: MAX_BUFFERED_CHUNK_BYTES + 1]


class FakeDownstream:
    """A client's connection that records what is written."""

    def __init__(self) -> None:
        self.paused = False
        self.writes: list[bytes] = []
        self.finished_keep_alive: bool | None = None

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def release_body(self) -> None:
        pass

    def finish_response(self, *, keep_alive: bool) -> None:
        self.finished_keep_alive = keep_alive


def start_leg(
    downstream: FakeDownstream, *, strips_usage: bool = False, headers: bytes = HEADERS
) -> DecodeLeg:
    """Start a leg whose connection has received the head of a stream."""
    prefill, decode = Instance("p-0"), Instance("d-0")
    never_late = math.inf
    transfer = KvTransfer.create(TransferPairs(), prefill, decode, tokens=9, received_after_s=never_late)
    connection = EngineConnection(ConnectionPool("127.0.0.1", 1))
    connection.handler = leg = DecodeLeg(
        connection,
        downstream,
        entry=Ledger().add_decode(tokens=9),
        fulcrum_headers=FULCRUM_HEADERS,
        instance=decode,
        cache_salt=decode.cache_salt,
        on_first_byte=lambda _: None,
        on_late_response=lambda: None,
        on_silence=lambda _, now_s: now_s,
        transfer=transfer,
        strips_usage=strips_usage,
    )
    connection.data_received(STATUS + headers)
    return leg


@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        pytest.param(
            (TOKEN, TOKEN), [HEAD_TO_CLIENT + TOKEN, TOKEN], id="whole chunks are forwarded at once"
        ),
        pytest.param((TOKEN[:9],), [], id="the beginning of a chunk is buffered"),
        pytest.param((TOKEN[:9], TOKEN[9:]), [HEAD_TO_CLIENT + TOKEN], id="a split chunk is forwarded whole"),
        pytest.param(
            (TOKEN + TOKEN[:9],), [HEAD_TO_CLIENT + TOKEN], id="only whole chunks of a read are sent"
        ),
        pytest.param((USAGE,), [], id="nothing is sent before the first token"),
        pytest.param(
            (USAGE + TOKEN[:9], TOKEN[9:]),
            [HEAD_TO_CLIENT + USAGE + TOKEN],
            id="what precedes the first token is sent with it",
        ),
        pytest.param(
            (LARGE_BEGINNING, LARGE[len(LARGE_BEGINNING) :]),
            [HEAD_TO_CLIENT + LARGE_BEGINNING, LARGE[len(LARGE_BEGINNING) :]],
            id="a chunk over the buffer limit is forwarded in pieces, also the first one",
        ),
    ],
)
def test_a_stream_is_forwarded_in_whole_chunks_from_the_first_token_on(
    reads: tuple[bytes, ...], writes: list[bytes]
) -> None:
    downstream = FakeDownstream()
    leg = start_leg(downstream)
    for read in reads:
        leg.connection.data_received(read)
    assert (downstream.writes, leg.retryable) == (writes, not writes)


@pytest.mark.parametrize(
    ("strips_usage", "sent"),
    [
        pytest.param(True, TOKEN + DONE, id="a usage event that the router added is removed"),
        pytest.param(False, TOKEN + USAGE + DONE, id="a usage event that the client requested stays"),
    ],
)
def test_only_a_usage_event_that_the_router_added_is_removed(strips_usage: bool, sent: bytes) -> None:
    downstream = FakeDownstream()
    leg = start_leg(downstream, strips_usage=strips_usage)
    leg.connection.data_received(TOKEN + USAGE + DONE)
    assert downstream.writes == [HEAD_TO_CLIENT + sent]
    assert leg.usage == Usage(9, None, 5), "the router reads the usage in either case"


def test_a_usage_event_that_cannot_be_removed_stays() -> None:
    """In a stream without chunks a read may end inside an event."""
    downstream = FakeDownstream()
    leg = start_leg(downstream, strips_usage=True, headers=b"content-type: text/event-stream\r\n\r\n")
    event = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
    leg.connection.data_received(b'data: {"choices":[{"text":"a"}]}\n\n' + event)
    assert (downstream.writes[0].endswith(event), leg.usage) == (True, Usage(9, None, 5))


@pytest.mark.parametrize(
    ("reads", "has_error_event"),
    [
        pytest.param((TOKEN,), True, id="after a whole chunk"),
        pytest.param((TOKEN, TOKEN[:9]), True, id="while the beginning of a chunk is buffered"),
        pytest.param((LARGE_BEGINNING,), False, id="inside a chunk that is forwarded in pieces"),
    ],
)
def test_an_error_event_is_inserted_between_chunks_only(
    reads: tuple[bytes, ...], has_error_event: bool
) -> None:
    leg = start_leg(FakeDownstream())
    for read in reads:
        leg.connection.data_received(read)
    assert bool(leg.build_stream_error("the engine failed")) is has_error_event
