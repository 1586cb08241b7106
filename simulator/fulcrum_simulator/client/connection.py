"""A kept-alive HTTP/1.1 connection that carries one exchange at a time. Used by `generator`.

httptools parses response heads and chunks; the body is passed to the exchange undecoded. A general HTTP
library would cost more CPU per token than the engines under test.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from fulcrum_simulator.client.exchange import HttpExchange


class HttpConnection(asyncio.Protocol):
    """One connection to the service.

    Calls `on_free` when it can take the next exchange, `on_closed` once it is closed.
    """

    def __init__(
        self, on_free: Callable[["HttpConnection"], None], on_closed: Callable[["HttpConnection"], None]
    ) -> None:
        self._on_free, self._on_closed = on_free, on_closed
        self._now_s = asyncio.get_running_loop().time
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange: HttpExchange | None = None
        self._received_s = 0.0

    def send(self, exchange: HttpExchange, *, host: str) -> None:
        """Write the exchange's request. The connection must be free."""
        if self._transport is None:
            exchange.on_lost("connection closed", self._now_s())
            return
        request = exchange.request
        head = (
            f"POST {request.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"{request.head_lines}content-length: {len(request.body)}\r\n\r\n"
        )
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        exchange.on_sent(self._now_s())
        self._transport.write(head.encode() + request.body)

    def abort(self, reason: str) -> None:
        """End the exchange in flight, if any, with this reason, and close the connection."""
        self._end_exchange(reason)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received_s = self._now_s()
        if self._parser is None:
            self.abort("data without a request")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end_exchange(f"connection lost: {type(exc).__name__}" if exc else "connection closed")
        self._on_closed(self)

    def _end_exchange(self, reason: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_lost(reason, self._now_s())

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None and name.lower() == b"retry-after":
            self._exchange.on_retry_after(value)

    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._parser is not None:
            self._exchange.on_status(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(body, self._received_s)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        parser, self._parser = self._parser, None
        if exchange is None or parser is None or self._transport is None:
            return
        exchange.on_complete(self._received_s)
        if parser.should_keep_alive():
            self._on_free(self)
        else:
            self._transport.close()
