"""Which bytes of a decode leg's response reach the client, and until when the leg is retryable.

`DecodeResponse` is fed with pieces of a response; no socket and no engine.
"""

import math
import time

import pytest

from fulcrum_router.data_path.chunk_buffer import MAX_BUFFERED_CHUNK_BYTES
from fulcrum_router.data_path.decode_response import DecodeResponse, ResponseState
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.engine_events import Usage
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.framing import frame_chunk
from fulcrum_router.http1.upstream import ConnectionPool, EngineConnection
from fulcrum_router.kv_transfer.verification import KvTransfer
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.ledger import Ledger
from tests.unit.router.builders import FakeDownstream, FakeLeg

STATUS = b"HTTP/1.1 200 OK\r\n"
FULCRUM_HEADERS = b"x-fulcrum-decode: d-0\r\n"
HEADERS = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HEAD_TO_CLIENT = STATUS + FULCRUM_HEADERS + HEADERS
TOKEN = frame_chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
USAGE = frame_chunk(b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n')
DONE = frame_chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"
LARGE = frame_chunk(b"data: " + b"a" * 2 * MAX_BUFFERED_CHUNK_BYTES + b"\n\n")
LARGE_BEGINNING = LARGE[: MAX_BUFFERED_CHUNK_BYTES + 1]


def make_error(status: int) -> bytes:
    """Return the event that vLLM sends in a stream when a request fails."""
    return frame_chunk(b'data: {"error": {"message": "m", "code": %d}}\n\n' % status)


def start_response(
    downstream: FakeDownstream,
    *,
    strips_usage: bool = False,
    headers: bytes = HEADERS,
    late: bool = False,
    leg: FakeLeg | None = None,
) -> DecodeResponse:
    """Start a response and receive its head.

    If `late`, its KV may have been fetched after the lease expired.
    """
    prefill, decode = Instance("p-0"), Instance("d-0")
    transfer = KvTransfer(
        TransferPairs(),
        prefill,
        decode,
        tokens=9,
        received_after_s=-math.inf if late else math.inf,
        decode_was_idle=True,
    )
    connection = EngineConnection(ConnectionPool("127.0.0.1", 1))
    connection.handler = response = DecodeResponse(
        connection,
        downstream,
        leg or FakeLeg(),
        entry=Ledger().add_decode(tokens=9),
        fulcrum_headers=FULCRUM_HEADERS,
        instance=decode,
        cache_salt=decode.cache_salt,
        transfer=transfer,
        strips_usage=strips_usage,
    )
    connection.data_received(STATUS + headers)
    return response


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
    response = start_response(downstream)
    for read in reads:
        response.connection.data_received(read)
    assert (downstream.writes, response.retryable) == (writes, not writes)


@pytest.mark.parametrize(
    ("strips_usage", "sent"),
    [
        pytest.param(True, TOKEN + DONE, id="a usage event that the router added is removed"),
        pytest.param(False, TOKEN + USAGE + DONE, id="a usage event that the client requested stays"),
    ],
)
def test_only_a_usage_event_that_the_router_added_is_removed(strips_usage: bool, sent: bytes) -> None:
    downstream = FakeDownstream()
    response = start_response(downstream, strips_usage=strips_usage)
    response.connection.data_received(TOKEN + USAGE + DONE)
    assert downstream.writes == [HEAD_TO_CLIENT + sent]
    assert response.usage == Usage(9, None, 5), "the router reads the usage in either case"


def test_a_usage_event_that_cannot_be_removed_stays() -> None:
    """Without chunked encoding a read may end inside an event, so the router removes nothing."""
    downstream = FakeDownstream()
    response = start_response(
        downstream, strips_usage=True, headers=b"content-type: text/event-stream\r\n\r\n"
    )
    event = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
    response.connection.data_received(b'data: {"choices":[{"text":"a"}]}\n\n' + event)
    assert (downstream.writes[0].endswith(event), response.usage) == (True, Usage(9, None, 5))


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
    response = start_response(FakeDownstream())
    for read in reads:
        response.connection.data_received(read)
    assert bool(response.build_stream_error("the engine failed")) is has_error_event


# --- the states of a response ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_valid", "writes", "state", "failed"),
    [
        pytest.param(True, [HEAD_TO_CLIENT + TOKEN, DONE], ResponseState.SENDING, False, id="KV was valid"),
        pytest.param(False, [], ResponseState.CHECKING, True, id="the lease had expired"),
    ],
)
def test_a_late_response_is_withheld_until_its_lease_check_ends(
    *, kv_valid: bool, writes: list[bytes], state: ResponseState, failed: bool
) -> None:
    downstream, leg = FakeDownstream(), FakeLeg()
    response = start_response(downstream, late=True, leg=leg)
    response.connection.data_received(TOKEN)
    response.connection.data_received(DONE)
    assert (response.state, downstream.writes, leg.lease_checks) == (ResponseState.CHECKING, [], 1)
    response.finish_lease_check(kv_valid=kv_valid)
    assert (downstream.writes, response.state, response.done) == (writes, state, failed)
    assert leg.first_bytes == bool(writes)


def test_a_response_that_ends_during_its_lease_check_is_sent_after_it() -> None:
    downstream, leg = FakeDownstream(), FakeLeg()
    response = start_response(downstream, late=True, leg=leg, headers=b"content-length: 2\r\n\r\n")
    connection = response.connection
    connection.data_received(b"{}")
    assert (response.done, connection.handler, leg.lease_checks) == (False, None, 1)
    response.finish_lease_check(kv_valid=True)
    assert (response.done, downstream.writes[0].endswith(b"{}"), leg.lease_checks) == (True, True, 1)


def test_a_response_pauses_only_the_connection_that_it_still_uses() -> None:
    """When another leg uses the engine connection, the slow client of the first leg must not pause it."""
    downstream = FakeDownstream()
    downstream.paused = True
    response = start_response(downstream, headers=b"content-length: 2\r\n\r\n")
    connection = response.connection
    connection.data_received(b"{}")
    assert response.done
    next_response = start_response(FakeDownstream())
    connection.handler, before_s = next_response, connection.deadline_s
    response.pause()
    connection.resume()
    assert connection.deadline_s == before_s, "the finished response did not pause the connection"


@pytest.mark.parametrize("before", [b"", TOKEN], ids=["first event", "after a token in the same read"])
def test_an_error_event_with_5xx_before_the_first_byte_fails_the_leg(before: bytes) -> None:
    downstream = FakeDownstream()
    response = start_response(downstream)
    response.connection.data_received(before + make_error(500) + DONE)
    assert (find_failure(response), downstream.writes) == ((Failure.STATUS, 500), [])


def test_an_error_event_with_5xx_breaks_the_stream_behind_what_came_before() -> None:
    downstream = FakeDownstream()
    response = start_response(downstream)
    response.connection.data_received(TOKEN)
    response.connection.data_received(TOKEN + make_error(503) + DONE)
    assert (find_failure(response), downstream.writes[1:]) == ((Failure.STATUS, 503), [TOKEN])


def test_an_error_event_with_4xx_is_the_clients_and_sent_to_it() -> None:
    downstream = FakeDownstream()
    response = start_response(downstream)
    response.connection.data_received(make_error(400) + DONE + END)
    assert downstream.writes == [HEAD_TO_CLIENT + make_error(400) + DONE + END]
    assert (response.done, response.error_status) == (True, 400)


@pytest.mark.parametrize("cut", [1, 20, len(LARGE) - len(LARGE_BEGINNING) - 1])
def test_a_usage_behind_the_rest_of_a_large_event_is_read_and_removed(cut: int) -> None:
    downstream = FakeDownstream()
    response = start_response(downstream, strips_usage=True)
    middle = len(LARGE_BEGINNING) + cut
    response.connection.data_received(LARGE_BEGINNING)
    if cut > 1:
        response.connection.data_received(LARGE[len(LARGE_BEGINNING) : middle])
        response.connection.data_received(LARGE[middle:] + USAGE + DONE)
    else:
        response.connection.data_received(LARGE[len(LARGE_BEGINNING) :] + TOKEN + USAGE + DONE)
    response.connection.data_received(END)
    expected = HEAD_TO_CLIENT + LARGE + (TOKEN if cut == 1 else b"") + DONE + END
    assert (b"".join(downstream.writes), response.usage) == (expected, Usage(9, None, 5))


def test_the_usage_of_a_large_whole_response_is_read() -> None:
    content = (
        b'{"choices":[{"text":"'
        + b"a" * 1_100_000
        + b'"}],"usage":{"prompt_tokens":9,"completion_tokens":5}}'
    )
    downstream = FakeDownstream()
    response = start_response(
        downstream, headers=b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    )
    for start in range(0, len(content), 366_683):
        response.connection.data_received(content[start : start + 366_683])
    assert response.usage == Usage(9, None, 5)


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_without_length_that_is_cut_short_has_failed(*, stream: bool) -> None:
    kind = b"text/event-stream" if stream else b"application/json"
    downstream = FakeDownstream()
    response = start_response(downstream, headers=b"content-type: %b\r\n\r\n" % kind)
    response.connection.data_received(
        b'data: {"choices":[{"text":"a"}]}\n\n' if stream else b'{"choices":[{"te'
    )
    response.connection.connection_lost(None)
    assert find_failure(response) == (Failure.CLOSED, 0)


ABORTED = b'{"choices":[{"text":"a","finish_reason":"abort"}]}'
FAILED = b'{"error":{"message":"m","code":500}}'


@pytest.mark.parametrize(
    ("content", "failure"),
    [
        pytest.param(ABORTED, (Failure.ABORTED, 0), id="an aborted request"),
        pytest.param(FAILED, (Failure.STATUS, 500), id="an error with status 200"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in a chunk"])
def test_a_failure_is_found_wherever_the_reads_of_a_whole_response_end(
    content: bytes, failure: tuple[Failure, int], *, chunked: bool
) -> None:
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(content)
    body = frame_chunk(content) + END if chunked else content
    for cut in range(1, len(body)):
        response = start_response(
            FakeDownstream(), headers=b"content-type: application/json\r\n%b\r\n\r\n" % length
        )
        response.connection.data_received(body[:cut])
        response.connection.data_received(body[cut:])
        assert find_failure(response) == failure, cut


def test_a_response_in_many_reads_that_all_may_be_an_abort_is_searched_once() -> None:
    piece, count = b'"abort",' + b" " * 42, 20_000
    response = start_response(
        FakeDownstream(),
        headers=b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (len(piece) * count),
    )
    for _ in range(count - 1):
        response.connection.data_received(piece)
    began_s = time.thread_time()
    response.connection.data_received(piece)
    assert time.thread_time() - began_s < 0.05


def find_failure(response: DecodeResponse) -> tuple[Failure, int]:
    """Return the failure and the status with which the response ended."""
    error = response._error
    assert isinstance(error, LegFailed)
    return error.failure, error.status
