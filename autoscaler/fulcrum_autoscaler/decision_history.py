"""The last decisions, held ones too, for `/decisions` and `fulcrum explain`.

Flips are rare and holding is not, so they are kept apart: an hour of holding does not push the last flip out.
"""

from collections import deque
from typing import Any

from fulcrum_autoscaler.policy import Action, FlipDecision

_FLIPS_MAX = 200
_OTHERS_MAX = 400


class DecisionHistory:
    """Of one service: a ring of flips (made or advised) and one of all other decisions."""

    def __init__(self) -> None:
        self._recorded = 0
        self._flips: deque[tuple[int, FlipDecision]] = deque(maxlen=_FLIPS_MAX)
        self._others: deque[tuple[int, FlipDecision]] = deque(maxlen=_OTHERS_MAX)

    def record(self, decision: FlipDecision) -> None:
        """Keep one more."""
        self._recorded += 1
        kept = self._flips if decision.action in (Action.FLIP, Action.ADVISE) else self._others
        kept.append((self._recorded, decision))

    def recent(self, limit: int) -> tuple[FlipDecision, ...]:
        """The last `limit` decisions, newest last."""
        ordered = sorted((*self._flips, *self._others), key=lambda numbered: numbered[0])
        return tuple(decision for _, decision in ordered[max(0, len(ordered) - limit) :])


class DecisionHistories:
    """One journal for each service that there is."""

    def __init__(self) -> None:
        self._by_service: dict[tuple[str, str], DecisionHistory] = {}

    def get_or_create(self, namespace: str, service: str) -> DecisionHistory:
        """The journal of a service, a new one at its first mention."""
        return self._by_service.setdefault((namespace, service), DecisionHistory())

    def remove(self, namespace: str, service: str) -> None:
        """The service is gone."""
        self._by_service.pop((namespace, service), None)

    def recent(
        self, limit: int, *, namespace: str | None = None, service: str | None = None
    ) -> list[dict[str, Any]]:
        """The last `limit` decisions on services so named (None: any), newest last, with whose they are."""
        found = [
            {"namespace": of, "service": name, **decision.dump()}
            for (of, name), history in sorted(self._by_service.items())
            if namespace in (None, of) and service in (None, name)
            for decision in history.recent(limit)
        ]
        found.sort(key=lambda entry: entry["at_s"])
        return found[max(0, len(found) - limit) :]
