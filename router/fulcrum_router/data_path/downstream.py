"""Client connections: read requests, enforce limits and time-outs, detect disconnects.

Requests of one connection are served one at a time and in order; each is an `Exchange`. httptools parses
them, chunked and pipelined ones too. Bytes that arrive during an exchange are buffered unparsed, up to a
limit: reading has to go on for a disconnect to be noticed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import httptools
from prometheus_client import CollectorRegistry

from fulcrum_router.control import router_endpoints
from fulcrum_router.data_path.exchange import Exchange
from fulcrum_router.data_path.request import ClientRequest
from fulcrum_router.http1 import responses
from fulcrum_router.router import Router

MAX_HEAD_BYTES = 32_768
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BACKLOG_BYTES = 65_536
"""Bytes buffered during an exchange before reading is paused."""
REQUEST_TIMEOUT_S = 60.0
"""From the first to the last byte of a request."""
IDLE_TIMEOUT_S = 75.0
"""Between two requests."""
STALLED_CLIENT_TIMEOUT_S = 60.0
"""While the client does not read its response."""

_COMPLETION_PATHS = frozenset({b"/v1/completions", b"/v1/chat/completions"})
_REPLAYED_HEADERS = frozenset(  # all that the router reads of a request
    {
        b"content-length",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"x-customer-tier",
        b"x-request-id",
    }
)
_MAX_REQUEST_ID_BYTES = 200


class _RequestRejected(Exception):
    """A request that is rejected while it is read; the connection ends with this response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.response = responses.build_error_response(status, message, close=True)


class ClientServer:
    """All client connections of one router; as a protocol factory it creates them."""

    def __init__(self, router: Router, registry: CollectorRegistry) -> None:
        self.router, self.registry = router, registry
        self.connections: set[ClientConnection] = set()

    def __call__(self) -> "ClientConnection":
        return ClientConnection(self)

    def enforce_timeouts(self, now_s: float) -> None:
        """Close connections that have exceeded a time-out."""
        for connection in list(self.connections):
            connection.enforce_timeouts(now_s)

    def close(self) -> None:
        """Close idle connections; busy ones close after their response, since the router is stopping."""
        for connection in list(self.connections):
            connection.close_when_idle()


class ClientConnection(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_body_bytes",
        "_body_parts",
        "_close_after_queue",
        "_closing",
        "_closing_response",
        "_exchange",
        "_head_bytes",
        "_head_complete",
        "_headers",
        "_is_starting",
        "_parser",
        "_path",
        "_queue",
        "_raw_headers",
        "_read_bytes",
        "_rejection",
        "_server",
        "_transport",
        "_waiting_since_s",
        "on_header",
        "paused",
    )

    def __init__(self, server: ClientServer) -> None:
        self._server = server
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set by connection_made
        self._headers: dict[bytes, bytes] = {}
        """Header lines of the request head, names in lower case."""
        self._raw_headers: dict[bytes, bytes] = {}
        """Header lines as they arrived, trailers included."""
        self.on_header = self._raw_headers.__setitem__  # called for each header line: no Python code
        self._parser: Any = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._queue: deque[ClientRequest | bytes] = deque()
        """Requests that were read and not started, and responses that are sent in their turn."""
        self._close_after_queue = False
        """Whether nothing more is read: the connection closes after the queue."""
        self._closing_response = b""
        """Response that is sent just before."""
        self._rejection: _RequestRejected | None = None
        self._backlog: list[bytes] = []
        self._backlog_bytes = self._read_bytes = 0
        self._closing = False
        self._is_starting = False
        """Whether `_serve_next` is starting an exchange, which may finish before it returns."""
        self.paused = False
        self._clear()

    def _clear(self) -> None:
        self._path = b""
        self._raw_headers.clear()
        self._body_parts: list[bytes] = []
        self._head_bytes = self._body_bytes = 0
        self._head_complete = False
        self._waiting_since_s = time.monotonic()

    # --- asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        self._server.connections.discard(self)
        self._closing = True
        self._queue.clear()
        if self._exchange is not None:
            self._exchange.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._exchange is None and not self._queue:
            self._feed(data)
            return
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.paused = True
        self._waiting_since_s = time.monotonic()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._exchange is not None:
            self._exchange.resume()

    # --- httptools -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._clear()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_headers_complete(self) -> None:
        self._head_complete = True
        if self._head_bytes + self._read_bytes > MAX_HEAD_BYTES:
            self._limit_header_bytes()
        fields = self._raw_headers
        self._headers = headers = dict(zip(map(bytes.lower, fields), fields.values(), strict=True))
        length = headers.get(b"content-length")
        if length is not None and length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise self._reject(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if b"expect" in self._headers and self._exchange is None and not self._queue:
            if self._headers[b"expect"].lower() != b"100-continue":
                raise self._reject(417, "the only supported expectation is 100-continue")
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            raise self._reject(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        self._body_parts.append(body)

    def on_message_complete(self) -> None:
        if not self._close_after_queue:
            self._queue.append(self._take_request())

    def _reject(self, status: int, message: str) -> _RequestRejected:
        """The exception to raise. httptools wraps what its callbacks raise, so it is also kept here."""
        self._rejection = rejection = _RequestRejected(status, message)
        return rejection

    # --- requests ------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        self._read_bytes = len(data)
        try:
            self._parser.feed_data(data)
            if not self._queue:
                self._limit_unfinished_head()
        except httptools.HttpParserUpgrade as offer:
            self._ignore_upgrade(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            rejection = self._rejection or _RequestRejected(400, f"the request is not HTTP/1.1: {error}")
            self._close_after(rejection.response)
        except _RequestRejected as rejection:
            self._close_after(rejection.response)
        self._serve_next()

    def _close_after(self, response: bytes) -> None:
        """Read nothing more; close the connection after the queue and then this response."""
        self._close_after_queue, self._closing_response = True, response

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade header: httptools skips the body of an upgrade request.

        Java's HTTP client sends one with each first request.
        """
        self._queue.pop()
        method, path = self._parser.get_method(), self._path
        header_lines = b"".join(
            b"%b: %b\r\n" % (name, self._headers[name]) for name in _REPLAYED_HEADERS & self._headers.keys()
        )
        self._parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT":
            self._close_after(responses.build_error_response(405, "CONNECT is not supported", close=True))
            self._serve_next()
        else:
            self._feed(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, path, header_lines, rest))

    def _limit_unfinished_head(self) -> None:
        """Enforce the limit on a head or trailers that are not complete yet."""
        if self._head_complete:
            self._limit_header_bytes()
            return
        self._head_bytes += self._read_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._reject(431, f"the request head is larger than {MAX_HEAD_BYTES} bytes")

    def _limit_header_bytes(self) -> None:
        fields = self._raw_headers
        size = len(self._path) + sum(map(len, fields)) + sum(map(len, fields.values()))
        if size > MAX_HEAD_BYTES:
            raise self._reject(431, f"the request head is larger than {MAX_HEAD_BYTES} bytes")

    def _take_request(self) -> ClientRequest | bytes:
        """Return the request that was read, or the response to it if no engine is needed."""
        parser = self._parser
        keep_alive = parser.should_keep_alive()
        path = self._path.partition(b"?")[0]
        method = parser.get_method()
        if path in _COMPLETION_PATHS:
            if method != b"POST":
                return self._reject_method(b"POST", keep_alive)
            return self._build_client_request(path, keep_alive)
        if path in router_endpoints.ROUTER_PATHS:
            if method not in (b"GET", b"HEAD"):
                return self._reject_method(b"GET, HEAD", keep_alive)
            router, registry = self._server.router, self._server.registry
            response = router_endpoints.build_router_response(
                router, registry, path, head_only=method == b"HEAD", close=not keep_alive
            )
        else:
            name = path[:100].decode("latin-1")
            response = responses.build_error_response(404, f"no such path: {name}", close=not keep_alive)
        self._close_after_queue = not keep_alive
        return response

    def _reject_method(self, allowed: bytes, keep_alive: bool) -> bytes:
        self._close_after_queue = not keep_alive
        message = f"method not allowed: use {allowed.decode()}"
        return responses.build_error_response(
            405, message, header_lines=b"allow: %b\r\n" % allowed, close=not keep_alive
        )

    def _build_client_request(self, path: bytes, keep_alive: bool) -> ClientRequest:
        headers = self._headers
        body = self._body_parts[0] if len(self._body_parts) == 1 else b"".join(self._body_parts)
        tier = headers.get(b"x-customer-tier")
        request_id = headers.get(b"x-request-id")
        if request_id is not None and not (len(request_id) <= _MAX_REQUEST_ID_BYTES and request_id.isascii()):
            request_id = None
        return ClientRequest(
            path,
            body,
            request_id or self._server.router.make_request_id(),
            None if tier is None else tier.decode("latin-1"),
            _build_trace_headers(headers) if b"traceparent" in headers else b"",
            b"1.0" if self._parser.get_http_version() == "1.0" else b"1.1",
            keep_alive,
        )

    def _serve_next(self) -> None:
        """Start the next request or send the next response of the queue; then close, or parse the backlog."""
        while self._exchange is None and not self._closing:
            if self._queue:
                self._is_starting = True
                self._start_exchange(self._queue.popleft())
                self._is_starting = False
            elif self._close_after_queue:
                self._transport.write(self._closing_response)
                self._close()
            elif self._backlog:
                data, self._backlog, self._backlog_bytes = b"".join(self._backlog), [], 0
                self._transport.resume_reading()
                self._feed(data)
                return
            else:
                return

    def _start_exchange(self, request: ClientRequest | bytes) -> None:
        if isinstance(request, bytes):
            self._transport.write(request)
            return
        router = self._server.router
        if router.settings is None or router.stopping:
            starting = "the router is starting: it has not read its PDService yet"
            message = "the router is shutting down" if router.stopping else starting
            self._transport.write(responses.build_error_response(503, message, close=not request.keep_alive))
            if not request.keep_alive:
                self._close()
            return
        if router.leaving:
            request.keep_alive = False
        self._exchange = Exchange(router, router.settings, self, request)
        self._exchange.start()

    # --- Downstream ----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def finish_response(self, *, keep_alive: bool) -> None:
        self._exchange = None
        self._waiting_since_s = time.monotonic()
        if not keep_alive or self._server.router.stopping:
            self._close()
        elif not self._is_starting and (self._queue or self._close_after_queue or self._backlog):
            self._serve_next()

    def _close(self) -> None:
        self._closing = True
        self._queue.clear()
        self._transport.close()

    # --- closing -------------------------------------------------------------------------------

    def close_when_idle(self) -> None:
        """Close if there is no exchange; `finish_response` closes a busy connection of a stopping router."""
        if self._exchange is None:
            self._close()

    def abort(self) -> None:
        """Close at once; an exchange in progress is cancelled."""
        self._transport.abort()

    def enforce_timeouts(self, now_s: float) -> None:
        """Close the connection if the client has exceeded a time-out."""
        waited_s = now_s - self._waiting_since_s
        if self.paused:
            if waited_s > STALLED_CLIENT_TIMEOUT_S:
                self._transport.abort()
        elif self._exchange is None and not self._closing:
            begun = bool(self._head_bytes or self._body_parts)
            if waited_s > (REQUEST_TIMEOUT_S if begun else IDLE_TIMEOUT_S):
                self._close()


def _build_trace_headers(headers: Mapping[bytes, bytes]) -> bytes:
    """Header lines of the W3C trace context; `tracestate` is only valid with `traceparent`."""
    state = headers.get(b"tracestate")
    lines = b"traceparent: %b\r\n" % headers[b"traceparent"]
    return lines if state is None else lines + b"tracestate: %b\r\n" % state
