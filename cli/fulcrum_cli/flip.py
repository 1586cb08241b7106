"""`fulcrum flip`: a person's word about one instance's role."""

import asyncio

from fulcrum_autoscaler.routers import HttpRouter, RouterAway, open_router
from fulcrum_cli.arguments import duration_s, one_of
from fulcrum_cli.flipping import flip
from fulcrum_cli.running import find_running
from fulcrum_cluster.client import open_store
from fulcrum_core.api.meta import format_duration
from fulcrum_core.values import Role
from fulcrum_operator.local import RunInfo

ACKNOWLEDGE_S = 5.0


def run(service: str, instance: str, *, to: str, pin: str | None) -> None:
    """Flips the instance and waits until the router has acknowledged it."""
    role = one_of("--to", to, Role, Role.PREFILL, Role.DECODE)
    pin_s = duration_s("--pin", pin)
    print(asyncio.run(_flip(find_running(service), instance, role, pin_s)))


async def _flip(running: RunInfo, instance: str, to: Role, pin_s: float | None) -> str:
    async with (
        open_store(running.store) as store,
        open_router(running.router_state_url, token=running.token) as client,
    ):
        changed = await flip(
            store,
            running.service,
            instance,
            to,
            namespace=running.namespace,
            reason="by command",
            pin_s=pin_s,
        )
        generation = changed.metadata.generation
        since_s = changed.spec.roles[instance].since
        try:
            state = await HttpRouter(client).state(min_generation=generation, timeout_s=ACKNOWLEDGE_S)
        except RouterAway as error:
            return f"{instance} → {to}: written, but the router does not answer ({error})"
    pinned = "" if pin_s is None else f", pinned for {format_duration(pin_s)}"
    if state.generation < generation:
        return f"{instance} → {to}{pinned}: written, not acknowledged within {ACKNOWLEDGE_S:g} s"
    took_ms = (state.acknowledged_at_s - since_s) * 1000
    return f"{instance} → {to}{pinned}: acknowledged by the router after {took_ms:.1f} ms"
