"""What happened during a run: who had which role in which second, and every flip with its acknowledgement.

Pure: the session feeds it what it observes, the view and the JSON report read it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstanceStatus
from fulcrum_core.values import Phase, Role
from fulcrum_simulator.client import percentile


class HistoryCell(StrEnum):
    """One second of one instance, as a letter."""

    PREFILL = "P"
    DECODE = "D"
    STARTING = "."
    DEAD = "x"


@dataclass(frozen=True, slots=True)
class Flip:
    """One change of role. `at_s` is the decision's unix time; `ack_ms` runs from it to the router's word."""

    instance: str
    from_role: Role
    to: Role
    at_s: float
    by: str
    reason: str
    generation: int
    ack_ms: float | None = None


class Recorder:
    """The history of one run. Times are unix seconds; bands hold one cell a second, oldest first."""

    def __init__(self) -> None:
        self.flips: list[Flip] = []
        self.role_histories: dict[str, list[HistoryCell]] = {}
        self.flip_marks: dict[str, set[int]] = {}
        self.roles: dict[str, Role] = {}
        self._seconds = 0
        self._restarts: dict[str, int] = {}
        self._acknowledgements: list[tuple[int, float]] = []

    def record_assignment(self, assignment: PDAssignment) -> Sequence[Flip]:
        """Takes in a state of the PDAssignment; returns the flips that it brought."""
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
        """Flips so far into the role."""
        return sum(flip.to is role for flip in self.flips)

    def ack_p99_ms(self) -> float | None:
        """Decision to the router's acknowledgement, p99 over all flips that have one."""
        return percentile([flip.ack_ms for flip in self.flips if flip.ack_ms is not None], 99)

    def record_acknowledgement(self, generation: int, at_s: float) -> None:
        """The router said that it applied `generation` at `at_s`; so were all before that had no word yet.

        An older generation may have been applied a little earlier, so its time is an upper bound.
        """
        if self._acknowledgements and generation <= self._acknowledgements[-1][0]:
            return
        self._acknowledgements.append((generation, at_s))
        for index in range(len(self.flips) - 1, -1, -1):
            flip = self.flips[index]
            if flip.ack_ms is not None:
                break
            self.flips[index] = replace(flip, ack_ms=self._ack_ms(flip.generation, flip.at_s))

    def _flip(self, name: str, from_role: Role, entry: RoleAssignment, generation: int) -> Flip:
        """The router's word may be here before the store's: the two come on different ways."""
        ack_ms = self._ack_ms(generation, entry.since)
        return Flip(name, from_role, entry.role, entry.since, entry.by, entry.reason, generation, ack_ms)

    def _ack_ms(self, generation: int, at_s: float) -> float | None:
        first = bisect_left(self._acknowledgements, (generation, 0.0))
        if first == len(self._acknowledgements):
            return None
        return round((self._acknowledgements[first][1] - at_s) * 1000, 3)

    def record_second(self, instances: Mapping[str, PDInstanceStatus]) -> None:
        """Closes one second: one more cell in every instance's band."""
        for name, status in instances.items():
            role_history = self.role_histories.setdefault(name, [HistoryCell.STARTING] * self._seconds)
            role_history.append(self._cell(name, status))
        self._seconds += 1
        for name, role_history in self.role_histories.items():
            if len(role_history) < self._seconds and name not in instances:
                role_history.append(HistoryCell.DEAD)

    def _cell(self, name: str, status: PDInstanceStatus) -> HistoryCell:
        """An engine that was started again within the second was dead in it, too."""
        phase, restarts = status.phase, self._restarts.get(name, 0)
        self._restarts[name] = status.restarts
        if phase is Phase.FAILED or status.restarts > restarts:
            return HistoryCell.DEAD
        role = self.roles.get(name)
        if role is None or phase in (Phase.PENDING, Phase.STARTING):
            return HistoryCell.STARTING
        return HistoryCell.PREFILL if role is Role.PREFILL else HistoryCell.DECODE
