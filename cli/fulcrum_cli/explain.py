"""`fulcrum explain`: the autoscaler's last decisions, in words with their numbers."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from fulcrum_cli.ports import decisions
from fulcrum_cli.running import find_running
from fulcrum_core.errors import InvalidInput


def run(service: str | None, *, limit: int) -> None:
    """Prints the last decisions, oldest first."""
    if limit < 1:
        raise InvalidInput("--limit", limit, "must be at least 1")
    url = find_running(service).autoscaler_url
    for line in tell(asyncio.run(_fetch(url, limit))):
        print(line)


async def _fetch(url: str, limit: int) -> Sequence[dict[str, Any]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await decisions(client, url, limit=limit)


def tell(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """One or two lines a decision."""
    lines: list[str] = []
    for decision in told:
        lines.append(_headline(decision))
        lines.extend(f"{'':26}not {other['instance']}: {other['reason']}" for other in decision["rejected"])
    return lines or ["no decision yet"]


def _headline(decision: Mapping[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(decision["at_s"]))
    tenths = int(decision["at_s"] * 10 % 10)
    what = f"{decision['instance']} → {decision['to']}: " if decision["instance"] else ""
    numbers = ", ".join(_numbers(decision))
    return f"{clock}.{tenths}  {decision['action']:7} {what}{decision['reason']}  [{numbers}]"


def _numbers(decision: Mapping[str, Any]) -> list[str]:
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
