"""`fulcrum status`: the service's line as `kubectl get pds` shows it, its instances, its objectives."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from fulcrum_autoscaler.routers import HttpRouter, RouterAway, open_router
from fulcrum_cli.running import find_running
from fulcrum_cluster.client import open_store
from fulcrum_core.api.meta import format_duration
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import NotFound
from fulcrum_core.state import RouterState
from fulcrum_operator.local import RunInfo

_NOTHING = "–"


def run(service: str | None) -> None:
    """Prints how the service stands."""
    console = Console()
    for table in asyncio.run(_tables(find_running(service))):
        console.print(table)


async def _tables(running: RunInfo) -> Sequence[Table | str]:
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
    service_line = service_table(service, state, now_s=time.time())
    return service_line, "", instance_table(instances, assignment, state), f"\nendpoint {running.router_url}"


async def _state(running: RunInfo) -> RouterState | None:
    async with open_router(running.router_state_url, token=running.token) as client:
        try:
            return await HttpRouter(client).state(min_generation=0, timeout_s=0)
        except RouterAway:
            return None


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def service_table(service: PDService, state: RouterState | None, *, now_s: float) -> Table:
    """One line, as `kubectl get pds` prints it."""
    status, created_s = service.status, service.metadata.creation_timestamp
    table = _table("NAME", "MODEL", "READY", "P", "D", "RATIO", "SLO", "FLIPS", "AGE")
    table.add_row(
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
    return table


def attainment(state: RouterState | None) -> str:
    """Requests that met TTFT and TPOT, in per cent of all that were offered, by the router's count."""
    offered = sum(tier.offered for tier in state.tiers) if state else 0
    if state is None or not offered:
        return _NOTHING
    return f"{100 * sum(tier.slo_met for tier in state.tiers) / offered:.1f}"


def instance_table(
    instances: Iterable[PDInstance], assignment: PDAssignment | None, state: RouterState | None
) -> Table:
    """One line an instance: what it is, what it is wished to be, what it carries."""
    table = _table("INSTANCE", "PHASE", "ROLE", "PREFILL", "DECODE", "TOKENS", "ITL", "KV", "RESTARTS", "BY")
    loads = {load.name: load for load in state.instances} if state else {}
    roles = assignment.spec.roles if assignment else {}
    for instance in instances:
        name, load = instance.metadata.name, loads.get(instance.metadata.name)
        wish = roles.get(name)
        table.add_row(
            name,
            instance.status.phase,
            wish.role if wish else _NOTHING,
            f"{load.prefill_queued_s:.2f} s" if load else _NOTHING,
            str(load.decode_requests) if load else _NOTHING,
            str(load.decode_tokens) if load else _NOTHING,
            f"{load.itl_s * 1000:.0f} ms" if load and load.itl_s is not None else _NOTHING,
            f"{load.kv_usage:.0%}" if load and load.kv_usage is not None else _NOTHING,
            str(instance.status.restarts),
            f"{wish.by}{', pinned' if wish.pinned_until else ''}" if wish else _NOTHING,
        )
    return table
