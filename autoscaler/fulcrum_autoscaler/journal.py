"""The last decisions, held ones too, for `/decisions` and `fulcrum explain`.

Flips are rare and holding is not, so they are kept apart: an hour of holding does not push the last flip out.
"""

from collections import deque

from fulcrum_autoscaler.policy import Action, Decision

_FLIPS_KEPT = 200
_OTHERS_KEPT = 400


class Journal:
    """A ring of flips (made or advised) and one of all other decisions."""

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
