"""Clients' connections: requests in, one at a time and in their order; limits; who left.

httptools reads requests, also chunked and pipelined ones. What comes in while a request is being
answered waits as raw bytes up to a limit, so that reading goes on and a client that leaves is noticed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import httptools
from prometheus_client import CollectorRegistry

from fulcrum_router.data_path import pages
from fulcrum_router.data_path.exchange import Exchange
from fulcrum_router.data_path.request import Call
from fulcrum_router.http1 import responses
from fulcrum_router.router import Router

MAX_HEAD_BYTES = 32_768
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BACKLOG_BYTES = 65_536
REQUEST_PATIENCE_S = 60.0
"""For a request to come in whole."""
IDLE_S = 75.0
"""For the next request."""
STALLED_S = 60.0
"""For a client that takes nothing while an answer waits."""

_POSTS = frozenset({b"/v1/completions", b"/v1/chat/completions"})
_KEPT = frozenset(
    {
        b"content-length",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"x-customer-tier",
        b"x-request-id",
    }
)
_MAX_ID_BYTES = 200


class _Refused(Exception):
    """The request cannot be taken; the connection ends with this answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.answer = responses.error(status, message, close=True)


class ClientServer:
    """All connections of clients to one router."""

    def __init__(self, router: Router, registry: CollectorRegistry) -> None:
        self.router, self.registry = router, registry
        self.connections: set[ClientConnection] = set()

    def __call__(self) -> "ClientConnection":
        return ClientConnection(self)

    def check(self, now_s: float) -> None:
        """Close connections that are idle, slow to ask or slow to read for too long."""
        for connection in list(self.connections):
            connection.check(now_s)

    def close(self) -> None:
        """Close idle connections, and busy ones after their answer."""
        for connection in list(self.connections):
            connection.close_when_idle()


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_backlog",
        "_backlog_size",
        "_beginning",
        "_body",
        "_body_size",
        "_calls",
        "_closing",
        "_exchange",
        "_fields",
        "_head_done",
        "_head_size",
        "_headers",
        "_parser",
        "_path",
        "_read_size",
        "_refusal",
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
        """The fields of the head, names in lower case."""
        self._fields: dict[bytes, bytes] = {}
        """Fields as they came, trailers included."""
        self.on_header = self._fields.__setitem__  # called for each field: no Python code
        self._parser: Any = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._calls: deque[Call | bytes] = deque()
        """Requests read and not begun, and answers to give at their turn."""
        self._refusal: bytes | None = None
        self._backlog: list[bytes] = []
        self._backlog_size = self._read_size = 0
        self._closing = False
        self._beginning = False
        self.paused = False
        self._clear()

    def _clear(self) -> None:
        self._path = b""
        self._fields.clear()
        self._body: list[bytes] = []
        self._head_size = self._body_size = 0
        self._head_done = False
        self._waiting_since_s = time.monotonic()

    # --- asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        self._server.connections.discard(self)
        self._closing = True
        self._calls.clear()
        if self._exchange is not None:
            self._exchange.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._exchange is None and not self._calls:
            self._feed(data)
            return
        self._backlog.append(data)
        self._backlog_size += len(data)
        if self._backlog_size > MAX_BACKLOG_BYTES:
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
        self._head_done = True
        if self._head_size + self._read_size > MAX_HEAD_BYTES:
            self._check_fields()
        fields = self._fields
        self._headers = headers = dict(zip(map(bytes.lower, fields), fields.values(), strict=True))
        length = headers.get(b"content-length")
        if length is not None and length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise _Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if b"expect" in self._headers and self._exchange is None and not self._calls:
            if self._headers[b"expect"].lower() != b"100-continue":
                raise _Refused(417, "the only expectation met is 100-continue")
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > MAX_BODY_BYTES:
            raise _Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._refusal is None:
            self._calls.append(self._call())

    # --- requests ------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        refusal: bytes | None = None
        self._read_size = len(data)
        try:
            self._parser.feed_data(data)
            if not self._calls:
                self._check_unfinished()
        except httptools.HttpParserUpgrade as offer:
            self._pass_over_upgrade(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, _Refused):
                refusal = refused.answer
            else:
                refusal = responses.error(400, f"the request is not HTTP/1.1: {error}", close=True)
        except _Refused as refused:
            refusal = refused.answer
        if refusal is not None:
            self._refusal = refusal
        self._next()

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """Read the request again without the offer (Java's clients make one): it has the body skipped."""
        self._calls.pop()
        method, path = self._parser.get_method(), self._path
        kept = b"".join(b"%b: %b\r\n" % (name, self._headers[name]) for name in _KEPT & self._headers.keys())
        self._parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT":
            self._refusal = responses.error(405, "CONNECT is not served", close=True)
            self._next()
        else:
            self._feed(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, path, kept, rest))

    def _check_unfinished(self) -> None:
        """Bound a head that does not end, and trailers that do not."""
        if self._head_done:
            self._check_fields()
            return
        self._head_size += self._read_size
        if self._head_size > MAX_HEAD_BYTES:
            raise _Refused(431, f"the request head is larger than {MAX_HEAD_BYTES} bytes")

    def _check_fields(self) -> None:
        fields = self._fields
        size = len(self._path) + sum(map(len, fields)) + sum(map(len, fields.values()))
        if size > MAX_HEAD_BYTES:
            raise _Refused(431, f"the request head is larger than {MAX_HEAD_BYTES} bytes")

    def _call(self) -> Call | bytes:
        """The request read, or the answer that it gets without any engine."""
        parser = self._parser
        keep = parser.should_keep_alive()
        path = self._path.partition(b"?")[0]
        method = parser.get_method()
        if path in _POSTS:
            if method != b"POST":
                return self._wrong_method(b"POST", keep)
            return self._engine_call(path, keep)
        if path in pages.PATHS:
            if method not in (b"GET", b"HEAD"):
                return self._wrong_method(b"GET, HEAD", keep)
            router, registry = self._server.router, self._server.registry
            answer = pages.page(router, registry, path, head_only=method == b"HEAD", close=not keep)
        else:
            name = path[:100].decode("latin-1")
            answer = responses.error(404, f"{name} is not served here", close=not keep)
        if not keep:
            self._refusal = b""  # nothing after this one
        return answer

    def _wrong_method(self, allowed: bytes, keep: bool) -> bytes:
        if not keep:
            self._refusal = b""
        message = f"use {allowed.decode()}"
        return responses.error(405, message, extra=b"allow: %b\r\n" % allowed, close=not keep)

    def _engine_call(self, path: bytes, keep: bool) -> Call:
        headers = self._headers
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        tier = headers.get(b"x-customer-tier")
        request_id = headers.get(b"x-request-id")
        if request_id is not None and not (len(request_id) <= _MAX_ID_BYTES and request_id.isascii()):
            request_id = None
        return Call(
            path,
            body,
            request_id or self._server.router.new_request_id(),
            None if tier is None else tier.decode("latin-1"),
            _trace_lines(headers) if b"traceparent" in headers else b"",
            b"1.0" if self._parser.get_http_version() == "1.0" else b"1.1",
            keep,
        )

    def _next(self) -> None:
        """Begin with the next request, or give the next answer, in the order they came in."""
        while self._exchange is None and not self._closing:
            if self._calls:
                self._beginning = True
                self._begin(self._calls.popleft())
                self._beginning = False
            elif self._refusal is not None:
                self._transport.write(self._refusal)
                self._close()
            elif self._backlog:
                data, self._backlog, self._backlog_size = b"".join(self._backlog), [], 0
                self._transport.resume_reading()
                self._feed(data)
                return
            else:
                return

    def _begin(self, call: Call | bytes) -> None:
        if isinstance(call, bytes):
            self._transport.write(call)
            return
        router = self._server.router
        if router.settings is None or router.stopping:
            message = "the router is shutting down" if router.stopping else "the service is not known yet"
            self._transport.write(responses.error(503, message, close=not call.keep_alive))
            if not call.keep_alive:
                self._close()
            return
        if router.leaving:
            call.keep_alive = False
        self._exchange = Exchange(router, router.settings, self, call)
        self._exchange.start()

    # --- for the exchange ----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def answered(self, *, keep: bool) -> None:
        self._exchange = None
        self._waiting_since_s = time.monotonic()
        if not keep or self._server.router.stopping:
            self._close()
        elif not self._beginning and (self._calls or self._refusal is not None or self._backlog):
            self._next()

    def _close(self) -> None:
        self._closing = True
        self._calls.clear()
        self._transport.close()

    # --- upkeep --------------------------------------------------------------------------------

    def close_when_idle(self) -> None:
        """Close now, or after the answer in progress."""
        if self._exchange is None:
            self._close()

    def abort(self) -> None:
        """Close at once, whatever is in progress."""
        self._transport.abort()

    def check(self, now_s: float) -> None:
        """Close if the client lets us wait for too long."""
        waited_s = now_s - self._waiting_since_s
        if self.paused:
            if waited_s > STALLED_S:
                self._transport.abort()
        elif self._exchange is None and not self._closing:
            begun = bool(self._head_size or self._body)
            if waited_s > (REQUEST_PATIENCE_S if begun else IDLE_S):
                self._close()


def _trace_lines(headers: Mapping[bytes, bytes]) -> bytes:
    """The W3C trace context, for engines; `tracestate` means nothing alone."""
    state = headers.get(b"tracestate")
    lines = b"traceparent: %b\r\n" % headers[b"traceparent"]
    return lines if state is None else lines + b"tracestate: %b\r\n" % state
