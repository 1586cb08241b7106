"""HTTP/1.1 framing of engine responses: enough to forward a response without decoding it.

Clients parse the same bytes, so what two parsers could read in two ways is refused: line ends without a
carriage return, a repeated length, chunk sizes that are not plain hexadecimal digits.

`parse_head` reads the head once. `ChunkScanner` finds the end of the body and of each whole chunk, so that
an error event can be inserted between two chunks when an engine dies. Sockets are `upstream`'s.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat

MAX_HEAD_BYTES = 65_536
MAX_SIZE_LINE_BYTES = 4_096
MAX_TRAILER_BYTES = 8_192
MAX_CHUNKS = 16_384
"""Chunks in one read of a response, and in one that is buffered whole: to find more takes longer than other
requests may wait. In an event stream so many chunks do not fit into one read.
"""
CHUNKED = -1
UNTIL_CLOSE = -2
"""Special values of `ResponseHead.length`. Integers below zero: the length is compared on every read."""

_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_HEADER_LINE = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:" + _TEXT + rb"\r\n"
_HEAD = re.compile(rb"HTTP/1\.[01] [1-5][0-9]{2}(?: " + _TEXT + rb")?\r\n(?:" + _HEADER_LINE + rb")*\r\n")
_TRAILER = re.compile(rb"(?!(?i:content-length|transfer-encoding):)" + _HEADER_LINE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;" + _TEXT + rb")?\r")

_HOP_BY_HOP = (
    b"connection:",
    b"keep-alive:",
    b"proxy-connection:",
    b"upgrade:",
    b"te:",
    b"proxy-authenticate:",
    b"x-request-id:",  # the router sends its own, which it also sent to the engine
)


class FramingError(ValueError):
    """An engine's response is not valid HTTP/1.1, or uses a framing that the router does not forward."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of a response."""

    status_line: bytes
    header_lines: bytes
    """The engine's header lines without the hop-by-hop ones, and the empty line."""
    status: int
    length: int
    """Body length in bytes, `CHUNKED` or `UNTIL_CLOSE`."""
    keep_alive: bool
    is_event_stream: bool

    def prepend_headers(self, headers: bytes) -> bytes:
        """The head for the client: the given header lines in front of the engine's."""
        return self.status_line + headers + self.header_lines


@lru_cache(maxsize=256)  # the heads of one engine differ in their lengths only
def parse_head(raw: bytes) -> ResponseHead:
    """Parse a head, empty line included.

    Raises:
        FramingError: if a line is malformed, the length cannot be read, or both a length and chunks are
            announced.
    """
    if _HEAD.fullmatch(raw) is None:
        raise FramingError(f"not the head of an HTTP/1.x response: {raw[:40]!r}")
    lowered, status = raw.lower(), int(raw[9:12])
    keep_alive = lowered.startswith(b"http/1.1")
    connection = _header_value(lowered, b"\r\nconnection:")
    if connection:
        keep_alive = b"close" not in connection and (keep_alive or b"keep-alive" in connection)
    length = _body_length(lowered, status)
    if length == UNTIL_CLOSE:
        keep_alive = False
    line, header_lines = _drop_hop_by_hop(raw)
    content_type = _header_value(lowered, b"\r\ncontent-type:") or b""
    is_event_stream = content_type.startswith(b"text/event-stream")
    return ResponseHead(line, header_lines, status, length, keep_alive, is_event_stream)


def _drop_hop_by_hop(raw: bytes) -> tuple[bytes, bytes]:
    line, *header_lines = raw[:-4].split(b"\r\n")
    kept = [header + b"\r\n" for header in header_lines if not header.lower().startswith(_HOP_BY_HOP)]
    return line + b"\r\n", b"".join(kept) + b"\r\n"


def _body_length(lowered: bytes, status: int) -> int:
    length = _header_value(lowered, b"\r\ncontent-length:")
    encoding = _header_value(lowered, b"\r\ntransfer-encoding:")
    if encoding is not None and (encoding != b"chunked" or length is not None):
        raise FramingError("transfer-encoding other than chunked, or with a content-length")
    if length is not None and _LENGTH.fullmatch(length) is None:
        raise FramingError(f"content-length {length[:20]!r}")
    if status in (204, 304) or status < 200:
        if encoding is not None:
            raise FramingError(f"chunks in a response with status {status}")
        return 0
    if encoding is not None:
        return CHUNKED
    return UNTIL_CLOSE if length is None else int(length)


def _header_value(lowered: bytes, name: bytes) -> bytes | None:
    start = lowered.find(name)
    if start < 0:
        return None
    start += len(name)
    if lowered.find(name, start) >= 0:
        raise FramingError(f"repeated header {name.strip().decode()}")
    return lowered[start : lowered.index(b"\r\n", start)].strip()


class ChunkScanner:
    """Finds the ends of chunks in a body that is read in arbitrary pieces."""

    __slots__ = ("_in_trailers", "_partial_line", "_remaining_bytes", "_trailer_bytes", "done")

    def __init__(self) -> None:
        self._remaining_bytes = 0  # of the current chunk, its CRLF included
        self._partial_line = b""  # beginning of a size line or trailer
        self._in_trailers = False
        self._trailer_bytes = 0
        self.done = False

    def feed(self, data: bytes) -> int:
        """Read the next piece of the body; return the offset after its last whole chunk.

        At the end of the body `done` is set, and the offset is that of the end of the body.

        Raises:
            FramingError: if a chunk size cannot be read, a chunk does not end after it, or trailers are too
                long.
        """
        size, position = len(data), self._remaining_bytes
        if not position and not self._partial_line and not self._in_trailers:
            # Short path: an event of a stream is one chunk, and comes in one read.
            line_end = data.find(b"\n")
            if line_end > 0:
                length = _parse_chunk_size(data[:line_end])
                if length and line_end + 3 + length == size and data.endswith(b"\r\n"):
                    return size
        if position:
            _check_chunk_end(data, position)
        if position > size:
            self._remaining_bytes = position - size
            return 0
        boundary = position
        for _ in repeat(None, MAX_CHUNKS):
            if position >= size:
                break
            end = data.find(b"\n", position)
            if end < 0:
                self._keep_partial_line(data[position:])
                break
            line = data[position:end]
            if self._partial_line:
                line, self._partial_line = self._partial_line + line, b""
            if self._in_trailers:
                if self._read_trailer(line):
                    self.done = True
                    self._remaining_bytes = 0
                    return end + 1
                position = end + 1
                continue
            length = _parse_chunk_size(line)
            if length == 0:  # the last chunk: trailers and an empty line follow
                self._in_trailers = True
                position = end + 1
                continue
            position = end + 3 + length  # after the newline, the content and its CRLF
            if position > size:
                _check_chunk_end(data, position)
                self._remaining_bytes = position - size
                return boundary
            if data[position - 2 : position] != b"\r\n":
                raise FramingError("a chunk does not end where its size says")
            boundary = position
        else:
            raise FramingError(f"more than {MAX_CHUNKS} chunks at once")
        self._remaining_bytes = 0
        return boundary

    def _keep_partial_line(self, beginning: bytes) -> None:
        self._partial_line += beginning
        if len(self._partial_line) > MAX_SIZE_LINE_BYTES:
            raise FramingError("chunk size line or trailer too long")

    def _read_trailer(self, line: bytes) -> bool:
        """Read a line of the trailers; return whether it is the empty line after them."""
        if line == b"\r":
            return True
        self._trailer_bytes += len(line)
        if _TRAILER.fullmatch(line + b"\n") is None or self._trailer_bytes > MAX_TRAILER_BYTES:
            raise FramingError("trailers that are malformed or too long")
        return False


def _check_chunk_end(data: bytes, position: int) -> None:
    """Check as much of the CRLF before `position`, the end of a chunk, as there is in `data`."""
    start = position - 2
    expected = b"\r\n" if start >= 0 else b"\n"
    there = data[max(0, start) : position]
    if not expected.startswith(there):
        raise FramingError("a chunk does not end where its size says")


@lru_cache(maxsize=1024)  # a stream's chunks have few sizes
def _parse_chunk_size(line: bytes) -> int:
    found = _CHUNK_SIZE.fullmatch(line)
    if found is None:
        raise FramingError(f"chunk size {line[:20]!r}")
    return int(found[1], 16)


def dechunk(framed: bytes) -> bytes:
    """Return the content of a whole chunked body; raises FramingError if it has more than `MAX_CHUNKS`."""
    parts: list[bytes] = []
    position = 0
    for _ in repeat(None, MAX_CHUNKS):
        end = framed.index(b"\n", position)
        size = _parse_chunk_size(framed[position:end])
        if size == 0:
            return b"".join(parts)
        parts.append(framed[end + 1 : end + 1 + size])
        position = end + 3 + size
    raise FramingError(f"more than {MAX_CHUNKS} chunks in a response that is buffered whole")


class ChunkDecoder:
    """Takes the content out of a chunked body in arbitrary pieces, whose framing was checked before."""

    __slots__ = ("_partial_line", "_remaining_bytes", "done")

    def __init__(self) -> None:
        self._remaining_bytes = 0  # of the current chunk, its CRLF included
        self._partial_line = b""
        self.done = False
        """Whether the last chunk was read; trailers may follow."""

    def feed(self, data: bytes) -> bytes:
        """Return the content in the next piece of the body."""
        parts: list[bytes] = []
        position, size = 0, len(data)
        while position < size and not self.done:
            if self._remaining_bytes:
                taken = min(self._remaining_bytes, size - position)
                content_bytes = max(0, self._remaining_bytes - 2)
                parts.append(data[position : position + min(taken, content_bytes)])
                self._remaining_bytes -= taken
                position += taken
                continue
            end = data.find(b"\n", position)
            if end < 0:
                self._partial_line += data[position:]
                break
            line, self._partial_line = self._partial_line + data[position:end], b""
            length, position = _parse_chunk_size(line), end + 1
            self._remaining_bytes, self.done = length + 2, length == 0
        return b"".join(parts)


def find_chunks(framed: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the offsets (content start, content end, chunk end) of each chunk but the empty last one."""
    position = 0
    while position < len(framed):
        end = framed.find(b"\n", position)
        size = _parse_chunk_size(framed[position:end]) if end >= 0 else 0
        if size == 0:
            return
        start = end + 1
        position = start + size + 2
        yield start, start + size, position


def frame_chunk(content: bytes) -> bytes:
    """Frame `content` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(content), content)
