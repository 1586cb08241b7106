"""Large bodies: each step with one takes long, and other clients are served between two steps."""

import pytest

from fulcrum_router.access.callers import Caller
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.data_path.exchange import Exchange
from fulcrum_router.data_path.pass_through import PassThrough
from fulcrum_router.data_path.request import LONG_BODY_BYTES, ClientRequest
from fulcrum_router.router import Router
from tests.integration.router.fake_engines import settings_with_short_timeouts
from tests.waiting import yield_control

NO_JSON = b"{" + b" " * LONG_BODY_BYTES
LONG_PROMPT = b'{"prompt":"%b"}' % (b"a" * LONG_BODY_BYTES)


class RecordingDownstream:
    """A client's connection that records what it is sent."""

    paused = False

    def __init__(self) -> None:
        self.written = b""
        self.finished = False

    def write(self, data: bytes) -> None:
        self.written += data

    def release_body(self) -> None:
        pass

    def finish_response(self, *, keep_alive: bool) -> None:
        del keep_alive
        self.finished = True


Kind = type[Exchange] | type[PassThrough]


def start(
    kind: Kind, router: Router, body: bytes = NO_JSON
) -> tuple[Exchange | PassThrough, RecordingDownstream]:
    settings, downstream = settings_with_short_timeouts(), RecordingDownstream()
    path = b"/v1/completions" if kind is Exchange else b"/v1/embeddings"
    request = ClientRequest(path, body, b"id", Caller(settings.default_tier), b"", keep_alive=True)
    exchange = kind(router, settings, downstream, request)
    exchange.start()
    return exchange, downstream


@pytest.mark.parametrize("kind", [Exchange, PassThrough])
async def test_large_bodies_that_come_at_once_are_parsed_in_a_turn_of_the_event_loop_each(
    kind: Kind,
) -> None:
    router = Router()
    clients = [start(kind, router)[1] for _ in range(3)]
    answered = list[int]()
    for _ in range(8):
        answered.append(sum(client.written.startswith(b"HTTP/1.1 400") for client in clients))
        await yield_control(1)
    assert answered == [0, 0, 0, 0, 1, 2, 3, 3]  # a turn to look at each body, then one to parse it


@pytest.mark.parametrize("kind", [Exchange, PassThrough])
async def test_a_large_body_is_parsed_measured_and_sent_in_a_turn_of_the_event_loop_each(kind: Kind) -> None:
    router = Router()
    clients = [start(kind, router, LONG_PROMPT)[1] for _ in range(2)]
    answered = list[int]()
    for _ in range(11):
        answered.append(sum(client.written.startswith(b"HTTP/1.1 503") for client in clients))
        await yield_control(1)
    assert answered == [0] * 9 + [1, 2]  # five steps each


async def test_a_client_that_leaves_before_its_body_is_parsed_counts_as_cancelled() -> None:
    router = Router()
    exchange, downstream = start(Exchange, router)
    exchange.cancel()
    await yield_control(3)
    assert (downstream.written, downstream.finished) == (b"", True)
    assert router.counters.get_tier("default").requests_by_outcome[RequestOutcome.CANCELLED] == 1
