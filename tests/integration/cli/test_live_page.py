"""The live page's server on loopback: who may call, what a page gets, pages that leave or do not read."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fulcrum_cli.web.access import PAGE_HEADERS
from fulcrum_cli.web.broadcast import PAGES_MAX, Broadcast
from fulcrum_cli.web.feed import Feed
from fulcrum_cli.web.server import UNUSED_CONNECTIONS_MAX, make_app, make_runner, serve_page
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.errors import InvalidInput
from tests.clocks import ManualClock
from tests.live_page import SyntheticService
from tests.waiting import wait_until

START_S = 1_790_000_000.0


class Page:
    """A client of the server at the address that the command prints."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self.url, _, self.token = address.partition("#")

    def get(self, path: str, **headers: str) -> Any:
        return self._session.get(
            self.url + path, headers={"Authorization": f"Bearer {self.token}", **headers}
        )

    def post(self, body: bytes, **headers: str) -> Any:
        return self._session.post(
            self.url + "api/actions", data=body, headers={"Authorization": f"Bearer {self.token}", **headers}
        )


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def read_state(response: aiohttp.ClientResponse) -> dict[str, Any]:
    line = await response.content.readuntil(b"\n\n")
    state: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return state


async def run_action(action: dict[str, Any]) -> str:
    if action.get("instance") == "play-9":
        raise InvalidInput("instance", "play-9", "is unknown")
    return f"did {action['action']}"


async def test_fifty_pages_share_one_poll_and_one_more_is_refused(session: aiohttp.ClientSession) -> None:
    service, store, broadcast = (
        SyntheticService(4, start_s=START_S),
        MemoryStore(ManualClock(START_S)),
        Broadcast(),
    )
    await service.create(store, now_s=START_S)
    polls = 0

    def read_clock() -> float:
        nonlocal polls
        polls += 1
        return START_S + polls

    async with serve_page(broadcast) as address:
        page = Page(session, address)
        feed = asyncio.create_task(Feed(store, service.service, broadcast, service.source(read_clock)).run())
        responses = [await page.get("api/states") for _ in range(PAGES_MAX)]
        async with page.get("api/states") as refused:
            assert (refused.status, await refused.json()) == (
                503, {"error": "50 pages are open already; close one"},
            )  # fmt: skip
        states = await asyncio.gather(*(read_state(response) for response in responses))
        assert {len(state["tiles"]) for state in states} == {4}
        assert polls <= 3
        for response in responses:
            response.close()
        await wait_until(lambda: broadcast.open_pages == 0, "all pages left")
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)


async def test_a_page_of_another_origin_is_refused(session: aiohttp.ClientSession) -> None:
    async with serve_page(Broadcast(), run_action=run_action) as address:
        page = Page(session, address)
        foreign = {"Origin": "http://attacker.example"}
        async with page.get("api/states", **foreign) as refused_states:
            assert refused_states.status == 403
        async with page.post(b'{"action": "kill"}', **foreign) as refused_action:
            assert refused_action.status == 403
            assert "Access-Control-Allow-Origin" not in refused_action.headers
        async with session.options(page.url + "api/actions", headers=foreign) as preflight:
            assert preflight.status == 403
        async with page.get("", Host="rebound.example") as rebound:
            assert rebound.status == 421


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_calls_need_the_token_and_files_do_not(session: aiohttp.ClientSession, token: str) -> None:
    async with serve_page(Broadcast(), run_action=run_action) as address:
        page = Page(session, address)
        page.token = token
        async with page.get("api/states") as states, page.post(b"{}") as action:
            assert (states.status, action.status) == (401, 401)
        for path in ("", "page.js", "page.css", "icon.svg"):
            async with page.get(path) as file:
                assert file.status == 200
                assert {name: file.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS
        async with page.get("../../../etc/passwd") as outside:
            assert outside.status == 404


async def test_an_action_answers_what_happened_or_why_not(session: aiohttp.ClientSession) -> None:
    async with serve_page(Broadcast(), run_action=run_action) as address:
        page = Page(session, address)
        answers = []
        for body in (
            b'{"action": "kill", "instance": "play-1"}', b'{"action": "kill", "instance": "play-9"}',
            b"not JSON", b"[]",
        ):  # fmt: skip
            async with page.post(body) as response:
                answers.append((response.status, *(await response.json()).values()))
        assert answers == [
            (200, "did kill"),
            (409, "instance (play-9) is unknown"),
            (409, "body (8) is not JSON"),
            (409, "body (2) is not a JSON object"),
        ]
        async with page.post(b"x" * 100_000) as too_long:
            assert too_long.status == 413


async def test_without_actions_the_page_only_shows(session: aiohttp.ClientSession) -> None:
    async with serve_page(Broadcast()) as address, Page(session, address).post(b"{}") as response:
        assert response.status == 404


async def test_a_page_that_stops_reading_is_disconnected_and_others_go_on(
    session: aiohttp.ClientSession,
) -> None:
    broadcast = Broadcast()
    runner = make_runner(make_app(broadcast, token="t", write_timeout_s=0.2))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"GET /api/states HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer t\r\n\r\n")
            other = await Page(session, f"http://127.0.0.1:{port}/#t").get("api/states")
            await wait_until(lambda: broadcast.open_pages == 2, "both pages are open")
            state = b'{"padding":"' + b"x" * 400_000 + b'"}'

            async def send_and_read() -> bool:
                broadcast.send(state)
                assert len((await read_state(other))["padding"]) == 400_000
                return broadcast.open_pages == 1

            await wait_until(send_and_read, "the silent page is disconnected")
            other.close()
            await wait_until(lambda: broadcast.open_pages == 0, "the other page left")
    finally:
        await runner.cleanup()


async def test_connections_that_show_nothing_keep_no_page_out(session: aiohttp.ClientSession) -> None:
    broadcast = Broadcast()
    async with serve_page(broadcast) as address:
        page = Page(session, address)
        shown = await page.get("api/states")
        port = int(address.split(":")[2].split("/")[0])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(UNUSED_CONNECTIONS_MAX + 50)]
        await wait_until(lambda: sum(reader.at_eof() for reader, _ in held) >= 50, "the oldest are closed")
        async with page.get("") as file:
            assert file.status == 200
        broadcast.send(b'{"shown": 1}')
        assert await read_state(shown) == {"shown": 1}
        for _, writer in held:
            writer.transport.abort()
        shown.close()


async def test_a_used_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"--port \({port}\) cannot be used"):
            async with serve_page(Broadcast(), port=port):
                pass
