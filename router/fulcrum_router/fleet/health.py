"""Ejection of failing instances: when one gets no more requests, and when it is probed again.

Two kinds of ejection. An engine that does not answer at all is *gone*: it comes back as soon as a probe
succeeds. An engine that answers, but fails its legs or is far slower than its peers, is ejected *by
judgement*: its probes may succeed all the time, so it stays out for a time that grows with each ejection, as
in Envoy.

Each `Instance` has one. Pure state: the data path and the prober record what happened, and
`Instance.update_serving` reads `ejected`. Who is to blame for a failure is decided before, in
`policy.faults.blame`.
"""

import math

EJECT_AFTER_FAILURES = 3
"""Consecutive failures that eject an instance; the caller ejects at once where no connection is possible."""
FIRST_PROBE_DELAY_S = 0.25
MAX_PROBE_DELAY_S = 2.0
BASE_EJECTION_S, MAX_EJECTION_S = 5.0, 300.0
"""Duration of the first ejection by judgement, to be multiplied by the number of ejections; its limit."""
FORGIVE_AFTER_S = 60.0
"""Time without an ejection after which one ejection is forgotten."""
SAME_END_S = 0.1
"""Connections that an engine closes at most this far apart are closed for one reason."""
MAX_END_S = 1.0
"""Longest time for which they are. An engine that lives and closes all its connections goes on for longer."""
MAX_REJECTIONS = 3
"""Requests rejected with 4xx in a row, after which another engine is asked about the next one."""
DOUBT_INTERVAL_S = 0.25
"""Shortest time between two requests that another engine is asked about."""
_ERROR_WEIGHT = 0.1
"""Weight of one leg in `error_share`."""
_ERROR_DECAY = 0.8
"""Part of `error_share` that is left after one probe interval."""
_NO_ERRORS = 0.01


class Health:
    """Failures of one endpoint. Times are monotonic seconds, given by the caller."""

    __slots__ = (
        "_backoff_s",
        "_closed_at_s",
        "_closes_since_s",
        "_doubt_at_s",
        "_ejected_until_s",
        "_ejections",
        "_forgive_at_s",
        "answered",
        "ejected",
        "error_share",
        "failed",
        "failures",
        "judged",
        "probe_at_s",
        "rejections",
        "unresponsive_since_s",
    )

    def __init__(self) -> None:
        self.failures = 0
        """Consecutive failures."""
        self.answered = self.failed = 0
        """Legs since the last judgement of outliers."""
        self.rejections = 0
        """Requests in a row that the engine rejected with 4xx."""
        self._doubt_at_s = -math.inf
        self.error_share = 0.0
        """Recent share of failed legs, load included: dispatch prefers instances without."""
        self.ejected = self.judged = False
        """Whether the instance is ejected, and whether by judgement."""
        self.unresponsive_since_s: float | None = None
        """Time since which the instance sends nothing; requests that wait for it are then moved or failed."""
        self.probe_at_s = 0.0
        self._backoff_s = FIRST_PROBE_DELAY_S
        self._ejected_until_s = self._forgive_at_s = 0.0
        self._ejections = 0
        self._closed_at_s = self._closes_since_s = -math.inf

    def record_error(self) -> None:
        """Count a failed leg that is no evidence of sickness: dispatch prefers others for a while."""
        self.error_share += _ERROR_WEIGHT * (1.0 - self.error_share)

    def doubts_rejection(self, now_s: float) -> bool:
        """Whether to ask another engine about a request that this one rejects: it rejects all of them."""
        if self.rejections < MAX_REJECTIONS or now_s < self._doubt_at_s:
            return False
        self._doubt_at_s = now_s + DOUBT_INTERVAL_S
        return True

    def record_failure(self, *, now_s: float, unresponsive: bool = False, closed: bool = False) -> bool:
        """Count a failure; return whether it is one too many.

        Args:
            now_s: Time of the failure.
            unresponsive: Whether nothing was received.
            closed: Whether the engine closed the connection. An engine that ends closes all at once, which
                counts as one failure: it may be back, and well, in a moment.
        """
        if closed:
            closed_at_s, self._closed_at_s = self._closed_at_s, now_s
            if now_s - closed_at_s < SAME_END_S and now_s - self._closes_since_s < MAX_END_S:
                return False
            self._closes_since_s = now_s
        self.failures += 1
        self.failed += 1
        self.record_error()
        too_many = self.failures >= EJECT_AFTER_FAILURES or self.ejected
        if unresponsive and too_many and self.unresponsive_since_s is None:
            self.unresponsive_since_s = now_s
        return too_many and not self.ejected

    def eject(self, *, now_s: float, judged: bool, unresponsive: bool = False) -> bool:
        """Eject the instance; return False if it is ejected already.

        An instance that was ejected by judgement and is gone now is readmitted like any that is gone.
        """
        if unresponsive and self.unresponsive_since_s is None:
            self.unresponsive_since_s = now_s
        if self.ejected:
            if self.judged and not judged:  # its engine is gone now, and it returns with its engine
                self.judged, self.probe_at_s = False, now_s + self._backoff_s
            return False
        self.ejected, self.judged = True, judged
        self._backoff_s = FIRST_PROBE_DELAY_S
        self.probe_at_s = now_s + self._backoff_s
        if judged:
            self._ejections += 1
            self._ejected_until_s = now_s + min(MAX_EJECTION_S, BASE_EJECTION_S * self._ejections)
            self._forgive_at_s = self._ejected_until_s + FORGIVE_AFTER_S
            self.probe_at_s = self._ejected_until_s
        return True

    def record_success(self) -> bool:
        """Record the response of a leg; return True if that readmits the instance.

        An instance that was ejected by judgement is readmitted by a probe only, after its time.
        """
        self.failures = self.rejections = 0
        self.error_share = _drop_tiny((1.0 - _ERROR_WEIGHT) * self.error_share)
        self.unresponsive_since_s = None
        if not self.ejected or self.judged:
            return False
        self.ejected = False
        return True

    def record_probe(self, *, now_s: float) -> bool:
        """Record a successful probe; return True if that readmits the instance."""
        self.unresponsive_since_s = None
        if not self.ejected or (self.judged and now_s < self._ejected_until_s):
            return False
        self.failures = self.answered = self.failed = self.rejections = 0
        self.error_share = 0.0
        self.ejected = self.judged = False
        return True

    def record_failed_probe(self, now_s: float, *, unresponsive: bool = False) -> None:
        """Double the time to the next probe, up to `MAX_PROBE_DELAY_S`.

        A leg may have readmitted the instance since the probe was sent.
        """
        if unresponsive and self.ejected and self.unresponsive_since_s is None:
            self.unresponsive_since_s = now_s
        self._backoff_s = min(MAX_PROBE_DELAY_S, 2 * self._backoff_s)
        self.probe_at_s = now_s + self._backoff_s

    def decay(self, now_s: float) -> None:
        """Forget a part of old errors, and ejections long ago; called once each probe interval.

        Dispatch may send nothing to an instance with errors, so that only time can end them.
        """
        if self.error_share:
            self.error_share = _drop_tiny(_ERROR_DECAY * self.error_share)
        if self._ejections and not self.ejected and now_s >= self._forgive_at_s:
            self._ejections -= 1
            self._forgive_at_s = now_s + FORGIVE_AFTER_S


def _drop_tiny(error_share: float) -> float:
    return error_share if error_share >= _NO_ERRORS else 0.0
