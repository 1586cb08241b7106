"""When refused requests may come back: one after another, as if they waited in a queue.

If all that are refused in a burst were asked to come back when its work is done, they would be the next
burst, and most of them would be refused again. So each is asked to come back after the others that were
refused before it, at a rate that leaves most of the fleet to new requests. `JourneyContext` adds the wait to
Retry-After. Only the sum of the refused work is kept, and it shrinks with time: whether a client does come
back is not known. `Admission` has one.
"""

SHARE = 0.3
"""Share of the prefill instances that those who come back are to fill."""


class ReturnQueue:
    """The refused work that is expected to come back. Times are seconds of the caller's clock."""

    __slots__ = ("_at_s", "_work_s")

    def __init__(self) -> None:
        self._work_s = self._at_s = 0.0

    def join(self, work_s: float, now_s: float, *, instances: int) -> float:
        """Add a refused request that takes `work_s` of one instance; returns the time until its turn."""
        rate = SHARE * max(1, instances)
        self._work_s = max(0.0, self._work_s - rate * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        wait_s = self._work_s / rate
        self._work_s += work_s
        return wait_s
