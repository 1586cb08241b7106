"""What an exchange is about: a client's request, and the connection that its answer goes to."""

from dataclasses import dataclass
from typing import Protocol


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
    request_id: bytes | None
    tier: str | None
    trace: bytes
    """Header lines of the W3C trace context."""
    version: bytes
    """Of HTTP, as the engines are asked, too: one who speaks 1.0 understands no chunks."""
    keep_alive: bool
