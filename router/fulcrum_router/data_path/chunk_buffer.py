"""Assemble the chunks of a stream, so that an error event can follow any byte that was forwarded.

`decode_response` puts in what it reads and forwards what it takes out. A chunk that is too large to hold back
is passed on in pieces; until its end no event can be inserted.
"""

MAX_BUFFERED_CHUNK_BYTES = 65_536
"""A chunk up to this size is forwarded only when it is complete."""
MAX_REWRITTEN_CHUNK_BYTES = 524_288
"""The same of a stream whose chunks are written again: ids of the prompt that an engine returns take up to
seven bytes for each byte of its text.
"""


class ChunkBuffer:
    """The received bytes of one stream that are not forwarded yet.

    Args:
        rewritten: Whether its chunks are written again, as those of a continued stream.
    """

    __slots__ = ("_max_bytes", "held", "mid_chunk", "starts_mid_chunk")

    def __init__(self, *, rewritten: bool = False) -> None:
        self._max_bytes = MAX_REWRITTEN_CHUNK_BYTES if rewritten else MAX_BUFFERED_CHUNK_BYTES
        self.held = b""
        """Chunks before the first token, and the beginning of a chunk."""
        self.mid_chunk = False
        """Whether part of a chunk was passed on: no event can be inserted, and no event is whole."""
        self.starts_mid_chunk = False
        """Whether the bytes that `take` returned last begin with the rest of such a chunk."""

    def take(self, data: bytes, boundary: int) -> bytes:
        """Add bytes whose last whole chunk ends at `boundary`; return those that can be forwarded."""
        if boundary == len(data):
            if self.held or self.mid_chunk or self.starts_mid_chunk:
                self.starts_mid_chunk = self.mid_chunk
                data, self.held, self.mid_chunk = self.held + data, b"", False
            return data
        self.starts_mid_chunk = self.mid_chunk
        if boundary:
            ready, self.held, self.mid_chunk = self.held + data[:boundary], data[boundary:], False
            return ready
        self.held += data
        if len(self.held) <= self._max_bytes:
            return b""
        ready, self.held, self.mid_chunk = self.held, b"", True
        return ready

    def put_back(self, chunks: bytes) -> bool:
        """Hold chunks back that were taken and not forwarded; False: they are too many."""
        self.held = chunks + self.held
        return len(self.held) <= self._max_bytes


NO_CHUNKS = ChunkBuffer()
"""Buffer of a response that is not a stream: it always stays empty."""


def find_chunk_start(data: bytes, position: int) -> int:
    """The offset of the chunk whose first event is the last one before `position`; text has no line ends."""
    end = start = data.rfind(b"\r\ndata:", 0, position)
    while start > 0 and data[start - 1] in b"0123456789abcdefABCDEF":
        start -= 1
    return start if start < end else len(data)
