"""`fulcrum explain`: the autoscaler's last decisions, in words with their numbers."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from fulcrum_cli.ports import decisions
from fulcrum_cli.running import find_running
from fulcrum_core.errors import InvalidInput

Decision = Mapping[str, Any]

_ASKED = 600
"""Decisions asked for at least: an autoscaler holds at every tick, and a run of those is told as one line."""


def run(service: str | None, *, limit: int) -> None:
    """Prints the last decisions, oldest first."""
    if limit < 1:
        raise InvalidInput("--limit", limit, "must be at least 1")
    url = find_running(service).autoscaler_url
    for line in tell(asyncio.run(_fetch(url, max(limit, _ASKED))), limit=limit):
        print(line)


async def _fetch(url: str, limit: int) -> Sequence[dict[str, Any]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await decisions(client, url, limit=limit)


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
