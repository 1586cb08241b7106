"""The two sides that an exchange joins to engines: the client request, and the connection for its response.

Kept apart from `downstream`, so that the exchange does not depend on how requests are read.
"""

from dataclasses import dataclass
from typing import Protocol

from fulcrum_router.counters import RequestOutcome


class Downstream(Protocol):
    """The client's connection, as an exchange uses it."""

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly: pause reading from the engine."""

    def write(self, data: bytes) -> None:
        """Send bytes to the client."""

    def release_body(self) -> None:
        """Forget the body of the request: no leg can need it again."""

    def finish_response(self, *, keep_alive: bool) -> None:
        """End the exchange; the connection is closed unless `keep_alive` is set."""


@dataclass(slots=True)  # quicker to make than a frozen one, and to read than a tuple
class ClientRequest:
    """A POST to a completion path, as it arrived."""

    path: bytes
    body: bytes
    request_id: bytes
    """The client's `x-request-id`, or one of the router."""
    tier: str | None
    """Value of `x-customer-tier`."""
    trace_headers: bytes
    """Header lines of the W3C trace context."""
    http_version: bytes
    """`1.0` or `1.1`. Legs use the same version, since an HTTP/1.0 client cannot read chunks."""
    keep_alive: bool

    def build_leg_head(self, address: bytes, body_bytes: int) -> bytes:
        """Build the request head of a leg whose body has `body_bytes` bytes."""
        return (
            b"POST %b HTTP/%b\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        ) % (self.path, self.http_version, address, self.request_id, self.trace_headers, body_bytes)


class EarlyResponse(Exception):
    """Ends the exchange with this response; the connection closes unless `keep_alive` is set."""

    def __init__(self, outcome: RequestOutcome, response: bytes, *, keep_alive: bool = True) -> None:
        super().__init__(outcome)
        self.outcome, self.response, self.keep_alive = outcome, response, keep_alive
