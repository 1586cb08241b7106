"""The client of a router's state port, over a transport without sockets."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from fulcrum_cluster.router_client import (
    HttpRouterClient,
    RouterUnavailable,
    TokenFileAuth,
    open_http_client,
)
from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import Role
from tests.unit.autoscaler.builders import make_router_state, prefill

Handler = Callable[[httpx.Request], httpx.Response]
FLIP_REQUEST = FlipRequest(seq=7, role=Role.PREFILL, reason="best TTFT 1.2 s")


def client_with(handler: Handler) -> HttpRouterClient:
    transport = httpx.MockTransport(handler)
    return HttpRouterClient(httpx.AsyncClient(transport=transport, base_url="http://router"))


async def test_router_state_is_requested_and_parsed() -> None:
    state = make_router_state(prefill("p-0", 0.5))
    requested: list[httpx.URL] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requested.append(request.url)
        return httpx.Response(200, content=state.model_dump_json())

    assert await client_with(handler).get_state(min_generation=3, timeout_s=0.25) == state
    assert str(requested[0]) == "http://router/state?min_generation=3&timeout_s=0.25"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        pytest.param(
            httpx.Response(200, content=FLIP_REQUEST.model_dump_json()), FLIP_REQUEST, id="flip request"
        ),
        pytest.param(httpx.Response(204), None, id="no flip request in time"),
    ],
)
async def test_flip_request_is_parsed_from_the_response(
    response: httpx.Response, expected: FlipRequest | None
) -> None:
    assert await client_with(lambda _: response).wait_for_flip_request(after=6, timeout_s=10) == expected


def refuse(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def stall(_request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("too slow")


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(refuse, id="connection refused"),
        pytest.param(stall, id="no response in time"),
        pytest.param(lambda _: httpx.Response(401), id="token refused"),
        pytest.param(lambda _: httpx.Response(503), id="router not ready"),
        pytest.param(lambda _: httpx.Response(200, content=b"<html>"), id="not JSON"),
        pytest.param(lambda _: httpx.Response(200, content=b"{}"), id="fields missing"),
        pytest.param(lambda _: httpx.Response(302, headers={"location": "http://x/"}), id="redirect"),
    ],
)
async def test_every_failed_response_raises_router_unavailable(handler: Handler) -> None:
    with pytest.raises(RouterUnavailable):
        await client_with(handler).get_state(min_generation=0, timeout_s=0)
    with pytest.raises(RouterUnavailable):
        await client_with(handler).wait_for_flip_request(after=0, timeout_s=0)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_http_client("http://127.0.0.1:1", token="s3cret") as client:
        yield client


async def test_every_request_carries_the_token(client: httpx.AsyncClient) -> None:
    assert client.headers["authorization"] == "Bearer s3cret"


async def test_the_token_file_is_read_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "token"
    sent_headers: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent_headers.append(request.headers["authorization"])
        return httpx.Response(204)

    transport = httpx.MockTransport(respond)
    async with httpx.AsyncClient(transport=transport, auth=TokenFileAuth(path)) as client:
        router = HttpRouterClient(client, "http://chat.prod.svc:9091/")
        with pytest.raises(RouterUnavailable):
            await router.wait_for_flip_request(after=0, timeout_s=0)
        for text in ("one\n", "two\n"):
            path.write_text(text)
            assert await router.wait_for_flip_request(after=0, timeout_s=0) is None
    assert sent_headers == ["Bearer one", "Bearer two"]


async def test_caller_can_shorten_the_response_timeout() -> None:
    timeouts: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("too slow")

    with pytest.raises(RouterUnavailable):
        await client_with(handler).get_state(timeout_s=0.25, response_margin_s=0.5)
    assert timeouts == [0.75]
