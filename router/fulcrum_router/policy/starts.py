"""Engines that start, and when they will serve: what admission may count on while a scale-out is under way.

A start is expected to take as long as the longest of the last ones of its pool. One of which nothing is
known, or that takes longer than expected, is not counted: a request must not wait for a pod that may never
come. `observe.objects` tells what starts; `JourneyContext` asks what is coming for each forecast.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from fulcrum_core.values import Role

KNOWN_STARTS = 8
"""Starts of a pool that are remembered."""


class ComingInstance(NamedTuple):
    """An instance that is expected to serve."""

    in_s: float
    """From now, in seconds."""
    role: Role


class _Start(NamedTuple):
    pool: str
    role: Role
    since_s: float


class EngineStarts:
    """The starts of one service. Times are seconds of the caller's clock."""

    __slots__ = ("_durations_s", "_under_way")

    def __init__(self) -> None:
        self._under_way: dict[str, _Start] = {}
        """By name of the instance."""
        self._durations_s: dict[str, deque[float]] = {}
        """By pool."""

    def begin(self, name: str, *, pool: str, role: Role, since_s: float) -> None:
        """An engine starts, in this role; called again while it does, which may change the role."""
        self._under_way[name] = _Start(pool, role, since_s)

    def end(self, name: str, now_s: float) -> None:
        """An instance serves; no effect if its start was not seen."""
        start = self._under_way.pop(name, None)
        if start is not None:
            self.learn(start.pool, now_s - start.since_s)

    def learn(self, pool: str, duration_s: float) -> None:
        """Learn how long a start of a pool took, in seconds."""
        self._durations_s.setdefault(pool, deque(maxlen=KNOWN_STARTS)).append(duration_s)

    def give_up(self, name: str) -> None:
        """An instance will not serve soon: it failed, is stopped or waits for something."""
        self._under_way.pop(name, None)

    def keep_only(self, pools: Mapping[str, str]) -> None:
        """Forget all but these instances, with their pools: the others are gone."""
        for name in self._under_way.keys() - pools.keys():
            del self._under_way[name]
        for pool in self._durations_s.keys() - set(pools.values()):
            del self._durations_s[pool]

    def list_coming(self, now_s: float) -> tuple[ComingInstance, ...]:
        """The instances that are expected to serve, the first one first."""
        if not self._under_way:  # the usual case
            return ()
        coming = (
            ComingInstance(start.since_s + max(durations_s) - now_s, start.role)
            for start in self._under_way.values()
            if (durations_s := self._durations_s.get(start.pool))
        )
        return tuple(sorted(one for one in coming if one.in_s > 0.0))
