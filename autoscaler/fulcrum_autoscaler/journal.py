"""The last decisions, held ones too, for `/decisions` and `fulcrum explain`.

Flips are rare and holding is not, so they are kept apart: an hour of holding does not push the last flip out.
"""

from collections import deque
from typing import Any

from fulcrum_autoscaler.policy import Action, Decision

_FLIPS_KEPT = 200
_OTHERS_KEPT = 400


class Journal:
    """Of one service: a ring of flips (made or advised) and one of all other decisions."""

    def __init__(self) -> None:
        self._count = 0
        self._flips: deque[tuple[int, Decision]] = deque(maxlen=_FLIPS_KEPT)
        self._others: deque[tuple[int, Decision]] = deque(maxlen=_OTHERS_KEPT)

    def record(self, decision: Decision) -> None:
        """Keep one more."""
        self._count += 1
        kept = self._flips if decision.action in (Action.FLIP, Action.ADVISE) else self._others
        kept.append((self._count, decision))

    def recent(self, limit: int) -> tuple[Decision, ...]:
        """The last `limit` decisions, newest last."""
        ordered = sorted((*self._flips, *self._others), key=lambda numbered: numbered[0])
        return tuple(decision for _, decision in ordered[max(0, len(ordered) - limit) :])


class Journals:
    """One journal for each service that there is."""

    def __init__(self) -> None:
        self._by_service: dict[tuple[str, str], Journal] = {}

    def open(self, namespace: str, service: str) -> Journal:
        """The journal of a service, a new one at its first mention."""
        return self._by_service.setdefault((namespace, service), Journal())

    def close(self, namespace: str, service: str) -> None:
        """The service is gone."""
        self._by_service.pop((namespace, service), None)

    def recent(
        self, limit: int, *, namespace: str | None = None, service: str | None = None
    ) -> list[dict[str, Any]]:
        """The last `limit` decisions on services so named (None: any), newest last, with whose they are."""
        found = [
            {"namespace": of, "service": name, **decision.dump()}
            for (of, name), journal in sorted(self._by_service.items())
            if namespace in (None, of) and service in (None, name)
            for decision in journal.recent(limit)
        ]
        found.sort(key=lambda told: told["at_s"])
        return found[max(0, len(found) - limit) :]
