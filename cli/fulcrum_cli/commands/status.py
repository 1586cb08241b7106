"""`fulcrum status`: prints services as a table; a single one with instances and conditions.

`target.snapshot` reads; nothing is changed.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

from fulcrum_cli.option_values import parse_choice
from fulcrum_cli.program_name import program_name
from fulcrum_cli.target.connection import connect
from fulcrum_cli.target.selection import LocalTarget, TargetOptions, choose_target
from fulcrum_cli.target.snapshot import ServiceSnapshot, read_snapshot
from fulcrum_cli.terminal.output import (
    OutputFormat,
    condition_lines,
    format_age,
    format_columns,
    format_seconds,
    refusal_lines,
    render_document,
)
from fulcrum_core.api.conditions import KV_TRANSFER_VERIFIED
from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import DRAINED, PDInstance
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_core.router_state import InstanceState, RouterState, TierState
from fulcrum_core.values import Phase

_NO_VALUE = "–"


def run(target_options: TargetOptions, service: str | None, *, tiers: bool, output: str | None) -> None:
    """Print the services; if only one is named or exists, also its instances and conditions.

    With `tiers` the requests of each tier follow.
    """
    output_format = None if output is None else parse_choice("--output", output, OutputFormat)
    print(asyncio.run(_render_status(target_options, service, output_format, tiers=tiers)))


async def _render_status(
    target_options: TargetOptions, name: str | None, output_format: OutputFormat | None, *, tiers: bool
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
        [
            *_format_snapshots(snapshots, now_s=time.time()),
            *(
                line
                for snapshot in snapshots
                if tiers
                for line in ("", *tier_table(snapshot), *tenant_table(snapshot))
            ),
            *(f"target {line}" for line in descriptions),
        ]
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


def service_table(*snapshots: ServiceSnapshot, now_s: float) -> list[str]:
    """Return a header and one line for each service, with the columns of `kubectl get pds` but REASON."""
    head = ("NAME", "MODEL", "ENGINE", "READY", "P", "D", "RATIO", "KV", "SLO", "FLIPS", "AGE")
    return format_columns(head, *(_service_row(snapshot, now_s=now_s) for snapshot in snapshots))


def _service_row(snapshot: ServiceSnapshot, *, now_s: float) -> tuple[str, ...]:
    service, share = snapshot.service, snapshot.attainment
    status, created_s = service.status, service.metadata.creation_timestamp
    return (
        service.metadata.name,
        service.spec.model,
        service.spec.engine.type,
        status.ready or _NO_VALUE,
        str(status.prefill.ready),
        str(status.decode.ready),
        status.ratio or _NO_VALUE,
        next((c.reason for c in status.conditions if c.type == KV_TRANSFER_VERIFIED), _NO_VALUE),
        _NO_VALUE if share is None else f"{share:.1f}",
        str(status.flips),
        _NO_VALUE if created_s is None else format_age(now_s - created_s),
    )


def instance_table(
    instances: Iterable[PDInstance],
    assignment: PDAssignment | None,
    state: RouterState | None,
    *,
    now_s: float,
) -> list[str]:
    """Return a header and one line for each instance: phase, role, load and who assigned the role."""
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


def tier_table(snapshot: ServiceSnapshot) -> list[str]:
    """Return a header and one line for each tier: its requests, and why some were refused.

    The router's counts are known in a local run; in a cluster only the attainment is, by the status.
    """
    head = ("TIER", "OFFERED", "OK", "QUEUED", "DEGRADED", "REFUSED", "SLO", "WAIT", "RESERVE", "REASONS")
    if snapshot.state is not None:
        return format_columns(head, *(_tier_row(tier) for tier in snapshot.state.tiers))
    none = (_NO_VALUE,) * 5
    tiers = snapshot.service.status.tiers
    return format_columns(
        head, *((t.name, *none, t.attainment or _NO_VALUE, *(_NO_VALUE,) * 3) for t in tiers)
    )


def tenant_table(snapshot: ServiceSnapshot) -> list[str]:
    """Return an empty line, a header and one line for each tenant that the router names; else nothing."""
    tenants = snapshot.state.tenants if snapshot.state is not None else ()
    if not tenants:
        return []
    rows = ((t.name, str(t.met), str(t.missed), str(t.refused), str(t.limited)) for t in tenants)
    return ["", *format_columns(("TENANT", "MET", "MISSED", "REFUSED", "LIMITED"), *rows)]


def _tier_row(tier: TierState) -> tuple[str, ...]:
    reasons = [f"{reason} {count}" for reason, count in tier.refusals.items()]
    reasons += [f"{reason} {count} (not enforced)" for reason, count in tier.advised_refusals.items()]
    share = f"{100 * tier.slo_met / tier.ended:.1f}" if tier.ended else _NO_VALUE
    return (
        tier.name,
        str(tier.offered),
        str(tier.ok),
        str(tier.queued),
        str(tier.degraded),
        str(tier.refused + tier.limited),
        share,
        _NO_VALUE if tier.wait_mean_s is None else format_seconds(tier.wait_mean_s),
        _format_reserve(tier),
        ", ".join(reasons) or _NO_VALUE,
    )


def _format_reserve(tier: TierState) -> str:
    """How much of prefill and decode is kept for the tier; "lent" while it sends no requests."""
    reserved = tier.reserve_kept + tier.reserve_lent
    if not reserved:
        return _NO_VALUE
    return f"{reserved:.0%}" if tier.reserve_kept else f"{reserved:.0%}, lent"


def _format_role(instance: PDInstance, entry: RoleAssignment | None) -> str:
    """Return the assigned role, and the effective role if it differs (Both: a single instance)."""
    effective = instance.status.role
    if entry is None:
        return effective or _NO_VALUE
    return entry.role if effective in (None, entry.role) else f"{entry.role} (serves {effective})"


def _format_assigned_by(entry: RoleAssignment, *, now_s: float) -> str:
    left_s = (entry.pinned_until or 0.0) - now_s
    pinned = f", pinned for {format_age(left_s)}" if left_s > 0 else ""
    cordoned = f", cordoned by {entry.effective_cordoned_by}" if entry.cordoned else ""
    return f"{entry.by}{pinned}{cordoned}"


def _format_phase(instance: PDInstance, *, now_s: float) -> str:
    """Return the phase; `Drained` once a cordoned instance has no request and no KV transfer left.

    While the engine starts, the elapsed time is added, and the expected time or a reason.
    """
    status = instance.status
    if status.phase is Phase.DRAINING and status.reason == DRAINED:
        return DRAINED
    if status.phase is not Phase.STARTING or status.phase_since is None:
        return status.phase
    since_s = f"{max(0.0, now_s - status.phase_since):.0f}"
    if status.reason:
        return f"{status.phase} {since_s} s: {status.reason}"
    startup_s = _simulated_startup_s(instance)
    expected = f" of {startup_s:.0f}" if startup_s and round(startup_s) else ""
    return f"{status.phase} {since_s}{expected} s"


def _simulated_startup_s(instance: PDInstance) -> float | None:
    """Return the start-up time of a simulated engine by its profile; None if it is not known."""
    if not instance.spec.engine.is_simulated:
        return None
    try:
        return load_profile(instance.spec.engine.profile).startup_s
    except InvalidInput:  # the path is relative to the folder in which `up` was run
        return None


def detail_lines(snapshot: ServiceSnapshot, *, now_s: float) -> list[str]:
    """Return the lines below the tables: outdated status, conditions, last decision, refusals, endpoint."""
    status, lines = snapshot.service.status, []
    generation = snapshot.service.metadata.generation
    if not status.observed_generation and generation:
        lines.append(f"no operator has reconciled this service yet; {program_name()} doctor shows why")
    elif status.observed_generation < generation:
        observed = status.observed_generation
        lines.append(f"the status is of generation {observed}, the spec of generation {generation}")
    lines += condition_lines(status.conditions)
    if status.last_decision:
        at = format_age(now_s - status.last_decision.at)
        lines.append(f"last decision {at} ago: {status.last_decision.action}: {status.last_decision.reason}")
    lines += refusal_lines(snapshot.assignment, now_s=now_s)
    if status.endpoint:
        lines.append(f"endpoint {status.endpoint}")
    return lines
