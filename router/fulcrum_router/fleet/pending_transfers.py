"""Hand-offs that a decode instance was given and has not answered: what it may yet fetch too late.

What is fetched too late is another prompt's KV, and the engine's prefix cache keeps it under the right
prompt's hash before its own answer tells anybody. So whatever else that instance says meanwhile is in doubt,
too. An engine that answers what it was sent later has fetched the hand-off, or prolongs its lease.
"""

import math
from typing import Generic, Protocol, TypeVar

SENT_APART_S = 1.0
"""Of two requests that are sent so far apart an engine has the first one no later than the second."""
_PROLONGED = 1 / 2
"""Of the lease: for so long it lasts from an answer on, a heartbeat being 1/6 old and worth 2/3."""


class Open(Protocol):
    """A hand-off. Times are seconds of one clock."""

    @property
    def sent_s(self) -> float:
        """When decode was given it."""

    @property
    def deadline_s(self) -> float:
        """Until when it is fetched in time."""

    @property
    def lease_s(self) -> float:
        """Of its giver."""


T = TypeVar("T", bound=Open)


class Awaited(Generic[T]):
    """Those of one decode instance."""

    __slots__ = ("_answered_s", "_due_s", "_open", "_sent_s")

    def __init__(self) -> None:
        self._open: set[T] = set()
        self._due_s = math.inf
        """None is overdue before."""
        self._sent_s = self._answered_s = -math.inf

    def add(self, handed: T) -> None:
        """It is sent."""
        self._open.add(handed)
        self._due_s = min(self._due_s, handed.deadline_s)

    def discard(self, handed: T) -> None:
        """It is answered, or not waited for any more."""
        self._open.discard(handed)

    def clear(self) -> None:
        """What these may leave behind will not be used."""
        self._open.clear()

    def answered(self, *, sent_s: float, now_s: float) -> None:
        """A request that was sent then has its first token now."""
        if sent_s > self._sent_s:
            self._sent_s, self._answered_s = sent_s, now_s

    def overdue(self, now_s: float) -> list[T]:
        """Those that may have been fetched too late by now."""
        if now_s <= self._due_s:
            return []
        until_s = {handed: self._until_s(handed) for handed in self._open}
        self._due_s = min(until_s.values(), default=math.inf)
        return [handed for handed, due_s in until_s.items() if now_s > due_s]

    def _until_s(self, handed: T) -> float:
        if handed.sent_s + SENT_APART_S > self._sent_s:
            return handed.deadline_s
        return max(handed.deadline_s, self._answered_s + _PROLONGED * handed.lease_s)
