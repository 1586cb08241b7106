"""`fulcrum status`: the service's line as `kubectl get pds` shows it, its instances, its objectives."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from fulcrum_autoscaler.routers import HttpRouter, RouterAway, open_router
from fulcrum_cli.running import find_running
from fulcrum_cluster.client import open_store
from fulcrum_core.api.meta import format_duration
from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput, NotFound
from fulcrum_core.profiles import load_profile
from fulcrum_core.state import InstanceState, RouterState
from fulcrum_core.values import Phase
from fulcrum_operator.local import RunInfo

_NOTHING = "–"


def run(service: str | None) -> None:
    """Prints how the service stands."""
    for line in asyncio.run(_lines(find_running(service))):
        print(line)


async def _lines(running: RunInfo) -> Sequence[str]:
    namespace = running.namespace
    async with open_store(running.store) as store:
        service = await store.get(PDService, running.service, namespace=namespace)
        listed = (await store.list(PDInstance, namespace=namespace)).items
        try:
            assignment = await store.get(PDAssignment, running.service, namespace=namespace)
        except NotFound:
            assignment = None
    instances = [instance for instance in listed if instance.spec.service == running.service]
    state = await _state(running)
    now_s = time.time()
    about_service = service_table(service, state, now_s=now_s)
    about_instances = instance_table(instances, assignment, state, now_s=now_s)
    return *about_service, "", *about_instances, "", f"endpoint {running.router_url}"


async def _state(running: RunInfo) -> RouterState | None:
    async with open_router(running.router_state_url, token=running.token) as client:
        try:
            return await HttpRouter(client).state(min_generation=0, timeout_s=0)
        except RouterAway:
            return None


def _columns(*rows: Sequence[str]) -> list[str]:
    """Rows with their columns in line, three blanks between, as wide as they are: as kubectl prints them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def service_table(service: PDService, state: RouterState | None, *, now_s: float) -> list[str]:
    """One line, as `kubectl get pds` prints it."""
    status, created_s = service.status, service.metadata.creation_timestamp
    head = ("NAME", "MODEL", "READY", "P", "D", "RATIO", "SLO", "FLIPS", "AGE")
    line = (
        service.metadata.name,
        service.spec.model,
        status.ready or _NOTHING,
        str(status.prefill.ready),
        str(status.decode.ready),
        status.ratio or _NOTHING,
        attainment(state),
        str(status.flips),
        _NOTHING if created_s is None else format_duration(max(1.0, round(now_s - created_s))),
    )
    return _columns(head, line)


def attainment(state: RouterState | None) -> str:
    """Requests that met TTFT and TPOT, in per cent of all that ended, by the router's count.

    As in the live view, what is in flight has not missed anything yet; cancelled ones count as neither.
    """
    ended = sum(tier.ok + tier.failed + tier.broken for tier in state.tiers) if state else 0
    if state is None or not ended:
        return _NOTHING
    return f"{100 * sum(tier.slo_met for tier in state.tiers) / ended:.1f}"


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
    return _columns(head, *rows)


def _instance(
    instance: PDInstance, wish: RoleAssignment | None, load: InstanceState | None, *, now_s: float
) -> tuple[str, ...]:
    itl_s, kv_usage = (load.itl_s, load.kv_usage) if load else (None, None)
    return (
        instance.metadata.name,
        _phase(instance, now_s=now_s),
        wish.role if wish else _NOTHING,
        f"{load.prefill_queued_s:.2f} s" if load else _NOTHING,
        str(load.decode_requests) if load else _NOTHING,
        str(load.decode_tokens) if load else _NOTHING,
        _NOTHING if itl_s is None else f"{itl_s * 1000:.0f} ms",
        _NOTHING if kv_usage is None else f"{kv_usage:.0%}",
        str(instance.status.restarts),
        f"{wish.by}{', pinned' if (wish.pinned_until or 0.0) > now_s else ''}" if wish else _NOTHING,
    )


def _phase(instance: PDInstance, *, now_s: float) -> str:
    """The phase; while the engine starts also for how long, and how long that takes by its profile."""
    status = instance.status
    if status.phase is not Phase.STARTING or status.phase_since is None:
        return status.phase
    try:
        startup_s = load_profile(instance.spec.engine.profile).startup_s
    except InvalidInput:  # a profile's path is read from where `up` was run, which may be another folder
        return status.phase
    return f"{status.phase} {max(0.0, now_s - status.phase_since):.0f} of {startup_s:.0f} s"
