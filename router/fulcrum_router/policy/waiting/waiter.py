"""What the waiting room asks a request that waits, and what the request answers.

A journey implements `Waiter`. The room decides the order; whether a request can leave now is the journey's.
"""

from collections.abc import Hashable
from enum import Enum
from typing import Protocol


class LeaveResult(Enum):
    """Result of a request's attempt to leave the room."""

    LEFT = "left"
    """An instance took the request at its turn."""
    DEFLECTED = "deflected"
    """A decode instance took the request while no prefill instance could."""
    BLOCKED = "blocked"
    """No instance can take the request now, or only by passing a late one."""
    LATE = "late"
    """No instance would respond in time."""
    LATE_BLOCKED = "late, blocked"
    """The late request waits for a prefill instance; others may be deflected meanwhile."""
    HELD = "held"
    """Decode has no room for the request: other tenants may pass."""
    RESERVED = "reserved"
    """The instances that could take the request are kept for other tiers: others may pass."""


class Waiter(Protocol):
    """A request that can wait."""

    @property
    def arrival_s(self) -> float:
        """When the request arrived at the router."""

    @property
    def deadline_s(self) -> float:
        """When the first byte of its response is due."""

    @property
    def priority(self) -> int:
        """Priority of the request's tier; higher is more important."""

    @property
    def tenant(self) -> str:
        """Tenant that sent the request; empty: not known."""

    @property
    def tier(self) -> str:
        """Name of the request's tier."""

    def try_to_leave(
        self, now_s: float, *, late: bool, held_for_long: bool, due: bool, only_deflected: bool
    ) -> LeaveResult:
        """Call `leave` if an instance can take the request now.

        Args:
            now_s: The time.
            late: Leave even if no instance would respond in time.
            held_for_long: Leave even if decode has no room for the request.
            due: Its level goes before higher ones now.
            only_deflected: A late request waits for a prefill instance, and only deflected ones may pass it.
        """

    def give_way(self) -> None:
        """Call `leave` and fail: the room is full, and a request that goes first takes its place."""

    def give_up(self, now_s: float) -> None:
        """Call `leave` and fail: the request has waited for too long."""

    @property
    def exclusion(self) -> Hashable:
        """The instances that are ruled out for this request: others may pass it; None: no instance is.

        Requests with the same exclusion are blocked together. It does not change while the request waits.
        """
