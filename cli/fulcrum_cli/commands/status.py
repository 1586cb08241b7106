"""`fulcrum status`: the service's line as `kubectl get pds` shows it, its instances, its conditions."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.target.connection import Connection, connected
from fulcrum_cli.target.target import Asked, LocalTarget, choose_target
from fulcrum_cli.terminal.ages import format_age
from fulcrum_cli.terminal.arguments import one_of
from fulcrum_cli.terminal.output import Output, render
from fulcrum_core.api.conditions import KV_TRANSFER_VERIFIED
from fulcrum_core.api.meta import Condition
from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import STARTS, PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_core.state import InstanceState, RouterState
from fulcrum_core.values import Phase

_NOTHING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All that is known of one service. `state` is the router's word, which only a local run tells people."""

    service: PDService
    instances: tuple[PDInstance, ...]
    assignment: PDAssignment | None
    state: RouterState | None = None

    @property
    def attainment(self) -> float | None:
        """Requests that met TTFT and TPOT, in per cent: of all where the router tells, else of late."""
        if self.state is None:
            told = self.service.status.attainment
            return None if told is None else float(told)
        return attained(self.state)

    def dump(self) -> dict[str, Any]:
        """For programs: fields as the kinds call them."""
        meta = self.service.metadata
        loads = {load.name: load for load in self.state.instances} if self.state else {}
        instances = [
            {"name": name, "status": i.status.dump(), "load": _dumped(loads.get(name))}
            for i in self.instances
            for name in [i.metadata.name]
        ]
        return {
            "name": meta.name,
            "namespace": meta.namespace,
            "generation": meta.generation,
            "model": self.service.spec.model,
            "status": self.service.status.dump(),
            "assignment": self.assignment.spec.dump() if self.assignment else None,
            "instances": instances,
            "attainment": self.attainment,
        }


def _dumped(load: InstanceState | None) -> dict[str, Any] | None:
    return load.model_dump(mode="json") if load else None


def run(asked: Asked, service: str | None, *, output: str | None) -> None:
    """Prints how the services stand; the one that was named, or the only one, with its instances."""
    form = None if output is None else one_of("--output", output, Output)
    print(asyncio.run(_answer(asked, service, form)))


async def _answer(asked: Asked, name: str | None, form: Output | None) -> str:
    target = choose_target(asked)
    names: Sequence[str | None] = target.services if isinstance(target, LocalTarget) else [None]
    standings: list[Standing] = []
    words: list[str] = []
    for each in [name] if name is not None else names:
        async with connected(target, each) as there:
            standings += [await standing(there, service) for service in await there.services(each)]
            words.append(there.words)
    if form is not None:
        document = {"target": words, "services": [standing.dump() for standing in standings]}
        return render(document, form)
    return "\n".join([*_lines(standings, now_s=time.time()), *(f"target {word}" for word in words)])


def _lines(standings: Sequence[Standing], *, now_s: float) -> list[str]:
    if not standings:
        return ["no PDService"]
    table = service_table(*standings, now_s=now_s)
    if len(standings) > 1:
        return table
    (only,) = standings
    instances = instance_table(only.instances, only.assignment, only.state, now_s=now_s)
    return [*table, "", *instances, "", *particulars(only, now_s=now_s)]


async def standing(there: Connection, service: PDService) -> Standing:
    """How one service stands."""
    listed = (await there.store.list(PDInstance, namespace=there.namespace)).items
    name = service.metadata.name
    assignments = (await there.store.list(PDAssignment, namespace=there.namespace)).items
    return Standing(
        service=service,
        instances=tuple(instance for instance in listed if instance.spec.service == name),
        assignment=next((found for found in assignments if found.metadata.name == name), None),
        state=await there.router_state(),
    )


def columns(*rows: Sequence[str]) -> list[str]:
    """Rows with their columns in line, three blanks between, as wide as they are: as kubectl prints them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def service_table(*standings: Standing, now_s: float) -> list[str]:
    """One line a service, as `kubectl get pds` prints it."""
    head = ("NAME", "MODEL", "READY", "P", "D", "RATIO", "KV", "SLO", "FLIPS", "AGE")
    return columns(head, *(_service(standing, now_s=now_s) for standing in standings))


def _service(standing: Standing, *, now_s: float) -> tuple[str, ...]:
    service, share = standing.service, standing.attainment
    status, created_s = service.status, service.metadata.creation_timestamp
    return (
        service.metadata.name,
        service.spec.model,
        status.ready or _NOTHING,
        str(status.prefill.ready),
        str(status.decode.ready),
        status.ratio or _NOTHING,
        next((c.reason for c in status.conditions if c.type == KV_TRANSFER_VERIFIED), _NOTHING),
        _NOTHING if share is None else f"{share:.1f}",
        str(status.flips),
        _NOTHING if created_s is None else format_age(now_s - created_s),
    )


def attained(state: RouterState | None) -> float | None:
    """Requests that met TTFT and TPOT, in per cent of all that ended, by the router's count.

    As in the live view, what is in flight has not missed anything yet; cancelled ones count as neither.
    """
    ended = sum(tier.ok + tier.failed + tier.broken for tier in state.tiers) if state else 0
    if state is None or not ended:
        return None
    return round(100 * sum(tier.slo_met for tier in state.tiers) / ended, 1)


def instance_table(
    instances: Iterable[PDInstance],
    assignment: PDAssignment | None,
    state: RouterState | None,
    *,
    now_s: float,
) -> list[str]:
    """One line an instance: what it is, what it is wished to be, what it carries."""
    head = ("INSTANCE", "PHASE", "ROLE", "PREFILL", "DECODE", "TOKENS", "ITL", "KV", "RESTARTS", "BY")
    loads = {load.name: load for load in state.instances} if state else {}
    roles = assignment.spec.roles if assignment else {}
    rows = [
        _instance(i, roles.get(i.metadata.name), loads.get(i.metadata.name), now_s=now_s) for i in instances
    ]
    return columns(head, *rows)


def _instance(
    instance: PDInstance, wish: RoleAssignment | None, load: InstanceState | None, *, now_s: float
) -> tuple[str, ...]:
    itl_s, kv_usage = (load.itl_s, load.kv_usage) if load else (None, None)
    return (
        instance.metadata.name,
        _phase(instance, now_s=now_s),
        _role(instance, wish),
        f"{load.prefill_queued_s:.2f} s" if load else _NOTHING,
        str(load.decode_requests) if load else _NOTHING,
        str(load.decode_tokens) if load else _NOTHING,
        _NOTHING if itl_s is None else f"{itl_s * 1000:.0f} ms",
        _NOTHING if kv_usage is None else f"{kv_usage:.0%}",
        str(instance.status.restarts),
        _by(wish, now_s=now_s) if wish else _NOTHING,
    )


def _role(instance: PDInstance, wish: RoleAssignment | None) -> str:
    """The role wished, and the one played where that is another one (Both is what one alone plays)."""
    played = instance.status.role
    if wish is None:
        return played or _NOTHING
    return wish.role if played in (None, wish.role) else f"{wish.role} (plays {played})"


def _by(wish: RoleAssignment, *, now_s: float) -> str:
    left_s = (wish.pinned_until or 0.0) - now_s
    pinned = f", pinned for {format_age(left_s)}" if left_s > 0 else ""
    cordoned = f", cordoned by {wish.cordoner}" if wish.cordoned else ""
    return f"{wish.by}{pinned}{cordoned}"


def _phase(instance: PDInstance, *, now_s: float) -> str:
    """The phase; while the engine starts also for how long, of how long or why not."""
    status = instance.status
    if status.phase is not Phase.STARTING or status.phase_since is None:
        return status.phase
    since_s = f"{max(0.0, now_s - status.phase_since):.0f}"
    hindrance = status.message.removeprefix(f"{STARTS}: ").partition(":")[0]
    if hindrance and " " not in hindrance:
        return f"{status.phase} {since_s} s: {hindrance}"
    startup_s = _startup_s(instance)
    told = f" of {startup_s:.0f}" if startup_s and round(startup_s) else ""
    return f"{status.phase} {since_s}{told} s"


def _startup_s(instance: PDInstance) -> float | None:
    """How long a simulated engine takes to start, by its profile; None where nobody says."""
    if instance.spec.engine.type != "Simulated":
        return None
    try:
        return load_profile(instance.spec.engine.profile).startup_s
    except InvalidInput:  # a profile's path is read from where `up` was run, which may be another folder
        return None


def particulars(standing: Standing, *, now_s: float) -> list[str]:
    """What a table has no column for."""
    status, lines = standing.service.status, []
    generation = standing.service.metadata.generation
    if not status.observed_generation and generation:
        lines.append("no operator has looked at this yet: fulcrum doctor says why")
    elif status.observed_generation < generation:
        lines.append(f"status speaks of generation {status.observed_generation}, the spec is {generation}")
    lines += condition_lines(status.conditions)
    if status.last_decision:
        at = format_age(now_s - status.last_decision.at)
        lines.append(f"last decision {at} ago: {status.last_decision.action}: {status.last_decision.reason}")
    lines += refusals(standing.assignment, now_s=now_s)
    if status.endpoint:
        lines.append(f"endpoint {status.endpoint}")
    return lines


def condition_lines(conditions: Sequence[Condition]) -> list[str]:
    """The conditions, one line each."""
    rows = [(c.type, c.status, c.reason, c.message) for c in conditions]
    return [*columns(("CONDITION", "STATUS", "REASON", "MESSAGE"), *rows), ""] if rows else []


def refusals(assignment: PDAssignment | None, *, now_s: float) -> list[str]:
    """Wishes that are refused now, in words."""
    entries = sorted(assignment.spec.roles.items()) if assignment else []
    return [
        f"refused {name}{f' → {entry.refused.role}' if entry.refused.role else ''}: {entry.refused.reason}, "
        f"for {format_age(entry.refused.until - now_s)} more"
        for name, entry in entries
        if entry.refused and entry.refused.until > now_s
    ]
