"""The random factors of step durations, in the order of the steps. `engine` uses it.

A look-ahead reads factors before their steps start. They are kept, so that each step gets the same factor as
without a look-ahead.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice


class StepFactors:
    """Source of one factor for each step; always 1 without a function that draws them."""

    def __init__(self, draw: Callable[[], float] | None) -> None:
        self._draw = draw
        self._ahead: deque[float] = deque()

    def take(self) -> float:
        """Return the factor of the next step."""
        if self._draw is None:
            return 1.0
        return self._ahead.popleft() if self._ahead else self._draw()

    def peek(self, count: int) -> Sequence[float]:
        """Return the factors of the next `count` steps, which stay the next ones."""
        if self._draw is None:
            return [1.0] * count
        while len(self._ahead) < count:
            self._ahead.append(self._draw())
        return list(islice(self._ahead, count))

    def skip(self, count: int) -> None:
        """Pass over the factors of `count` steps."""
        if self._draw is not None:
            for _ in range(count):
                self.take()
