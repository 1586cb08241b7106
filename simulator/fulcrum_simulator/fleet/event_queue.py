"""The clock of a simulation: events in the order of their times.

`run` executes them one after another; `instance` and `router` schedule theirs. Events are ordered by (time,
rank, sequence). Ends of engine steps have the lower rank: at equal times they come before everything else, so
that skipping steps and executing them give the same order.
"""

import heapq
import math
from collections.abc import Callable

STEP_END = 0
"""Rank of the end of an engine step."""
OTHER = 1
"""Rank of all other events."""


class ScheduledAction:
    """One scheduled action; `cancel` removes it."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Do not run the action. No effect after it ran."""
        self.action = None


class EventQueue:
    """Runs actions in virtual time, in seconds from the start of the run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.executed = 0
        """Actions run so far."""
        self._heap: list[tuple[float, int, int, ScheduledAction]] = []
        self._sequence = 0

    def schedule(self, at_s: float, action: Callable[[], None], *, rank: int = OTHER) -> ScheduledAction:
        """Run `action` at `at_s`, or now if that has passed."""
        event = ScheduledAction(action)
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), rank, self._sequence, event))
        return event

    def next_event_s(self) -> float:
        """Return the time of the next event; infinite if there is none."""
        heap = self._heap
        while heap and heap[0][3].action is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def run_next(self) -> None:
        """Run the next event.

        Raises:
            IndexError: if there is none.
        """
        while True:
            at_s, _, _, event = heapq.heappop(self._heap)
            action = event.action
            if action is not None:
                self.now_s = at_s
                self.executed += 1
                event.action = None
                action()
                return
