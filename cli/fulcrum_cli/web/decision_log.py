"""The decisions on a service in words: roles that were assigned, and flips refused or advised. Pure.

Assigned roles come from the PDAssignment, whoever wrote them. Flips that the autoscaler refused or advised
are not written there; they come from its decision history.

`feed` and the recorded simulation keep one, and `page_model` shows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Actor, Role

DECISIONS_MAX = 60
"""Decisions that are kept."""
_NAMES_MAX = 3
"""A decision about more instances than this gives their number, not their names."""
_UNWRITTEN = {"refuse": "Flip refused", "advise": "Flip advised"}
_SUBJECTS = {
    Actor.AUTOSCALER: "the autoscaler",
    Actor.OPERATOR: "the operator",
    Actor.PERSON: "a person",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """One decision. `to` is the new role, None if no role changed."""

    at_s: float
    headline: str
    reason: str
    to: Role | None = None


class DecisionLog:
    """The last decisions, oldest first."""

    def __init__(self) -> None:
        self._assigned: dict[tuple[float, str, str], LoggedDecision] = {}
        self._unwritten: dict[tuple[str, str], LoggedDecision] = {}
        self._known: dict[str, tuple[float, Role]] = {}

    def record_assignment(self, assignment: PDAssignment) -> None:
        """Add the assignment's new roles; those of one time, role and actor as one decision."""
        groups: dict[tuple[float, str, str], list[str]] = {}
        for name, entry in sorted(assignment.spec.roles.items()):
            if self._known.get(name) != (entry.since, entry.role):
                self._known[name] = (entry.since, Role(entry.role))
                key = (round(entry.since, 1), entry.role.value, entry.by.value)
                groups.setdefault(key, []).append(name)
        for key, names in groups.items():
            entry = assignment.spec.roles[names[0]]
            self._assigned[key] = LoggedDecision(
                at_s=entry.since,
                headline=f"{_list_names(names)} → {entry.role} by {_SUBJECTS[entry.by]}",
                reason=entry.reason,
                to=Role(entry.role),
            )
        self._known = {name: known for name, known in self._known.items() if name in assignment.spec.roles}
        for oldest in sorted(self._assigned)[:-DECISIONS_MAX]:
            del self._assigned[oldest]

    def record_autoscaler(self, decisions: Iterable[Mapping[str, Any]]) -> None:
        """Replace the flips that were refused or advised; of each action and role only the last is kept."""
        self._unwritten = {
            (str(decision["action"]), str(decision.get("to"))): LoggedDecision(
                at_s=float(decision["at_s"]),
                headline=_UNWRITTEN[str(decision["action"])],
                reason=str(decision.get("reason", "")),
            )
            for decision in decisions
            if decision.get("action") in _UNWRITTEN
        }

    def list(self) -> Sequence[LoggedDecision]:
        """Return the last `DECISIONS_MAX` decisions, oldest first."""
        logged = (*self._assigned.values(), *self._unwritten.values())
        return sorted(logged, key=lambda decision: (decision.at_s, decision.headline))[-DECISIONS_MAX:]


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMES_MAX else format_count(len(names), "instance")
