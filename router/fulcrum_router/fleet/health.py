"""Ejection of failing instances: when one gets no more requests, and when it is probed again.

Pure state; the data path and the prober record what happened, `Instance.update_serving` reads `ejected`.
"""

EJECT_AFTER_FAILURES = 3
"""Consecutive failures that eject an instance; the caller ejects at once where no connection is possible."""
FIRST_PROBE_DELAY_S = 0.25
MAX_PROBE_DELAY_S = 2.0


class Health:
    """Failures of one endpoint. Times are monotonic seconds, given by the caller."""

    __slots__ = ("_backoff_s", "ejected", "failures", "probe_at_s", "unresponsive_since_s")

    def __init__(self) -> None:
        self.failures = 0
        self.ejected = False
        self.unresponsive_since_s: float | None = None
        """Time since which the instance sends nothing; requests that wait for it are then moved or failed."""
        self.probe_at_s = 0.0
        self._backoff_s = FIRST_PROBE_DELAY_S

    def record_failure(self, now_s: float, *, eject_now: bool = False, unresponsive: bool = False) -> bool:
        """Count a failure (`unresponsive`: nothing was received); return True if it ejects the instance."""
        self.failures += 1
        if self.failures < EJECT_AFTER_FAILURES and not eject_now and not self.ejected:
            return False
        if unresponsive and self.unresponsive_since_s is None:
            self.unresponsive_since_s = now_s
        if self.ejected:
            return False
        self.ejected = True
        self._backoff_s = FIRST_PROBE_DELAY_S
        self.probe_at_s = now_s + self._backoff_s
        return True

    def record_success(self) -> bool:
        """Reset the failures after a response; return True if that readmits the instance."""
        self.failures = 0
        self.unresponsive_since_s = None
        was_ejected, self.ejected = self.ejected, False
        return was_ejected

    def record_failed_probe(self, now_s: float, *, unresponsive: bool = False) -> None:
        """Double the time to the next probe, up to `MAX_PROBE_DELAY_S`."""
        if unresponsive and self.unresponsive_since_s is None:
            self.unresponsive_since_s = now_s
        self._backoff_s = min(MAX_PROBE_DELAY_S, 2 * self._backoff_s)
        self.probe_at_s = now_s + self._backoff_s
