"""Limits of one router over all its clients: bytes of requests that are held, and open connections.

The limits of one request and of one connection are `http1.requests`'s and `downstream`'s.
"""

import resource
from typing import Final

MAX_HELD_BYTES: Final = 512 * 1024 * 1024
"""Bodies and unread bytes of all clients. A body is held until no leg can need it again."""
LARGE_SHARE: Final = 0.75
"""Share of `MAX_HELD_BYTES` that large bodies may take: clients that send them slowly leave some room."""
LARGE_BODY_BYTES: Final = 65_536
MAX_CONNECTIONS: Final = 16_384
_RESERVED_FILES: Final = 256
"""Open files that are not connections of requests."""


class RequestMemory:
    """Counts the bytes of requests that the router holds."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.max_bytes, self.held_bytes = max_bytes, 0

    def hold(self, size: int, *, body_bytes: int) -> bool:
        """Count `size` bytes more, of a body that has `body_bytes` so far with them.

        False, and nothing is counted, if that exceeds the limit.
        """
        held_bytes = self.held_bytes + size
        share = 1.0 if body_bytes <= LARGE_BODY_BYTES else LARGE_SHARE
        if held_bytes > self.max_bytes * share:
            return False
        self.held_bytes = held_bytes
        return True

    @property
    def is_full(self) -> bool:
        """Whether no more bytes should be read from clients that wait for a response."""
        return self.held_bytes >= self.max_bytes

    def release(self, size: int) -> None:
        """Count `size` bytes less."""
        self.held_bytes -= size


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it, up to what `MAX_CONNECTIONS` needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MAX_CONNECTIONS + _RESERVED_FILES
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def find_max_connections() -> int:
    """Connections of clients that the limit of open files allows: each may need one to an engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, (soft - _RESERVED_FILES) // 2))
