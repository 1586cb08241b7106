"""The live page's server on loopback: the page, its stream of states, and the actions of its buttons.

GET  /             the page and its script, style and icon; none holds a secret
GET  /api/states   server-sent events, one state each; needs the token
POST /api/actions  {"action": …}; needs the token, and exists only with `play --web` and `web --replay`

`fulcrum web` and `play` start it. What a page shows comes from `broadcast`, what a button does from
`run_action`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
PAGE_FOLDER = Path(__file__).parent / "page"
_FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css", "/icon.svg": "icon.svg"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

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
            with broadcast.open_page() as queue:
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
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidInput("--port", port, f"cannot be used: {error.strerror or error}") from error
        yield f"http://{HOST}:{runner.addresses[0][1]}/#{token}"
    finally:
        await runner.cleanup()


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
