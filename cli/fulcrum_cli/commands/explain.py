"""`fulcrum explain`: the last decisions, whoever made them, in words with numbers, and the conditions."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum_cli.commands.status import Standing, condition_lines, refusals, standing
from fulcrum_cli.target.connection import Connection, connected
from fulcrum_cli.target.local_autoscaler import Unreachable
from fulcrum_cli.target.target import Asked, choose_target
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.errors import InvalidInput
from fulcrum_core.spelling import format_count
from fulcrum_core.values import Actor

Decision = Mapping[str, Any]

_NO_NUMBERS: Decision = {"loads": None, "split": "", "passes": 0, "rejected": ()}
_ASKED = 600
"""Decisions asked for at least: an autoscaler holds at every tick, and a run of those is told as one line."""


def run(asked: Asked, service: str | None, *, limit: int) -> None:
    """Prints the last decisions, newest first, then the conditions and what is refused now."""
    if limit < 1:
        raise InvalidInput("--limit", limit, "must be at least 1")
    print("\n".join(asyncio.run(_explain(asked, service, limit))))


async def _explain(asked: Asked, name: str | None, limit: int) -> list[str]:
    async with connected(choose_target(asked), name) as there:
        services = await there.services(name)
        if len(services) != 1:
            names = ", ".join(service.metadata.name for service in services) or "none"
            rule = "are there: name one" if services else f"is there: {there.words} has no PDService"
            raise InvalidInput("SERVICE", names, rule)
        seen = await standing(there, services[0])
        decided = await _decided(there, seen, limit)
        about = [*condition_lines(seen.service.status.conditions)]
        about += refusals(seen.assignment, now_s=time.time()) or ["no wish is refused now"]
        return [*decided, "", *about, f"target {there.words}"]


async def _decided(there: Connection, seen: Standing, limit: int) -> list[str]:
    """The decisions in words; an autoscaler that is away is said, for the rest still has an answer."""
    told: Sequence[Decision] = ()
    away = []
    try:
        told = await there.decisions(seen.service.metadata.name, limit=max(limit, _ASKED))
    except Unreachable as error:
        away = [f"no decisions of the autoscaler: {error}"]
    given = given_roles(seen.assignment, told)
    if away and not given:
        return away
    return [*away, *tell(sorted([*told, *given], key=lambda decision: decision["at_s"]), limit=limit)]


def given_roles(assignment: PDAssignment | None, told: Sequence[Decision]) -> list[Decision]:
    """The roles as they were given, as decisions; the autoscaler's only where its journal lacks them."""
    groups: dict[tuple[Actor, str, str, int], list[tuple[str, float]]] = {}
    for name, entry in sorted(assignment.spec.roles.items()) if assignment else ():
        if not any(d["instance"] == name and abs(d["at_s"] - entry.since) < 1 for d in told):
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
            **_NO_NUMBERS,
        }
        for (by, role, reason, _), given in groups.items()
    ]


def tell(told: Sequence[Decision], *, limit: int) -> list[str]:
    """The last `limit` of decisions that are given oldest first, one or two lines each, newest first.

    Holding on and on counts as one, told by its last.
    """
    lines: list[str] = []
    for run in reversed(_runs(told)[-limit:]):
        decision = run[-1]
        since = f"  ({len(run)} × since {_clock(run[0])})" if len(run) > 1 else ""
        lines.append(_headline(decision) + since)
        lines.extend(f"{'':26}not {other['instance']}: {other['reason']}" for other in decision["rejected"])
    return lines or ["no decision yet"]


def _runs(told: Sequence[Decision]) -> list[list[Decision]]:
    runs: list[list[Decision]] = []
    for decision in told:
        if runs and decision["action"] == runs[-1][-1]["action"] == "hold":
            runs[-1].append(decision)
        else:
            runs.append([decision])
    return runs


def _clock(decision: Decision) -> str:
    at_s = decision["at_s"]
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s * 10 % 10)}"


def _headline(decision: Decision) -> str:
    what = f"{decision['instance']} → {decision['to']}: " if decision["instance"] else ""
    numbers = ", ".join(_numbers(decision))
    return f"{_clock(decision)}  {decision['action']:7} {what}{decision['reason']}  [{numbers}]"


def _numbers(decision: Decision) -> list[str]:
    loads = decision.get("loads") or {}
    numbers = [f"{side} load {_load(loads[side])}" for side in ("prefill", "decode") if loads.get(side)]
    if decision["split"]:
        numbers.append(f"P:D {decision['split']}")
    if decision["passes"]:
        numbers.append(format_count(decision["passes"], "pass", "passes"))
    return [*numbers, decision["trigger"]]


def _load(load: Mapping[str, Any]) -> str:
    if load["unknown"]:
        return f"{load['low']:.2f} to {load['high']:.2f}"
    return f"{load['low']:.2f}"
