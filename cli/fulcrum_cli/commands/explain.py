"""`fulcrum explain`: the last decisions, whoever made them, in words with numbers, and the conditions."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum_cli.commands.status import ServiceSnapshot, condition_lines, read_snapshot, refusal_lines
from fulcrum_cli.target.autoscaler_client import AutoscalerUnavailable
from fulcrum_cli.target.connection import TargetConnection, connect
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Actor

DecisionRecord = Mapping[str, Any]

_NUMBERS_UNKNOWN: DecisionRecord = {"loads": None, "split": "", "consecutive_ticks": 0, "rejected": ()}
_DECISIONS_FETCHED_MIN = 600
"""Decisions asked for at least: an autoscaler holds at every tick, and a run of those is told as one line."""


def run(target_options: TargetOptions, service: str | None, *, limit: int) -> None:
    """Prints the last decisions, newest first, then the conditions and what is refused now."""
    if limit < 1:
        raise InvalidInput("--limit", limit, "must be at least 1")
    print("\n".join(asyncio.run(_explain(target_options, service, limit))))


async def _explain(target_options: TargetOptions, name: str | None, limit: int) -> list[str]:
    async with connect(choose_target(target_options), name) as connection:
        services = await connection.services(name)
        if len(services) != 1:
            names = ", ".join(service.metadata.name for service in services) or "none"
            rule = (
                "are there: name one" if services else f"is there: {connection.description} has no PDService"
            )
            raise InvalidInput("SERVICE", names, rule)
        snapshot = await read_snapshot(connection, services[0])
        decision_lines = await _format_latest(connection, snapshot, limit)
        state_lines = [*condition_lines(snapshot.service.status.conditions)]
        state_lines += refusal_lines(snapshot.assignment, now_s=time.time()) or ["no wish is refused now"]
        return [*decision_lines, "", *state_lines, f"target {connection.description}"]


async def _format_latest(connection: TargetConnection, snapshot: ServiceSnapshot, limit: int) -> list[str]:
    """The decisions in words; an autoscaler that is away is said, for the rest still has an answer."""
    decisions: Sequence[DecisionRecord] = ()
    errors = []
    try:
        decisions = await connection.fetch_decisions(
            snapshot.service.metadata.name, limit=max(limit, _DECISIONS_FETCHED_MIN)
        )
    except AutoscalerUnavailable as error:
        errors = [f"no decisions of the autoscaler: {error}"]
    assigned = decisions_from_assignment(snapshot.assignment, decisions)
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
    """The roles as they were given, as decisions; the autoscaler's only where its journal lacks them."""
    groups: dict[tuple[Actor, str, str, int], list[tuple[str, float]]] = {}
    for name, entry in sorted(assignment.spec.roles.items()) if assignment else ():
        if not any(d["instance"] == name and abs(d["at_s"] - entry.since) < 1 for d in decisions):
            key = (entry.by, entry.role.value, entry.reason, int(entry.since))
            groups.setdefault(key, []).append((name, entry.since))
    return [
        {
            "at_s": given[0][1],
            "action": "assign" if by is Actor.OPERATOR else "flip",
            "instance": ", ".join(name for name, _ in given),
            "to": role,
            "reason": reason or "no reason given",
            "trigger": f"by {by}",
            **_NUMBERS_UNKNOWN,
        }
        for (by, role, reason, _), given in groups.items()
    ]


def format_decisions(decisions: Sequence[DecisionRecord], *, limit: int) -> list[str]:
    """The last `limit` of decisions that are given oldest first, one or two lines each, newest first.

    Holding on and on counts as one, told by its last.
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
        if runs and decision["action"] == runs[-1][-1]["action"] == "hold":
            runs[-1].append(decision)
        else:
            runs.append([decision])
    return runs


def _format_clock(decision: DecisionRecord) -> str:
    at_s = decision["at_s"]
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s * 10 % 10)}"


def _format_headline(decision: DecisionRecord) -> str:
    what = f"{decision['instance']} → {decision['to']}: " if decision["instance"] else ""
    numbers = ", ".join(_format_numbers(decision))
    return f"{_format_clock(decision)}  {decision['action']:7} {what}{decision['reason']}  [{numbers}]"


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
