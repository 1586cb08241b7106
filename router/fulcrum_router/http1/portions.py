"""Checks many objects a few at a time, each as often as the others: all at once would stop the event loop.

`downstream` takes the next clients from it, and a connection pool its next busy connections, to enforce
time-outs.
"""

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")

MIN_AT_ONCE = 128
"""So many objects are one portion."""
PORTIONS = 10
"""More objects are as many portions."""


class Portions(Generic[T]):
    """Gives one portion at a time, until each object was in one; then begins anew."""

    __slots__ = ("_left", "_size")

    def __init__(self) -> None:
        self._left: list[T] = []
        self._size = MIN_AT_ONCE

    def take(self, objects: Collection[T]) -> list[T]:
        """Take the next portion. Some of it may not be among `objects` any more."""
        if not self._left:
            self._left = list(objects)
            self._size = max(MIN_AT_ONCE, -(-len(objects) // PORTIONS))
        taken = self._left[-self._size :]
        del self._left[-self._size :]
        return taken
