"""The clock of a simulation: events in the order of their times.

`run` executes them one after another; `instance` and `router` schedule theirs. Events are ordered by (time,
rank, sequence). Ends of engine steps have the lower rank: at equal times they come before everything else, so
that skipping steps and executing them give the same order.
"""

import heapq
import math
from collections import deque
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


Event = tuple[float, int, int, ScheduledAction]
"""Time, rank, sequence and action."""


class EventQueue:
    """Runs actions in virtual time, in seconds from the start of the run.

    Timeouts have queues of their own: nearly all of them are cancelled, and would make the heap many times as
    large meanwhile.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.executed = 0
        """Actions run so far."""
        self._heap: list[Event] = []
        self._timeouts: dict[float, deque[Event]] = {}
        """By delay, each in the order of time."""
        self._sequence = 0

    def schedule(self, at_s: float, action: Callable[[], None], *, rank: int = OTHER) -> ScheduledAction:
        """Run `action` at `at_s`, or now if that has passed."""
        event = ScheduledAction(action)
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), rank, self._sequence, event))
        return event

    def schedule_timeout(self, delay_s: float, action: Callable[[], None]) -> ScheduledAction:
        """Run `action` after `delay_s`. Each distinct delay has a queue of its own: use few of them."""
        event = ScheduledAction(action)
        self._sequence += 1
        queue = self._timeouts.setdefault(delay_s, deque())
        queue.append((self.now_s + delay_s, OTHER, self._sequence, event))
        return event

    def next_event_s(self) -> float:
        """Return the time of the next event; infinite if there is none."""
        event = self._find_next()
        return math.inf if event is None else event[0]

    def run_next(self) -> None:
        """Run the next event.

        Raises:
            IndexError: if there is none.
        """
        event = self._find_next()
        if event is None:
            raise IndexError("no event is scheduled")
        scheduled, self.now_s = event[3], event[0]
        self.executed += 1
        action = scheduled.action
        assert action is not None
        scheduled.action = None  # which removes it
        action()

    def _find_next(self) -> Event | None:
        """Return the next event, and remove those before it that were cancelled or have run."""
        heap = self._heap
        while heap and heap[0][3].action is None:
            heapq.heappop(heap)
        first = heap[0] if heap else None
        for queue in self._timeouts.values():
            while queue and queue[0][3].action is None:
                queue.popleft()
            if queue and (first is None or queue[0] < first):
                first = queue[0]
        return first
