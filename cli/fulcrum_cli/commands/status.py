"""`fulcrum status`: the service's line as `kubectl get pds` shows it, its instances, its conditions."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.option_values import parse_choice
from fulcrum_cli.target.connection import TargetConnection, connect
from fulcrum_cli.target.selection import LocalTarget, TargetOptions, choose_target
from fulcrum_cli.terminal.ages import format_age
from fulcrum_cli.terminal.output import OutputFormat, render_document
from fulcrum_core.api.conditions import KV_TRANSFER_VERIFIED
from fulcrum_core.api.meta import Condition
from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import Phase

_NO_VALUE = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """All that is known of one service. `state` is the router's word, which only a local run tells people."""

    service: PDService
    instances: tuple[PDInstance, ...]
    assignment: PDAssignment | None
    state: RouterState | None = None

    @property
    def attainment(self) -> float | None:
        """Requests that met TTFT and TPOT, in per cent: of all where the router tells, else of late."""
        if self.state is None:
            percent = self.service.status.attainment
            return None if percent is None else float(percent)
        return attainment_percent(self.state)

    def dump(self) -> dict[str, Any]:
        """For programs: fields as the kinds call them."""
        meta = self.service.metadata
        loads = {load.name: load for load in self.state.instances} if self.state else {}
        instances = [
            {"name": name, "status": i.status.dump(), "load": _dump_load(loads.get(name))}
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


def _dump_load(load: InstanceState | None) -> dict[str, Any] | None:
    return load.model_dump(mode="json") if load else None


def run(target_options: TargetOptions, service: str | None, *, output: str | None) -> None:
    """Prints how the services stand; the one that was named, or the only one, with its instances."""
    output_format = None if output is None else parse_choice("--output", output, OutputFormat)
    print(asyncio.run(_render_status(target_options, service, output_format)))


async def _render_status(
    target_options: TargetOptions, name: str | None, output_format: OutputFormat | None
) -> str:
    target = choose_target(target_options)
    names: Sequence[str | None] = target.services if isinstance(target, LocalTarget) else [None]
    snapshots: list[ServiceSnapshot] = []
    descriptions: list[str] = []
    for each in [name] if name is not None else names:
        async with connect(target, each) as connection:
            snapshots += [
                await read_snapshot(connection, service) for service in await connection.services(each)
            ]
            descriptions.append(connection.description)
    if output_format is not None:
        document = {"target": descriptions, "services": [snapshot.dump() for snapshot in snapshots]}
        return render_document(document, output_format)
    return "\n".join(
        [*_format_snapshots(snapshots, now_s=time.time()), *(f"target {line}" for line in descriptions)]
    )


def _format_snapshots(snapshots: Sequence[ServiceSnapshot], *, now_s: float) -> list[str]:
    if not snapshots:
        return ["no PDService"]
    table = service_table(*snapshots, now_s=now_s)
    if len(snapshots) > 1:
        return table
    (only,) = snapshots
    instances = instance_table(only.instances, only.assignment, only.state, now_s=now_s)
    return [*table, "", *instances, "", *detail_lines(only, now_s=now_s)]


async def read_snapshot(connection: TargetConnection, service: PDService) -> ServiceSnapshot:
    """How one service stands."""
    listed = (await connection.store.list(PDInstance, namespace=connection.namespace)).items
    name = service.metadata.name
    assignments = (await connection.store.list(PDAssignment, namespace=connection.namespace)).items
    return ServiceSnapshot(
        service=service,
        instances=tuple(instance for instance in listed if instance.spec.service == name),
        assignment=next((found for found in assignments if found.metadata.name == name), None),
        state=await connection.router_state(),
    )


def format_columns(*rows: Sequence[str]) -> list[str]:
    """Rows with their columns in line, three blanks between, as wide as they are: as kubectl prints them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def service_table(*snapshots: ServiceSnapshot, now_s: float) -> list[str]:
    """One line a service, as `kubectl get pds` prints it."""
    head = ("NAME", "MODEL", "READY", "P", "D", "RATIO", "KV", "SLO", "FLIPS", "AGE")
    return format_columns(head, *(_service_row(snapshot, now_s=now_s) for snapshot in snapshots))


def _service_row(snapshot: ServiceSnapshot, *, now_s: float) -> tuple[str, ...]:
    service, share = snapshot.service, snapshot.attainment
    status, created_s = service.status, service.metadata.creation_timestamp
    return (
        service.metadata.name,
        service.spec.model,
        status.ready or _NO_VALUE,
        str(status.prefill.ready),
        str(status.decode.ready),
        status.ratio or _NO_VALUE,
        next((c.reason for c in status.conditions if c.type == KV_TRANSFER_VERIFIED), _NO_VALUE),
        _NO_VALUE if share is None else f"{share:.1f}",
        str(status.flips),
        _NO_VALUE if created_s is None else format_age(now_s - created_s),
    )


def attainment_percent(state: RouterState | None) -> float | None:
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
        _instance_row(i, roles.get(i.metadata.name), loads.get(i.metadata.name), now_s=now_s)
        for i in instances
    ]
    return format_columns(head, *rows)


def _instance_row(
    instance: PDInstance, entry: RoleAssignment | None, load: InstanceState | None, *, now_s: float
) -> tuple[str, ...]:
    itl_s, kv_usage = (load.itl_s, load.kv_usage) if load else (None, None)
    return (
        instance.metadata.name,
        _format_phase(instance, now_s=now_s),
        _format_role(instance, entry),
        f"{load.prefill_queued_s:.2f} s" if load else _NO_VALUE,
        str(load.decode_legs) if load else _NO_VALUE,
        str(load.decode_tokens) if load else _NO_VALUE,
        _NO_VALUE if itl_s is None else f"{itl_s * 1000:.0f} ms",
        _NO_VALUE if kv_usage is None else f"{kv_usage:.0%}",
        str(instance.status.restarts),
        _format_assigned_by(entry, now_s=now_s) if entry else _NO_VALUE,
    )


def _format_role(instance: PDInstance, entry: RoleAssignment | None) -> str:
    """The role wished, and the one played where that is another one (Both is what one alone plays)."""
    played = instance.status.role
    if entry is None:
        return played or _NO_VALUE
    return entry.role if played in (None, entry.role) else f"{entry.role} (plays {played})"


def _format_assigned_by(entry: RoleAssignment, *, now_s: float) -> str:
    left_s = (entry.pinned_until or 0.0) - now_s
    pinned = f", pinned for {format_age(left_s)}" if left_s > 0 else ""
    cordoned = f", cordoned by {entry.effective_cordoned_by}" if entry.cordoned else ""
    return f"{entry.by}{pinned}{cordoned}"


def _format_phase(instance: PDInstance, *, now_s: float) -> str:
    """The phase; while the engine starts also for how long, of how long or why not."""
    status = instance.status
    if status.phase is not Phase.STARTING or status.phase_since is None:
        return status.phase
    since_s = f"{max(0.0, now_s - status.phase_since):.0f}"
    if status.reason:
        return f"{status.phase} {since_s} s: {status.reason}"
    startup_s = _simulated_startup_s(instance)
    expected = f" of {startup_s:.0f}" if startup_s and round(startup_s) else ""
    return f"{status.phase} {since_s}{expected} s"


def _simulated_startup_s(instance: PDInstance) -> float | None:
    """How long a simulated engine takes to start, by its profile; None where nobody says."""
    if instance.spec.engine.type != "Simulated":
        return None
    try:
        return load_profile(instance.spec.engine.profile).startup_s
    except InvalidInput:  # a profile's path is read from where `up` was run, which may be another folder
        return None


def detail_lines(snapshot: ServiceSnapshot, *, now_s: float) -> list[str]:
    """What a table has no column for."""
    status, lines = snapshot.service.status, []
    generation = snapshot.service.metadata.generation
    if not status.observed_generation and generation:
        lines.append("no operator has looked at this yet: fulcrum doctor says why")
    elif status.observed_generation < generation:
        lines.append(f"status speaks of generation {status.observed_generation}, the spec is {generation}")
    lines += condition_lines(status.conditions)
    if status.last_decision:
        at = format_age(now_s - status.last_decision.at)
        lines.append(f"last decision {at} ago: {status.last_decision.action}: {status.last_decision.reason}")
    lines += refusal_lines(snapshot.assignment, now_s=now_s)
    if status.endpoint:
        lines.append(f"endpoint {status.endpoint}")
    return lines


def condition_lines(conditions: Sequence[Condition]) -> list[str]:
    """The conditions, one line each."""
    rows = [(c.type, c.status, c.reason, c.message) for c in conditions]
    return [*format_columns(("CONDITION", "STATUS", "REASON", "MESSAGE"), *rows), ""] if rows else []


def refusal_lines(assignment: PDAssignment | None, *, now_s: float) -> list[str]:
    """Wishes that are refused now, in words."""
    entries = sorted(assignment.spec.roles.items()) if assignment else []
    return [
        f"refused {name}{f' → {entry.refused.role}' if entry.refused.role else ''}: {entry.refused.reason}, "
        f"for {format_age(entry.refused.until - now_s)} more"
        for name, entry in entries
        if entry.refused and entry.refused.until > now_s
    ]
