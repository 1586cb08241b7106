"""`fulcrum explain`: prints the last role decisions with their numbers, and the conditions.

It merges the autoscaler's decision history with the roles in the PDAssignment that the history lacks: those
by a person or the operator, and those by the autoscaler if it restarted since or is unavailable.

`target` reads both; nothing is changed.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulcrum_autoscaler.policy.decisions import DecisionAction
from fulcrum_cli.target.autoscaler import AutoscalerUnavailable
from fulcrum_cli.target.connection import TargetConnection, connect
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_cli.target.snapshot import ServiceSnapshot, read_snapshot
from fulcrum_cli.terminal.output import condition_lines, refusal_lines
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Actor, Role

DecisionRecord = Mapping[str, Any]
"""One decision as JSON, with the keys of the autoscaler's decision history."""

ASSIGN = "assign"
"""Action of a role that the operator assigned; all others, also a person's, are a `DecisionAction`."""

_NUMBERS_UNKNOWN: DecisionRecord = {"loads": None, "split": "", "consecutive_ticks": 0, "rejected": ()}
_DECISIONS_FETCHED_MIN = 600
"""Decisions fetched at least: most are holds, one each tick, and consecutive holds are one line."""


def run(target_options: TargetOptions, service: str | None, *, limit: int) -> None:
    """Print the last decisions, newest first, then the conditions and the flips that are refused now."""
    if limit < 1:
        raise InvalidInput("--limit", limit, "must be at least 1")
    print("\n".join(asyncio.run(_explain(target_options, service, limit))))


async def _explain(target_options: TargetOptions, name: str | None, limit: int) -> list[str]:
    async with connect(choose_target(target_options), name) as connection:
        snapshot = await read_snapshot(connection, await connection.only_service(name))
        decision_lines = await _format_latest(connection, snapshot, limit)
        state_lines = [*condition_lines(snapshot.service.status.conditions)]
        state_lines += refusal_lines(snapshot.assignment, now_s=time.time()) or ["no flip is refused now"]
        return [*decision_lines, "", *state_lines, f"target {connection.description}"]


async def _format_latest(connection: TargetConnection, snapshot: ServiceSnapshot, limit: int) -> list[str]:
    """Return the decisions as lines; without the autoscaler, an error line and the other decisions."""
    decisions: Sequence[DecisionRecord] = ()
    errors = []
    try:
        decisions = await connection.fetch_decisions(
            snapshot.service.metadata.name, limit=max(limit, _DECISIONS_FETCHED_MIN)
        )
    except AutoscalerUnavailable as error:
        errors = [f"cannot read the autoscaler's decisions: {error}"]
    assigned = decisions_from_assignment(snapshot.assignment, decisions)
    assigned += first_roles(snapshot.assignment, snapshot.instances, [*decisions, *assigned])
    if errors and not assigned:
        return errors
    return [
        *errors,
        *format_decisions(
            sorted([*decisions, *assigned], key=lambda decision: decision["at_s"]), limit=limit
        ),
    ]


def decisions_from_assignment(
    assignment: PDAssignment | None, decisions: Sequence[DecisionRecord]
) -> list[DecisionRecord]:
    """Return the assigned roles as decisions, without those that `decisions` already contains.

    Instances that got the same role for the same reason in the same second are one decision.
    """
    groups: dict[tuple[Actor, str, str, int], list[tuple[str, float]]] = {}
    for name, entry in sorted(assignment.spec.roles.items()) if assignment else ():
        if not any(name in _names(d) and abs(d["at_s"] - entry.since) < 1 for d in decisions):
            key = (entry.by, entry.role.value, entry.reason, int(entry.since))
            groups.setdefault(key, []).append((name, entry.since))
    return [
        {
            "at_s": assigned[0][1],
            "action": ASSIGN if by is Actor.OPERATOR else DecisionAction.FLIP.value,
            "instance": ", ".join(name for name, _ in assigned),
            "to": role,
            "reason": reason or "no reason given",
            "trigger": f"by {by}",
            **_NUMBERS_UNKNOWN,
        }
        for (by, role, reason, _), assigned in groups.items()
    ]


def first_roles(
    assignment: PDAssignment | None, instances: Iterable[PDInstance], decisions: Sequence[DecisionRecord]
) -> list[DecisionRecord]:
    """Return the first role of each flipped instance as decisions; the assignment only has its last role.

    The first role is the one that the instance's first flip took away. If `decisions` do not contain all
    flips of the service, no first role is known, and the list is empty.
    """
    flips = [decision for decision in decisions if decision["action"] == DecisionAction.FLIP.value]
    if assignment is None or len(flips) < assignment.spec.flips:
        return []
    first_flips: dict[str, DecisionRecord] = {}
    for flip in sorted(flips, key=lambda decision: decision["at_s"]):
        for name in _names(flip):
            first_flips.setdefault(name, flip)
    created = ((i.metadata.name, i.metadata.creation_timestamp) for i in instances)
    return [
        {
            "at_s": at_s,
            "action": ASSIGN,
            "instance": name,
            "to": Role(first_flips[name]["to"]).other.value,
            "reason": "first role",
            "trigger": f"by {Actor.OPERATOR}",
            **_NUMBERS_UNKNOWN,
        }
        for name, at_s in created
        if name in first_flips and at_s is not None
    ]


def format_decisions(decisions: Sequence[DecisionRecord], *, limit: int) -> list[str]:
    """Return the last `limit` of the decisions, newest first; `decisions` are in order of time.

    Consecutive holds count as one. A decision has one line, and one more for each rejected instance.
    """
    lines: list[str] = []
    for run in reversed(_group_holds(decisions)[-limit:]):
        decision = run[-1]
        since = f"  ({len(run)} × since {_format_clock(run[0])})" if len(run) > 1 else ""
        lines.append(_format_headline(decision) + since)
        lines.extend(f"{'':26}not {other['instance']}: {other['reason']}" for other in decision["rejected"])
    return lines or ["no decision yet"]


def _group_holds(decisions: Sequence[DecisionRecord]) -> list[list[DecisionRecord]]:
    runs: list[list[DecisionRecord]] = []
    for decision in decisions:
        if runs and decision["action"] == runs[-1][-1]["action"] == DecisionAction.HOLD:
            runs[-1].append(decision)
        else:
            runs.append([decision])
    return runs


def _names(decision: DecisionRecord) -> tuple[str, ...]:
    """Return the instances that the decision flips."""
    first = decision["instance"]
    return (first, *decision.get("further_instances", ())) if first else ()


def _format_clock(decision: DecisionRecord) -> str:
    at_s = decision["at_s"]
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s * 10 % 10)}"


def _format_headline(decision: DecisionRecord) -> str:
    names = _names(decision)
    change = f"{', '.join(names)} → {decision['to']}: " if names else ""
    numbers = ", ".join(_format_numbers(decision))
    return f"{_format_clock(decision)}  {decision['action']:7} {change}{decision['reason']}  [{numbers}]"


def _format_numbers(decision: DecisionRecord) -> list[str]:
    loads = decision.get("loads") or {}
    numbers = [
        f"{side} load {_format_load(loads[side])}" for side in ("prefill", "decode") if loads.get(side)
    ]
    if decision["split"]:
        numbers.append(f"P:D {decision['split']}")
    if decision["consecutive_ticks"]:
        numbers.append(format_count(decision["consecutive_ticks"], "tick") + " in a row")
    return [*numbers, decision["trigger"]]


def _format_load(load: Mapping[str, Any]) -> str:
    if load["unknown"]:
        return f"{load['low']:.2f} to {load['high']:.2f}"
    return f"{load['low']:.2f}"
