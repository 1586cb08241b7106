"""How long requests take compared with their forecast, so that only those are refused that would be late.

A forecast errs, by 10 % where a queue waits. Requests that are refused because of a forecast just above the
objective would meet it half of the time. So a forecast is multiplied by a low quantile of measured / forecast
TTFT over recent requests: what remains above the objective then is late with the share of the others. A
forecast is never made longer: the window remembers earlier bursts, whose errors may have been others.
`Admission` has one; the journey lets it learn when a first byte is sent.
"""

from bisect import bisect_left, insort
from collections import deque

QUANTILE = 0.2
"""Share of the requests that take less than the corrected forecast."""
WINDOW = 128
"""Requests that count."""
MIN_SAMPLES = 16
"""Requests before which the errors are not known."""
UNKNOWN_FACTOR = 0.9
"""Correction until then: models and steps of engines have not been learned yet, either."""
NEAR = 0.5, 1.5
"""Forecasts that count, by the TTFT objective: the error of others is another one."""
_LEAST, _MOST = 0.5, 1.0
"""Bounds of the correction: an engine that stalls must not open admission."""


class ForecastErrors:
    """The errors of the last forecasts of one service."""

    __slots__ = ("_ratios", "_sorted")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []

    def learn(self, *, forecast_s: float, measured_s: float, objective_s: float) -> None:
        """Learn from the first token of a request: TTFT forecast when it arrived, and measured.

        Forecasts far from the objective (`NEAR`) are ignored.
        """
        low, high = NEAR
        if not low * objective_s <= forecast_s <= high * objective_s or not measured_s > 0:
            return
        if len(self._ratios) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._ratios.popleft())]
        ratio = measured_s / forecast_s
        self._ratios.append(ratio)
        insort(self._sorted, ratio)

    @property
    def factor(self) -> float:
        """By what a forecast is multiplied."""
        count = len(self._sorted)
        if count < MIN_SAMPLES:
            return UNKNOWN_FACTOR
        return min(_MOST, max(_LEAST, self._sorted[int(QUANTILE * count)]))
