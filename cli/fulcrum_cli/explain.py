"""`fulcrum explain`: the autoscaler's last decisions, in words with their numbers, and the conditions."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum_cli.connection import Connection, connected
from fulcrum_cli.ports import Unreachable
from fulcrum_cli.status import condition_lines, refusals, standing
from fulcrum_cli.target import Asked, choose_target
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput

Decision = Mapping[str, Any]

_ASKED = 600
"""Decisions asked for at least: an autoscaler holds at every tick, and a run of those is told as one line."""


def run(asked: Asked, service: str | None, *, limit: int) -> None:
    """Prints the last decisions, oldest first, then the conditions and what is refused now."""
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
        decided = await _decided(there, services[0], limit)
        seen = await standing(there, services[0])
        about = [*condition_lines(seen.service.status.conditions)]
        about += refusals(seen.assignment, now_s=time.time()) or ["no wish is refused now"]
        return [*decided, "", *about, f"target {there.words}"]


async def _decided(there: Connection, service: PDService, limit: int) -> list[str]:
    """The decisions in words; an autoscaler that is away is said, for the rest still has an answer."""
    try:
        told = await there.decisions(service.metadata.name, limit=max(limit, _ASKED))
    except Unreachable as error:
        return [f"no decisions: {error}"]
    return tell(told, limit=limit)


def tell(told: Sequence[Decision], *, limit: int) -> list[str]:
    """One or two lines a decision, the last `limit`; holding on and on counts as one, told by its last."""
    lines: list[str] = []
    for run in _runs(told)[-limit:]:
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
        numbers.append(f"{decision['passes']} passes")
    return [*numbers, decision["trigger"]]


def _load(load: Mapping[str, Any]) -> str:
    if load["unknown"]:
        return f"{load['low']:.2f} to {load['high']:.2f}"
    return f"{load['low']:.2f}"
