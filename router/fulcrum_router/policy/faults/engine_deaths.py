"""Engines that died in the last seconds, of all requests: what the journey's rule on queries of death reads.

If many die, a request can lose two of them by chance: it may lose more before it is a query of death. The
deaths of engines without legs count, too. Only probes and refused connections show those. Ejecting an
instance is not decided here.
"""

WINDOW_S = 10.0
SAME_END_S = 0.1
"""Legs of one instance that end at most this far apart end by one death."""
_MAX_DEATHS = 256
"""Deaths that are remembered at most, the last ones."""


class EngineDeaths:
    """The deaths of the last ten seconds, in seconds of the caller's clock."""

    __slots__ = ("_deaths",)

    def __init__(self) -> None:
        self._deaths: list[tuple[float, str]] = []

    def record(self, instance: str, now_s: float) -> None:
        """Record that a leg on `instance` ended with its engine."""
        deaths = self._deaths
        if any(name == instance and now_s - at_s < SAME_END_S for at_s, name in deaths[-16:]):
            return
        self._add(instance, now_s)

    def record_found(self, instance: str, *, since_s: float, now_s: float) -> None:
        """Record that the engine of `instance` has died since `since_s`, unless that is known."""
        if not any(name == instance and at_s >= since_s for at_s, name in self._deaths):
            self._add(instance, now_s)

    def _add(self, instance: str, now_s: float) -> None:
        deaths = self._deaths
        deaths.append((now_s, instance))
        if len(deaths) > _MAX_DEATHS or now_s - deaths[0][0] > WINDOW_S:
            self._deaths = [death for death in deaths if now_s - death[0] <= WINDOW_S][-_MAX_DEATHS:]

    def count(self, now_s: float) -> int:
        """Count the deaths of the window, those of one instance at different times too."""
        return sum(now_s - at_s <= WINDOW_S for at_s, _ in self._deaths)
