"""The router's state port as the autoscaler reads it, over a transport without sockets."""

from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from fulcrum_autoscaler.routers import HttpRouter, RouterAway, open_router
from fulcrum_core.state import FlipWanted
from fulcrum_core.values import Role
from tests.unit.autoscaler.builders import prefill, router

Handler = Callable[[httpx.Request], httpx.Response]
WANTED = FlipWanted(seq=7, role=Role.PREFILL, reason="best TTFT 1.2 s")


def speaking(handler: Handler) -> HttpRouter:
    transport = httpx.MockTransport(handler)
    return HttpRouter(httpx.AsyncClient(transport=transport, base_url="http://router"))


async def test_a_state_comes_back_as_it_was_sent() -> None:
    state = router(prefill("p-0", 0.5))
    asked: list[httpx.URL] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        return httpx.Response(200, content=state.model_dump_json())

    assert await speaking(handler).state(min_generation=3, timeout_s=0.25) == state
    assert str(asked[0]) == "http://router/state?min_generation=3&timeout_s=0.25"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(httpx.Response(200, content=WANTED.model_dump_json()), WANTED, id="a flip is wanted"),
        pytest.param(httpx.Response(204), None, id="none within the time"),
    ],
)
async def test_flip_wanted_is(answer: httpx.Response, expected: FlipWanted | None) -> None:
    assert await speaking(lambda _: answer).flip_wanted(after=6, timeout_s=10) == expected


def refuse(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def stall(_request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("too slow")


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(refuse, id="nobody listens"),
        pytest.param(stall, id="it does not answer"),
        pytest.param(lambda _: httpx.Response(401), id="it refuses the token"),
        pytest.param(lambda _: httpx.Response(503), id="it is not ready"),
        pytest.param(lambda _: httpx.Response(200, content=b"<html>"), id="it speaks nonsense"),
        pytest.param(lambda _: httpx.Response(200, content=b"{}"), id="it leaves fields out"),
        pytest.param(
            lambda _: httpx.Response(302, headers={"location": "http://x/"}), id="it sends us elsewhere"
        ),
    ],
)
async def test_a_router_is_away_when(handler: Handler) -> None:
    with pytest.raises(RouterAway):
        await speaking(handler).state(min_generation=0, timeout_s=0)
    with pytest.raises(RouterAway):
        await speaking(handler).flip_wanted(after=0, timeout_s=0)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_router("http://127.0.0.1:1", token="s3cret") as client:
        yield client


async def test_every_request_carries_the_token(client: httpx.AsyncClient) -> None:
    assert client.headers["authorization"] == "Bearer s3cret"
