"""What an exchange is about: a client's request, and the connection that its response goes to."""

from dataclasses import dataclass
from typing import Protocol

from fulcrum_router.counters import RequestOutcome


class Downstream(Protocol):
    """The client's connection."""

    @property
    def paused(self) -> bool:
        """Whether it takes no more for now."""

    def write(self, data: bytes) -> None:
        """Send."""

    def finish_response(self, *, keep_alive: bool) -> None:
        """The exchange is over; without `keep_alive` the connection is to be closed."""


@dataclass(slots=True)  # quicker to make than a frozen one, and to read than a tuple
class ClientRequest:
    """A POST as it came in."""

    path: bytes
    body: bytes
    request_id: bytes
    tier: str | None
    trace_headers: bytes
    """Header lines of the W3C trace context."""
    http_version: bytes
    """Of HTTP, as the engines are asked, too: one who speaks 1.0 understands no chunks."""
    keep_alive: bool

    def build_leg_head(self, address: bytes, body_bytes: int) -> bytes:
        """The head under which an engine gets a body of this length."""
        return (
            b"POST %b HTTP/%b\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        ) % (self.path, self.http_version, address, self.request_id, self.trace_headers, body_bytes)


class EarlyResponse(Exception):
    """The client gets this response, and no more is done for it; without `keep_alive` the connection ends."""

    def __init__(self, outcome: RequestOutcome, response: bytes, *, keep_alive: bool = True) -> None:
        super().__init__(outcome)
        self.outcome, self.response, self.keep_alive = outcome, response, keep_alive
