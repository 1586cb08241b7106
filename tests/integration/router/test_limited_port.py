"""Ports without a token: connections that are held open keep nobody else out."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from fulcrum_cluster.process import bind_socket
from fulcrum_router.control.limited_port import MAX_CONNECTIONS, MAX_HANDSHAKES, serve_at_port
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.metrics_port import make_metrics_app
from fulcrum_router.control.requests_page import RequestsPage
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.router import Router
from tests.waiting import wait_until
from tools.kubernetes import pki

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def respond_ok(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


@asynccontextmanager
async def serving(
    *, tls: ssl.SSLContext | None = None, max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[int]:
    """Serve `/health`; yields the port."""
    app = web.Application()
    app.add_routes([web.get("/health", respond_ok)])
    bound = bind_socket("127.0.0.1", 0, option="--metrics-port")
    port: int = bound.getsockname()[1]
    async with serve_at_port(app, bound, tls=tls, max_connections=max_connections):
        yield port


async def hold_open(port: int, count: int) -> list[Connection]:
    """Open connections at once, and send nothing."""
    return await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(count)))


def count_closed(held: list[Connection]) -> int:
    return sum(reader.at_eof() for reader, _ in held)


def abort(held: list[Connection]) -> None:
    for _, writer in held:
        writer.transport.abort()


async def read_health(client: aiohttp.ClientSession, url: str, trust: ssl.SSLContext | None = None) -> int:
    async with client.get(f"{url}/health", ssl=trust or True) as response:
        return response.status


async def test_held_connections_give_way_to_new_ones(client: aiohttp.ClientSession) -> None:
    async with serving(max_connections=4) as port:
        held = [(await hold_open(port, 1))[0] for _ in range(12)]
        await wait_until(lambda: count_closed(held) == 8, "the oldest are closed")
        assert await read_health(client, f"http://127.0.0.1:{port}") == 200
        abort(held)


async def test_a_burst_of_connections_is_cut_down_to_the_limit(client: aiohttp.ClientSession) -> None:
    async with serving(max_connections=4) as port:
        held = [each for _ in range(5) for each in await hold_open(port, 20)]
        await wait_until(lambda: count_closed(held) >= 96, "the oldest are closed")
        assert await read_health(client, f"http://127.0.0.1:{port}") == 200
        abort(held)


async def test_silent_tls_handshakes_give_way_to_new_ones(
    client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    authority = pki.create_authority("test")
    pki.issue_certificate(authority, "router", hosts=("127.0.0.1",)).write(tmp_path, "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    trust = ssl.create_default_context(cadata=authority.certificate_pem().decode())
    async with serving(tls=context) as port:
        silent = await hold_open(port, MAX_HANDSHAKES + 40)
        await wait_until(lambda: count_closed(silent) >= 40, "the oldest are closed")
        assert await read_health(client, f"https://127.0.0.1:{port}", trust) == 200
        abort(silent)


async def test_who_does_not_read_the_metrics_keeps_no_page_in_memory() -> None:
    router = Router()
    for number in range(300):
        router.fleet.add(Instance(f"{'x' * 2_000}{number}"))  # 8 MB: more than the sockets' buffers hold
    app = make_metrics_app(build_registry(router), RequestsPage(router), read_timeout_s=0.2)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    server = runner.server
    assert server is not None
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with socket.create_connection(runner.addresses[0]) as silent:
            silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: router\r\n\r\n")
            await wait_until(lambda: server.connections, "the connection is open")
            await wait_until(lambda: not server.connections, "the connection is closed")
    finally:
        await runner.cleanup()
