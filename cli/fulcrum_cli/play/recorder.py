"""Records the history of a run: roles by second, and every flip with its acknowledgement. Pure.

The observer feeds it; the view and the report read it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstanceStatus
from fulcrum_core.values import Phase, Role
from fulcrum_simulator.percentile import percentile


class HistoryCell(StrEnum):
    """State of one instance in one second, as a letter."""

    PREFILL = "P"
    DECODE = "D"
    STARTING = "."
    DEAD = "x"


@dataclass(frozen=True, slots=True)
class RecordedFlip:
    """One change of role. `at_s` is the unix time of the decision.

    `ack_ms` is the time from the decision to the router's acknowledgement, None before it.
    """

    instance: str
    from_role: Role
    to: Role
    at_s: float
    by: str
    reason: str
    generation: int
    ack_ms: float | None = None


class Recorder:
    """History of one run. Times are unix seconds; a role history has one cell a second, oldest first."""

    def __init__(self) -> None:
        self.flips: list[RecordedFlip] = []
        self.role_histories: dict[str, list[HistoryCell]] = {}
        self.flip_marks: dict[str, set[int]] = {}
        self.roles: dict[str, Role] = {}
        self._seconds = 0
        self._restarts: dict[str, int] = {}
        self._acknowledgements: list[tuple[int, float]] = []

    def record_assignment(self, assignment: PDAssignment) -> Sequence[RecordedFlip]:
        """Record a new state of the PDAssignment; return the flips that it contains."""
        flips = [
            self._flip(name, before, entry, assignment.metadata.generation)
            for name, entry in sorted(assignment.spec.roles.items())
            if (before := self.roles.get(name)) is not None and before is not entry.role
        ]
        self.roles = {name: Role(entry.role) for name, entry in assignment.spec.roles.items()}
        self.flips.extend(flips)
        for flip in flips:
            self.flip_marks.setdefault(flip.instance, set()).add(self._seconds)
        return flips

    def flips_to(self, role: Role) -> int:
        """Count the flips so far to the role."""
        return sum(flip.to is role for flip in self.flips)

    def ack_p99_ms(self) -> float | None:
        """p99 of the time from decision to acknowledgement, in ms; None before the first acknowledgement."""
        return percentile([flip.ack_ms for flip in self.flips if flip.ack_ms is not None], 99)

    def record_acknowledgement(self, generation: int, at_s: float) -> None:
        """Record that the router applied `generation` at `at_s`, and with it all earlier generations.

        An earlier generation may have been applied before that, so its time is an upper bound.
        """
        if self._acknowledgements and generation <= self._acknowledgements[-1][0]:
            return
        self._acknowledgements.append((generation, at_s))
        for index in range(len(self.flips) - 1, -1, -1):
            flip = self.flips[index]
            if flip.ack_ms is not None:
                break
            self.flips[index] = replace(flip, ack_ms=self._ack_ms(flip.generation, flip.at_s))

    def _flip(self, name: str, from_role: Role, entry: RoleAssignment, generation: int) -> RecordedFlip:
        """Make a flip. Its acknowledgement may be known already: router and store are read independently."""
        ack_ms = self._ack_ms(generation, entry.since)
        return RecordedFlip(
            name, from_role, entry.role, entry.since, entry.by, entry.reason, generation, ack_ms
        )

    def _ack_ms(self, generation: int, at_s: float) -> float | None:
        first = bisect_left(self._acknowledgements, (generation, 0.0))
        if first == len(self._acknowledgements):
            return None
        return round((self._acknowledgements[first][1] - at_s) * 1000, 3)

    def record_second(self, instances: Mapping[str, PDInstanceStatus]) -> None:
        """Add the cell of one second to every instance's role history."""
        for name, status in instances.items():
            role_history = self.role_histories.setdefault(name, [HistoryCell.STARTING] * self._seconds)
            role_history.append(self._cell(name, status))
        self._seconds += 1
        for name, role_history in self.role_histories.items():
            if len(role_history) < self._seconds and name not in instances:
                role_history.append(HistoryCell.DEAD)

    def _cell(self, name: str, status: PDInstanceStatus) -> HistoryCell:
        """Return the cell of an instance; an engine that restarted in this second counts as dead in it."""
        phase, restarts = status.phase, self._restarts.get(name, 0)
        self._restarts[name] = status.restarts
        if phase is Phase.FAILED or status.restarts > restarts:
            return HistoryCell.DEAD
        role = self.roles.get(name)
        if role is None or phase in (Phase.PENDING, Phase.STARTING):
            return HistoryCell.STARTING
        return HistoryCell.PREFILL if role is Role.PREFILL else HistoryCell.DECODE
