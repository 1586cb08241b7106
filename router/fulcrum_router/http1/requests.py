"""Read client requests from the bytes of one connection: framing and limits, without a socket or a clock.

httptools parses. This module refuses what a proxy in front of the router and the router could read in two
ways: a repeated or missing Host, a transfer coding other than `chunked`, chunks of an HTTP/1.0 client.
`downstream` decides when to read on, serves the requests in order, and ends the connection after a refusal.
"""

from collections import deque
from typing import Any, Protocol

import httptools

MAX_HEAD_BYTES = 32_768
"""Longest request head; also the limit of trailers, and of a chunk's extensions."""
MAX_BODY_BYTES = 8 * 1024 * 1024
"""Checking and parsing more would keep all other clients waiting for more than 20 ms."""
MAX_PARTS = 1_024
"""Parts of a body that are kept before they are joined."""
PIECE_BYTES = 8_192
"""Bytes beyond the current body that are parsed at once, so that few pipelined requests are read at once."""
MAX_PIECES = 8
"""Pieces that are parsed in one turn of the event loop: chunks of one byte cost 100 ns each."""

_REPLAYED_HEADERS = frozenset(  # all that the router reads of a request
    {
        b"authorization",
        b"content-length",
        b"expect",
        b"host",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"x-customer-tier",
        b"x-request-id",
        b"x-tenant-id",
    }
)
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"CONNECT"})
"""httptools knows others, some of them with protocols that are not HTTP."""
FULL = "the router has no memory for more requests now; try again"
_SINGLE_HEADERS = (
    b"authorization",
    b"content-length",
    b"host",
    b"transfer-encoding",
    b"x-customer-tier",
    b"x-tenant-id",
)


class Rejection(Exception):
    """What was read is not served: the connection ends with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class BodyMemory(Protocol):
    """Limits the bytes of all bodies that are held at once."""

    def hold(self, size: int, *, body_bytes: int) -> bool:
        """Count `size` bytes more, of a body that has `body_bytes` with them; False if there is no room."""
        ...

    def hold_unfinished(self, size: int) -> bool:
        """Count `size` of the held bytes as those of a body that came in part; False if there is no room."""
        ...


class Request:
    """A whole request."""

    __slots__ = ("body", "headers", "http_version", "keep_alive", "method", "path")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        http_version: bytes,
        keep_alive: bool,
    ) -> None:
        self.method, self.body = method, body
        self.path = path
        """Path of the request target, without the query."""
        self.headers = headers
        """Header lines, names in lower case; of repeated ones the last."""
        self.http_version = http_version
        """`1.0` or `1.1`."""
        self.keep_alive = keep_alive
        """Whether the client may send another request on the connection."""


class RequestReader:
    """Reads the requests of one connection.

    Args:
        memory: Limit on the bodies of all connections. What it holds for this connection, the owner of the
            connection releases.
    """

    __slots__ = (
        "_body_bytes",
        "_body_parts",
        "_expected_bytes",
        "_header_lines",
        "_headers",
        "_joined_parts",
        "_keep_alive",
        "_memory",
        "_method",
        "_parser",
        "_piece_had_body",
        "_quiet_bytes",
        "_target",
        "_version",
        "begun",
        "expects_continue",
        "held_bytes",
        "on_header",
        "rejection",
        "requests",
        "unfinished_bytes",
    )

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._header_lines: list[tuple[bytes, bytes]] = []
        """Header lines of the request as they arrived, trailers included."""
        append = self._header_lines.append
        self.on_header = lambda name, value: append((name, value))  # called most often: no attribute is read
        self._parser: Any = httptools.HttpRequestParser(self)
        self._keep_alive = True
        self.requests: deque[Request] = deque()
        """Requests that were read; the caller removes them."""
        self.rejection: Rejection | None = None
        """Why nothing more is read; sent after the responses to `requests`."""
        self.held_bytes = 0
        """Bytes of bodies that were counted by `memory` and not yet released."""
        self.unfinished_bytes = 0
        """Bytes of a body that came in part, as counted by `memory`."""
        self.begun = False
        """Whether part of a request was read."""
        self._clear()
        self.begun = False

    def _clear(self) -> None:
        self.begun = True
        self.expects_continue = False
        self._target = self._method = b""
        self._version = ""
        self._header_lines.clear()
        self._headers: dict[bytes, bytes] = {}
        self._body_parts: list[bytes] = []
        self._body_bytes = self._expected_bytes = self._quiet_bytes = self._joined_parts = 0
        self._piece_had_body = False

    def close(self) -> None:
        """Nothing more is read. The parser and its reader refer to each other until then."""
        self._parser = None

    @property
    def ended(self) -> bool:
        """Whether nothing more is read: after a rejection, or a request that closes the connection."""
        return self.rejection is not None or not self._keep_alive

    def feed(self, data: bytes) -> bytes:
        """Read on until a request is complete, `data` or some pieces are read; return the bytes not read."""
        position, view = 0, memoryview(data)
        try:
            for _ in range(MAX_PIECES):
                if position >= len(data) or self.requests or self.ended:
                    break
                missing = max(0, self._expected_bytes - self._body_bytes)  # chunks announce nothing
                piece = view[position : position + PIECE_BYTES + missing]
                position += self._feed_piece(piece)
            if self._body_bytes > self.unfinished_bytes:
                self._count_unfinished()
        except Rejection as rejection:
            self.rejection = rejection
        return b"" if position >= len(data) or self.ended else data[position:]

    def _count_unfinished(self) -> None:
        size = self._body_bytes - self.unfinished_bytes
        if not self._memory.hold_unfinished(size):
            raise Rejection(503, FULL)
        self.unfinished_bytes += size

    def _feed_piece(self, piece: memoryview) -> int:
        """Parse a piece; return how much of it was read."""
        self._piece_had_body = False
        size = len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            size = offer.args[0]
            self._read_again_without_upgrade()
        except httptools.HttpParserError as error:
            self._handle_parser_error(error)
        self._quiet_bytes = 0 if self._piece_had_body else self._quiet_bytes + size
        if self._quiet_bytes > MAX_HEAD_BYTES:
            raise Rejection(431, f"the request head is larger than {MAX_HEAD_BYTES} bytes")
        return size

    def _handle_parser_error(self, error: Exception) -> None:
        """Reject what cannot be parsed; httptools wraps what this class's callbacks raise."""
        if not self._keep_alive:
            return  # bytes after a request that closes the connection
        cause = error.__context__
        if isinstance(cause, Rejection):
            raise cause from None
        raise Rejection(400, f"the request is not HTTP/1.1: {error}") from None

    def _read_again_without_upgrade(self) -> None:
        """Parse the last request again without its Upgrade header: httptools skips the body otherwise.

        Java's HTTP client offers an upgrade with each first request.
        """
        offered = self.requests.pop()
        if offered.method == b"CONNECT":
            raise Rejection(405, "CONNECT is not supported")
        lines = [
            b"%b: %b\r\n" % (name, offered.headers[name])
            for name in _REPLAYED_HEADERS
            if name in offered.headers
        ]
        if b"close" in offered.headers.get(b"connection", b"").lower():
            lines.append(b"connection: close\r\n")
        self._keep_alive = True
        self._parser = httptools.HttpRequestParser(self)
        version, header_lines = offered.http_version, b"".join(lines)
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (offered.method, offered.path, version, header_lines)
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserError as error:
            self._handle_parser_error(error)

    # --- httptools -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._clear()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_headers_complete(self) -> None:
        lines = self._header_lines
        self._headers = headers = {name.lower(): value for name, value in lines}
        self._method, self._version = self._parser.get_method(), self._parser.get_http_version()
        if self._quiet_bytes > MAX_HEAD_BYTES - PIECE_BYTES:
            self._limit_header_bytes()
        self._check_framing(headers, is_repeated=len(headers) != len(lines))
        if b"content-length" in headers:
            self._expected_bytes = int(headers[b"content-length"])
            if self._expected_bytes > MAX_BODY_BYTES:
                raise Rejection(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        expected = headers.get(b"expect")
        if expected is not None and self._version == "1.1":
            if expected.lower() != b"100-continue":
                raise Rejection(417, "the only supported expectation is 100-continue")
            self.expects_continue = True

    def _check_framing(self, headers: dict[bytes, bytes], *, is_repeated: bool) -> None:
        version = self._version
        if version not in ("1.1", "1.0"):
            raise Rejection(505, "the router speaks HTTP/1.1")
        if self._method not in _METHODS:
            raise Rejection(501, "the request method is not known")
        if is_repeated:
            names = [name.lower() for name, _ in self._header_lines]
            for name in _SINGLE_HEADERS:
                if names.count(name) > 1:
                    raise Rejection(400, f"the header {name.decode()} is repeated")
        if b"host" not in headers and version == "1.1":
            raise Rejection(400, "the header host is missing")
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or version == "1.0"):
            raise Rejection(501, "the only supported transfer coding is chunked, with HTTP/1.1")

    def _limit_header_bytes(self) -> None:
        size = len(self._target) + sum(len(name) + len(value) for name, value in self._header_lines)
        if size > MAX_HEAD_BYTES:
            raise Rejection(431, f"the request head is larger than {MAX_HEAD_BYTES} bytes")

    def on_body(self, body: bytes) -> None:
        self._piece_had_body, self.expects_continue = True, False
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            raise Rejection(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not self._memory.hold(len(body), body_bytes=self._body_bytes):
            raise Rejection(503, FULL)
        self.held_bytes += len(body)
        parts = self._body_parts
        parts.append(body)
        if len(parts) - self._joined_parts > MAX_PARTS:
            self._join_parts()

    def _join_parts(self) -> None:
        """Join the last parts: each costs 40 bytes more than it holds, and chunks may hold one byte."""
        parts = self._body_parts
        parts[self._joined_parts :] = [b"".join(parts[self._joined_parts :])]
        self._joined_parts = len(parts)

    def on_message_complete(self) -> None:
        if self.ended:
            return
        self.begun = self.expects_continue = False
        parts = self._body_parts
        self._keep_alive = keep_alive = self._parser.should_keep_alive()
        self.requests.append(
            Request(
                self._method,
                self._target.partition(b"?")[0],
                self._headers,
                parts[0] if len(parts) == 1 else b"".join(parts),
                b"1.0" if self._version == "1.0" else b"1.1",
                keep_alive,
            )
        )
        self._body_parts = []
        self._body_bytes = self._expected_bytes = 0
