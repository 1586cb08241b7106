"""When an instance is left out because it fails, and when it is tried again."""

EJECT_AFTER_FAILURES = 3
"""Failures in a row that eject an instance; without a connection one is enough, since nobody is there."""
FIRST_PROBE_DELAY_S = 0.25
MAX_PROBE_DELAY_S = 2.0


class Health:
    """The record of one endpoint. Times are monotonic seconds of the caller's."""

    __slots__ = ("_backoff_s", "ejected", "failures", "probe_at_s", "unresponsive_since_s")

    def __init__(self) -> None:
        self.failures = 0
        self.ejected = False
        self.unresponsive_since_s: float | None = None
        """Since when it is ejected for its silence: then whoever waits for it waits in vain."""
        self.probe_at_s = 0.0
        self._backoff_s = FIRST_PROBE_DELAY_S

    def record_failure(self, now_s: float, *, eject_now: bool = False, unresponsive: bool = False) -> bool:
        """Count a failure, by silence if `unresponsive`; True if it ejects the instance now."""
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
        """A leg or a probe was answered; True if that brings the instance back."""
        self.failures = 0
        self.unresponsive_since_s = None
        back, self.ejected = self.ejected, False
        return back

    def record_failed_probe(self, now_s: float, *, unresponsive: bool = False) -> None:
        """Still dead: ask again after twice the time."""
        if unresponsive and self.unresponsive_since_s is None:
            self.unresponsive_since_s = now_s
        self._backoff_s = min(MAX_PROBE_DELAY_S, 2 * self._backoff_s)
        self.probe_at_s = now_s + self._backoff_s
