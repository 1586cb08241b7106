"""Retry budget of one router: retries are at most a share of its requests, whatever fails.

Without it, retries would multiply the load of a service just when its engines fail. The journey takes each
retry from it, and gives the request up or lets decode compute the prompt if nothing is left.
"""

SHARE = 0.2
"""Retries allowed for each request of the window."""
FLOOR = 10
"""Retries allowed in a window in addition to that share, for a service with few requests."""
WINDOW_S = 10


class RetryBudget:
    """Counts requests and retries of the last ten seconds, in steps of one second of the caller's clock."""

    __slots__ = (
        "_floor",
        "_next_second_s",
        "_requests",
        "_retries",
        "_second",
        "_share",
        "requests",
        "retries",
    )

    def __init__(self, *, share: float = SHARE, floor: int = FLOOR) -> None:
        self._share, self._floor = share, floor
        self._second = self._next_second_s = 0
        self._requests, self._retries = [0] * WINDOW_S, [0] * WINDOW_S
        self.requests = self.retries = 0
        """Sums over the window."""

    def record_request(self, now_s: float) -> None:
        """Count a request that arrived at `now_s`."""
        if now_s >= self._next_second_s:
            self._advance(int(now_s))
        self._requests[self._second % WINDOW_S] += 1
        self.requests += 1

    def take_retry(self, now_s: float) -> bool:
        """Count a retry at `now_s`, or return False if the budget of the window is used up."""
        if now_s >= self._next_second_s:
            self._advance(int(now_s))
        if self.retries + 1 > self._floor + self._share * self.requests:
            return False
        self._retries[self._second % WINDOW_S] += 1
        self.retries += 1
        return True

    def _advance(self, second: int) -> None:
        """Drop the seconds that have left the window."""
        for passed in range(self._second + 1, min(second, self._second + WINDOW_S) + 1):
            slot = passed % WINDOW_S
            self.requests -= self._requests[slot]
            self.retries -= self._retries[slot]
            self._requests[slot] = self._retries[slot] = 0
        self._second, self._next_second_s = second, second + 1
