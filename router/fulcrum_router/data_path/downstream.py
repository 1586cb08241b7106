"""Client connections: serve their requests in order, enforce limits and time-outs, detect disconnects.

Requests of one connection are served one at a time. The caller is identified first. A completion starts an
`Exchange`, a path that one engine answers alone a `PassThrough`; the router itself answers all others and
every error before that.

Bytes that arrive meanwhile are kept unread, up to a limit: reading from the socket has to go on for a
disconnect to be noticed.

`server` opens the clients' port with `ClientServer`. Bytes are parsed in `http1.requests`, callers are
identified in `access`.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import cast

from fulcrum_router.access.callers import Caller, CallerRefused
from fulcrum_router.control import router_paths
from fulcrum_router.data_path.exchange import Exchange
from fulcrum_router.data_path.http10 import UnchunkedDownstream
from fulcrum_router.data_path.pass_through import PassThrough
from fulcrum_router.data_path.passed_paths import PASS_THROUGH_PATHS
from fulcrum_router.data_path.request import ClientRequest, Downstream
from fulcrum_router.http1 import responses
from fulcrum_router.http1.limits import estimate_parsed_bytes, find_max_connections
from fulcrum_router.http1.portions import Portions
from fulcrum_router.http1.requests import FULL, Rejection, Request, RequestReader
from fulcrum_router.router import Router

MAX_UNREAD_BYTES = 65_536
"""Bytes kept during an exchange before reading is paused."""
MAX_SERVED_AT_ONCE = 64
"""Requests of one connection that are served before other connections have their turn."""
MAX_REFUSED_CONNECTIONS = 64
"""Connections over the limit that are kept open to be answered with 503; further ones are closed at once."""
CROWDED_SHARE = 0.75
"""Share of the greatest number of connections above which `CROWDED_TIMEOUT_S` applies."""
CROWDED_TIMEOUT_S = 5.0
"""Upper limit of `REQUEST_TIMEOUT_S` and `IDLE_TIMEOUT_S` while very many connections are open."""
REQUEST_TIMEOUT_S = 60.0
"""Longest time from the first to the last byte of a request."""
IDLE_TIMEOUT_S = 75.0
"""Longest time between two requests of a connection."""
LINGER_S = 1.0
"""How long a rejected client has to close, and one over the connection limit to send its first byte."""
STALLED_CLIENT_TIMEOUT_S = 30.0
"""Longest time in which the client does not read its response. Shorter than the default `idle` time-out of an
engine, so that a stalled client is never taken for a silent engine."""

_COMPLETION_PATHS = frozenset({b"/v1/completions", b"/v1/chat/completions"})
_MAX_REQUEST_ID_BYTES = 200
_CHALLENGES = {400: b"", 401: b"www-authenticate: Bearer\r\n"}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientServer:
    """All client connections of one router; as a protocol factory it creates them."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.connections: set[ClientConnection] = set()
        self.memory = router.request_memory
        self.max_connections = find_max_connections()
        self._portions: Portions[ClientConnection] = Portions()

    def __call__(self) -> asyncio.Protocol:
        return cast(asyncio.Protocol, ClientConnection(self))

    @property
    def is_crowded(self) -> bool:
        """Whether so many connections are open that none may be kept for long without a request."""
        return len(self.connections) > CROWDED_SHARE * self.max_connections

    def enforce_timeouts(self, now_s: float) -> None:
        """Close connections that have exceeded a time-out; of many, each call checks a portion."""
        for connection in self._portions.take(self.connections):
            connection.enforce_timeouts(now_s)

    def close(self) -> None:
        """Close idle connections; busy ones close after their response, since the router is stopping."""
        for connection in list(self.connections):
            connection.close_when_idle()


class ClientConnection:
    """One client connection: an `asyncio.Protocol` by its methods, since a base would slow it down."""

    __slots__ = (
        "_closing",
        "_exchange",
        "_id_line",
        "_parsed_bytes",
        "_peer",
        "_reader",
        "_reading_paused",
        "_request",
        "_scheduled",
        "_server",
        "_serving",
        "_transport",
        "_unread",
        "_unread_bytes",
        "_unsent_bytes",
        "_waiting_since_s",
        "paused",
    )

    def __init__(self, server: ClientServer) -> None:
        self._server = server
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set by connection_made
        self._reader = RequestReader(server.memory)
        self._exchange: Exchange | PassThrough | None = None
        self._request: ClientRequest | None = None
        """The request of the exchange."""
        self._id_line = b""
        """End of the status line, and header lines about the id of the request and its tier, until sent."""
        self._peer = ""
        """IP address of the client, or of the proxy in front of it."""
        self._parsed_bytes = 0
        """Estimated memory of that request besides its body."""
        self._unread: list[bytes] = []
        """Received bytes that the reader has not read."""
        self._unread_bytes = 0
        self._unsent_bytes = 0
        """Bytes for a client that reads too slowly, as they are counted by the memory."""
        self._reading_paused = False
        self._closing = False
        self._serving = False
        """Whether `_serve` runs: an exchange may finish before it returns to it."""
        self._scheduled = False
        """Whether `_serve` will run in a later turn of the event loop."""
        self._waiting_since_s = time.monotonic()
        self.paused = False

    # --- asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        self._peer = address[0] if address else ""
        server = self._server
        server.connections.add(self)
        if len(server.connections) > server.max_connections:
            self._refuse()

    def _refuse(self) -> None:
        """Answer the first request with a 503, or close at once if very many connections wait for that."""
        server = self._server
        server.router.counters.refused_connections += 1
        message = f"the router has {server.max_connections} connections open, which is its limit"
        self._reader.rejection = Rejection(503, message)
        if len(server.connections) > server.max_connections + MAX_REFUSED_CONNECTIONS:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        self._server.connections.discard(self)
        self._closing = True
        if self._exchange is not None:
            self._exchange.cancel()
        memory, reader = self._server.memory, self._reader
        memory.release(reader.held_bytes + self._unread_bytes)
        memory.unfinished_bytes -= reader.unfinished_bytes
        memory.unsent_bytes -= self._unsent_bytes
        reader.held_bytes = reader.unfinished_bytes = self._unread_bytes = self._unsent_bytes = 0
        reader.close()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        memory = self._server.memory
        self._unread.append(data)
        self._unread_bytes += len(data)
        memory.held_bytes += len(data)
        if self._exchange is None and not self._scheduled and not self.paused:
            self._serve()
        elif self._unread_bytes > MAX_UNREAD_BYTES or memory.is_full:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The client has closed its side: asyncio closes the connection."""

    def pause_writing(self) -> None:
        self.paused = True
        self._waiting_since_s = time.monotonic()
        unsent_bytes = self._transport.get_write_buffer_size()
        if not self._server.memory.hold_unsent(unsent_bytes):
            self._transport.abort()
            return
        self._unsent_bytes = unsent_bytes
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.paused = False
        self._server.memory.unsent_bytes -= self._unsent_bytes
        self._unsent_bytes = 0
        if self._exchange is not None:
            self._exchange.resume()
        elif not self._serving:
            self._serve()

    # --- requests ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve requests until one has to wait for engines or for the client, or others have a turn."""
        reader = self._reader
        self._serving = True
        left = MAX_SERVED_AT_ONCE
        while self._exchange is None and not self._closing and not self.paused:
            if not left:
                self._serve_later()
                break
            if reader.requests:
                left -= 1
                self._start(reader.requests.popleft())
            elif reader.ended:
                self._end()
            elif self._unread:
                self._read()
                if self._unread and not reader.requests and not reader.ended:
                    left = 0  # the reader has read as much as it reads in one turn
            else:
                self._continue_request()
                break
        self._serving = False

    def _serve_later(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._serve_again)

    def _serve_again(self) -> None:
        self._scheduled = False
        if not self._closing:
            self._serve()

    def _read(self) -> None:
        """Have the reader read on."""
        reader, was_begun = self._reader, self._reader.begun
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._server.memory.release(len(data))
        rest = reader.feed(data)
        self._server.memory.held_bytes += len(rest)
        self._unread, self._unread_bytes = [rest] if rest else [], len(rest)
        if reader.unfinished_bytes and reader.requests:
            self._server.memory.unfinished_bytes -= reader.unfinished_bytes
            reader.unfinished_bytes = 0
        if reader.begun and not was_begun:
            self._waiting_since_s = time.monotonic()
        if self._reading_paused and not rest:
            self._reading_paused = False
            self._transport.resume_reading()

    def _continue_request(self) -> None:
        """Send `100 Continue` to a client that waits for it before it sends its body."""
        if self._reader.expects_continue:
            self._reader.expects_continue = False
            self._transport.write(_CONTINUE)

    def _start(self, request: Request) -> None:
        """Start an exchange for a request, or send the response to it if no engine is needed."""
        self._waiting_since_s = time.monotonic()
        path, method = request.path, request.method
        if path in _COMPLETION_PATHS or path in PASS_THROUGH_PATHS:
            if method == b"POST":
                self._start_exchange(request)
            else:
                self._reject_method(request, b"POST")
        elif path not in router_paths.ROUTER_PATHS:
            self._send_error(request, 404, f"no such path: {path[:100].decode('latin-1')}")
        elif method not in (b"GET", b"HEAD"):
            self._reject_method(request, b"GET, HEAD")
        else:
            head_only, close = method == b"HEAD", not request.keep_alive
            self._transport.write(
                router_paths.build_router_response(
                    self._server.router, path, head_only=head_only, close=close
                )
            )
            self._release(len(request.body))

    def _reject_method(self, request: Request, allowed: bytes) -> None:
        message = f"method not allowed: use {allowed.decode()}"
        self._send_error(request, 405, message, header_lines=b"allow: %b\r\n" % allowed)

    def _send_error(self, request: Request, status: int, message: str, *, header_lines: bytes = b"") -> None:
        self._transport.write(
            responses.build_error_response(
                status,
                message,
                header_lines=header_lines,
                close=not request.keep_alive,
                head_only=request.method == b"HEAD",
            )
        )
        self._release(len(request.body))

    def _start_exchange(self, request: Request) -> None:
        router = self._server.router
        settings = router.settings
        if settings is None or router.stopping:
            starting = "the router is starting: it has not read its PDService yet"
            self._send_error(request, 503, "the router is shutting down" if router.stopping else starting)
            return
        try:
            caller = router.callers.identify(settings, request.headers, self._peer)
        except CallerRefused as refused:
            self._send_error(
                request, refused.status, refused.message, header_lines=_CHALLENGES[refused.status]
            )
            return
        memory = self._server.memory
        size = estimate_parsed_bytes(request.body, few_held=memory.holds_few)
        if not memory.hold(size, body_bytes=len(request.body)):
            self._send_error(request, 503, FULL)
            return
        self._parsed_bytes = size
        self._reader.held_bytes += size
        client_request = _build_client_request(request, router, caller)
        if router.leaving:
            client_request.keep_alive = False
        self._request = client_request
        self._id_line = b"\r\nx-request-id: %b\r\n%b" % (client_request.request_id, caller.header_lines)
        kind = Exchange if request.path in _COMPLETION_PATHS else PassThrough
        downstream: Downstream = self
        if request.http_version == b"1.0":
            client_request.keep_alive, downstream = False, UnchunkedDownstream(self)
        self._exchange = kind(router, settings, downstream, client_request)
        self._exchange.start()

    def _end(self) -> None:
        """Close the connection, after the response to what the reader rejected.

        To close while the client still sends would reset the connection before the client has read the
        response: after a rejection the client closes first, or `LINGER_S` pass.
        """
        rejection = self._reader.rejection
        if rejection is None:
            self._close()
            return
        self._transport.write(responses.build_error_response(rejection.status, rejection.message, close=True))
        if not self._transport.can_write_eof():  # TLS
            self._close()
            return
        self._transport.write_eof()
        self._closing, self._waiting_since_s = True, time.monotonic()

    # --- Downstream ----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._id_line:  # the first bytes of a response
            data = data.replace(b"\r\n", self._id_line, 1)
            self._id_line = b""
        self._transport.write(data)

    def release_body(self) -> None:
        request = self._request
        if request is not None:
            self._request = None
            self._release(len(request.body) + self._parsed_bytes)
            request.body = b""

    def finish_response(self, *, keep_alive: bool) -> None:
        self.release_body()
        self._exchange = None
        self._waiting_since_s = time.monotonic()
        if not keep_alive or self._server.router.stopping:
            self._close()
        elif not self._serving and (self._unread or self._reader.requests or self._reader.ended):
            self._serve()

    def _release(self, size: int) -> None:
        self._reader.held_bytes -= size
        self._server.memory.release(size)

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    # --- closing -------------------------------------------------------------------------------

    def close_when_idle(self) -> None:
        """Close if there is no exchange; `finish_response` closes a busy connection of a stopping router."""
        if self._exchange is None:
            self._close()

    def abort(self) -> None:
        """Close at once; an exchange in progress is cancelled."""
        self._transport.abort()

    def count_buffered_bytes(self) -> int:
        """Bytes of this connection in the router's memory: unread ones, bodies, and unsent responses."""
        return self._unread_bytes + self._reader.held_bytes + self._transport.get_write_buffer_size()

    def enforce_timeouts(self, now_s: float) -> None:
        """Close the connection if the client has exceeded a time-out."""
        waits = self._exchange is None or self.paused
        if not waits or now_s - self._waiting_since_s <= self._find_timeout_s():
            return
        if self.paused or self._closing:
            self._transport.abort()  # what was not sent will not be read
        else:
            self._close()

    def _find_timeout_s(self) -> float:
        """How long the router waits for the client to send or to read."""
        if self.paused:
            return STALLED_CLIENT_TIMEOUT_S
        if self._reader.rejection is not None:
            return LINGER_S
        timeout_s = REQUEST_TIMEOUT_S if self._reader.begun else IDLE_TIMEOUT_S
        return min(timeout_s, CROWDED_TIMEOUT_S) if self._server.is_crowded else timeout_s


def _build_client_request(request: Request, router: Router, caller: Caller) -> ClientRequest:
    headers = request.headers
    request_id = headers.get(b"x-request-id")
    if request_id is not None and not (len(request_id) <= _MAX_REQUEST_ID_BYTES and request_id.isascii()):
        request_id = None
    return ClientRequest(
        request.path,
        request.body,
        request_id or router.make_request_id(),
        caller,
        _build_trace_headers(headers) if b"traceparent" in headers else b"",
        request.keep_alive,
    )


def _build_trace_headers(headers: Mapping[bytes, bytes]) -> bytes:
    """Header lines of the W3C trace context; `tracestate` is only valid with `traceparent`."""
    state = headers.get(b"tracestate")
    lines = b"traceparent: %b\r\n" % headers[b"traceparent"]
    return lines if state is None else lines + b"tracestate: %b\r\n" % state
