"""The most recent decisions of each service, for `/decisions` and `fulcrum explain`; lost on restart.

Flips are rare and all other decisions frequent. Each kind has its own ring, so that an hour of "hold"
decisions does not displace the last flip. `loop` records every decision; the policies never read it.
"""

from collections import deque
from typing import Any

from fulcrum_autoscaler.policy import DecisionAction, FlipDecision

_FLIPS_MAX = 200
"""Flips (made or advised) kept for each service."""
_OTHERS_MAX = 400
"""Other decisions kept for each service."""


class DecisionHistory:
    """The recent decisions of one service, in two rings: flips (made or advised), and all others."""

    def __init__(self) -> None:
        self._recorded = 0
        self._flips: deque[tuple[int, FlipDecision]] = deque(maxlen=_FLIPS_MAX)
        self._others: deque[tuple[int, FlipDecision]] = deque(maxlen=_OTHERS_MAX)

    def record(self, decision: FlipDecision) -> None:
        """Append a decision; the oldest one of its ring is dropped when the ring is full."""
        self._recorded += 1
        ring = (
            self._flips if decision.action in (DecisionAction.FLIP, DecisionAction.ADVISE) else self._others
        )
        ring.append((self._recorded, decision))

    def recent(self, limit: int) -> tuple[FlipDecision, ...]:
        """Return the last `limit` decisions, newest last."""
        ordered = sorted((*self._flips, *self._others), key=lambda numbered: numbered[0])
        return tuple(decision for _, decision in ordered[max(0, len(ordered) - limit) :])


class DecisionHistories:
    """The decision history of every service that the autoscaler manages."""

    def __init__(self) -> None:
        self._by_service: dict[tuple[str, str], DecisionHistory] = {}

    def get_or_create(self, namespace: str, service: str) -> DecisionHistory:
        """Return the history of a service; an empty one is created at the first call."""
        return self._by_service.setdefault((namespace, service), DecisionHistory())

    def remove(self, namespace: str, service: str) -> None:
        """Delete the history of a service that was deleted."""
        self._by_service.pop((namespace, service), None)

    def recent(
        self, limit: int, *, namespace: str | None = None, service: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the last `limit` decisions, newest last, each with its `namespace` and `service`.

        A `namespace` or `service` of None matches all.
        """
        entries = [
            {"namespace": owner, "service": name, **decision.dump()}
            for (owner, name), history in sorted(self._by_service.items())
            if namespace in (None, owner) and service in (None, name)
            for decision in history.recent(limit)
        ]
        entries.sort(key=lambda entry: entry["at_s"])
        return entries[max(0, len(entries) - limit) :]
