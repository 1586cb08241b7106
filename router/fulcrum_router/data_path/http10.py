"""Responses for clients that speak HTTP/1.0, as a proxy in front may (nginx does by default): without chunks.

Engines are sent HTTP/1.1 requests for them, too, so that the same rules hold for their streams. The end of a
response without a length is the end of the connection.

`downstream` puts it between such a client and the exchange, which sends the same bytes to every client.
"""

import re

from fulcrum_router.data_path.request import Downstream
from fulcrum_router.http1.framing import ChunkDecoder

_CHUNKED_LINE = re.compile(rb"^transfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE | re.MULTILINE)


class UnchunkedDownstream:
    """A `Downstream` that takes the chunks out of the response and closes the connection after it."""

    __slots__ = ("_decoder", "_downstream", "_has_head")

    def __init__(self, downstream: Downstream) -> None:
        self._downstream = downstream
        self._has_head = False
        self._decoder: ChunkDecoder | None = None

    @property
    def paused(self) -> bool:
        """See `Downstream`."""
        return self._downstream.paused

    def write(self, data: bytes) -> None:
        """See `Downstream`. The first bytes hold the whole head."""
        if not self._has_head:
            self._has_head = True
            head_bytes = data.index(b"\r\n\r\n") + 4
            line = _CHUNKED_LINE.search(data, 0, head_bytes)
            if line is not None:
                self._decoder = ChunkDecoder()
                head = data[: line.start()] + data[line.end() : head_bytes]
                data = head + self._decoder.feed(data[head_bytes:])
        elif self._decoder is not None:
            data = self._decoder.feed(data)
        if data:
            self._downstream.write(data)

    def release_body(self) -> None:
        """See `Downstream`."""
        self._downstream.release_body()

    def finish_response(self, *, keep_alive: bool) -> None:  # noqa: ARG002  # Downstream's signature
        """See `Downstream`."""
        self._downstream.finish_response(keep_alive=False)
