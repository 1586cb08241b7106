"""What an exchange is about: a client's request, and the connection that its answer goes to."""

from dataclasses import dataclass
from typing import Protocol

from fulcrum_router.counters import Outcome


class Client(Protocol):
    """The client's connection."""

    @property
    def paused(self) -> bool:
        """Whether it takes no more for now."""

    def write(self, data: bytes) -> None:
        """Send."""

    def answered(self, *, keep: bool) -> None:
        """The exchange is over; without `keep` the connection is to be closed."""


@dataclass(slots=True)  # quicker to make than a frozen one, and to read than a tuple
class Call:
    """A POST as it came in."""

    path: bytes
    body: bytes
    request_id: bytes
    tier: str | None
    trace: bytes
    """Header lines of the W3C trace context."""
    version: bytes
    """Of HTTP, as the engines are asked, too: one who speaks 1.0 understands no chunks."""
    keep_alive: bool

    def leg_head(self, address: bytes, length: int) -> bytes:
        """The head under which an engine gets a body of this length."""
        return (
            b"POST %b HTTP/%b\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        ) % (self.path, self.version, address, self.request_id, self.trace, length)


class Answered(Exception):
    """The client gets this answer, and no more is done for it; without `keep` the connection ends."""

    def __init__(self, outcome: Outcome, answer: bytes, *, keep: bool = True) -> None:
        super().__init__(outcome)
        self.outcome, self.answer, self.keep = outcome, answer, keep
