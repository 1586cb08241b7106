"""Serve an application at the state port or the metrics port, with a limit of open connections.

Each connection takes an open file of the router. Connections above the limit close the oldest ones. So
whoever holds connections open keeps neither the kubelet's liveness check nor a scraper from a port that needs
no token. TLS handshakes are limited as on the clients' port. `server` opens both ports with it; the clients'
port is `data_path.downstream`'s.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from fulcrum_router.http1.tls_handshakes import TlsAcceptor

MAX_CONNECTIONS = 256
"""Open connections of one port."""
MAX_HANDSHAKES = 64
"""TLS handshakes at the same time."""
_BACKLOG = 128


@contextlib.asynccontextmanager
async def serve_at_port(
    app: web.Application,
    bound: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    max_connections: int = MAX_CONNECTIONS,
) -> AsyncIterator[None]:
    """Serve the application at a bound socket until the block ends."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    server = runner.server
    assert server is not None

    def close_oldest() -> None:
        transports = [connection.transport for connection in server.connections]
        # An aborted connection stays in the list until the next turn of the event loop.
        still_open = [each for each in transports if each is not None and not each.is_closing()]
        for transport in still_open[: max(0, len(still_open) - max_connections)]:
            transport.abort()

    def accept() -> asyncio.Protocol:
        loop.call_soon(loop.call_soon, close_oldest)  # by then the server knows the connection
        return server()

    try:
        async with _accept_connections(accept, bound, tls):
            yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _accept_connections(
    accept: Callable[[], asyncio.Protocol], bound: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    if tls is None:
        listener = await asyncio.get_running_loop().create_server(accept, sock=bound, backlog=_BACKLOG)
        try:
            yield
        finally:
            listener.close()
        return
    bound.setblocking(False)
    bound.listen(_BACKLOG)
    accepting = asyncio.create_task(TlsAcceptor(tls, accept, max_handshakes=MAX_HANDSHAKES).run(bound))
    try:
        yield
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        bound.close()
