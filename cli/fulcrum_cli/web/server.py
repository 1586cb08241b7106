"""The live page's server on loopback: the page, its stream of states, and the actions of its buttons.

GET  /             the page and its script, style and icon; none holds a secret
GET  /api/states   server-sent events, one state each; needs the token
POST /api/actions  {"action": …}; needs the token, and exists only with `play --web` and `web --replay`

`fulcrum web` and `play` start it. What a page shows comes from `broadcast`, what a button does from
`run_action`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from fulcrum_cli.web.access import PAGE_HEADERS, Refused, check_call, check_host
from fulcrum_cli.web.broadcast import Broadcast, TooManyPages
from fulcrum_core.errors import FulcrumError, InvalidInput

HOST = "127.0.0.1"
ACTION_BYTES_MAX = 4096
WRITE_TIMEOUT_S = 30.0
"""A page that reads nothing for this long is disconnected; it reconnects by itself."""
SHUTDOWN_TIMEOUT_S = 1.0
UNUSED_CONNECTIONS_MAX = 128
"""Open connections that show no states. Each takes an open file of `play`, and needs no token."""
PAGE_FOLDER = Path(__file__).parent / "page"
_FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css", "/icon.svg": "icon.svg"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

_SHOWING: web.AppKey[set[asyncio.BaseTransport]] = web.AppKey("showing")
"""Connections whose page gets states."""

RunAction = Callable[[dict[str, Any]], Awaitable[str]]
"""Carries out an action of the page; returns what happened, for people. Raises `FulcrumError` if refused."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    broadcast: Broadcast,
    *,
    token: str,
    run_action: RunAction | None = None,
    write_timeout_s: float = WRITE_TIMEOUT_S,
) -> web.Application:
    """Make the application. Without `run_action` the page only shows the state."""

    @web.middleware
    async def check_access(request: web.Request, handler: _Handler) -> web.StreamResponse:
        is_call = request.path.startswith("/api/")
        refused = check_call(request.headers, token=token) if is_call else check_host(request.headers)
        return _respond_refused(refused) if refused else await handler(request)

    async def get_states(request: web.Request) -> web.StreamResponse:
        try:
            with broadcast.open_page() as queue, _mark_showing(request):
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                while True:
                    event = b"data: " + await queue.get() + b"\n\n"
                    async with asyncio.timeout(write_timeout_s):
                        await response.write(event)
        except TooManyPages as error:
            return _respond_refused(Refused(503, str(error)))
        except (ConnectionError, TimeoutError):  # the page was closed, or reads nothing
            if request.transport is not None:
                request.transport.abort()
            return response

    async def post_action(request: web.Request) -> web.Response:
        assert run_action is not None
        try:
            message = await run_action(_parse_action(await request.read()))
        except FulcrumError as error:
            return _respond_refused(Refused(409, str(error)))
        return web.json_response({"message": message})

    app = web.Application(middlewares=[check_access], client_max_size=ACTION_BYTES_MAX)
    app[_SHOWING] = set()
    app.on_response_prepare.append(_add_page_headers)
    app.add_routes([web.get(path, _serve_file(PAGE_FOLDER / name)) for path, name in _FILES.items()])
    app.add_routes([web.get("/api/states", get_states)])
    if run_action is not None:
        app.add_routes([web.post("/api/actions", post_action)])
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """Make the application's runner. The handler of a page that leaves is cancelled at once."""
    return web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)


@asynccontextmanager
async def serve_page(
    broadcast: Broadcast, *, port: int = 0, run_action: RunAction | None = None
) -> AsyncIterator[str]:
    """Serve the page inside the context; yields its address, which contains the token."""
    token = secrets.token_urlsafe(24)
    runner = make_runner(make_app(broadcast, token=token, run_action=run_action))
    await runner.setup()
    try:
        try:
            listener = await _listen(runner, port)
        except OSError as error:
            raise InvalidInput("--port", port, f"cannot be used: {error.strerror or error}") from error
        try:
            yield f"http://{HOST}:{listener.sockets[0].getsockname()[1]}/#{token}"
        finally:
            listener.close()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> asyncio.Server:
    """Accept connections. Of too many that show no states the oldest are closed."""
    loop, server, showing = asyncio.get_running_loop(), runner.server, runner.app[_SHOWING]
    assert server is not None

    def close_unused() -> None:
        transports = [connection.transport for connection in server.connections]
        unused = [each for each in transports if each and not each.is_closing() and each not in showing]
        for transport in unused[: max(0, len(unused) - UNUSED_CONNECTIONS_MAX)]:
            transport.abort()

    def accept() -> asyncio.Protocol:
        loop.call_soon(loop.call_soon, close_unused)  # by then the server knows the connection
        return server()

    return await loop.create_server(accept, HOST, port)


@contextmanager
def _mark_showing(request: web.Request) -> Iterator[None]:
    """Keep the connection of a page that gets states, while it does."""
    showing, transport = request.app[_SHOWING], request.transport
    if transport is not None:  # None: the page has left
        showing.add(transport)
    try:
        yield
    finally:
        if transport is not None:
            showing.discard(transport)


def _parse_action(body: bytes) -> dict[str, Any]:
    try:
        action = orjson.loads(body)
    except ValueError as error:
        raise InvalidInput("body", len(body), "is not JSON") from error
    if not isinstance(action, dict):
        raise InvalidInput("body", len(body), "is not a JSON object")
    return action


def _serve_file(path: Path) -> _Handler:
    body, content_type = path.read_bytes(), _TYPES[path.suffix]

    async def get_file(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return get_file


async def _add_page_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(PAGE_HEADERS)


def _respond_refused(refused: Refused) -> web.Response:
    return web.json_response({"error": refused.reason}, status=refused.status)
