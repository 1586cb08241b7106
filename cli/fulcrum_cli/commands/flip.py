"""`fulcrum flip`: a person's word about one instance's role, and what became of it."""

import asyncio
import time

from fulcrum_cli.assignment.wait import look, look_until, phase_words, plays
from fulcrum_cli.assignment.write import Written, flip
from fulcrum_cli.target.connection import Connection, connected
from fulcrum_cli.target.instance_service import service_of
from fulcrum_cli.target.target import Asked, choose_target
from fulcrum_cli.terminal.arguments import duration_s, one_of
from fulcrum_cli.terminal.program import program_name
from fulcrum_core.api.meta import format_duration
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.values import Role

LOOK_S = 5.0
"""For how long a flip is followed if nobody asked to wait."""

START_S = 300.0
"""What an engine that has to be started anew may take, on top of the drain."""


def run(asked: Asked, instance: str, *, to: str, pin: str | None, wait: bool) -> int:
    """Flips the instance and says what was seen of it; 1 if somebody waited in vain."""
    role = one_of("--to", to, Role, Role.PREFILL, Role.DECODE)
    pin_s = duration_s("--pin", pin)
    line, done = asyncio.run(_flip(asked, instance, role, pin_s, wait=wait))
    print(line)
    return 0 if done or not wait else 1


async def _flip(
    asked: Asked, instance: str, to: Role, pin_s: float | None, *, wait: bool
) -> tuple[str, bool]:
    async with connected(choose_target(asked), of_instance=instance) as there:
        service = await service_of(there, instance)
        written = await flip(
            there.store, service.metadata.name, instance, to, namespace=there.namespace,
            reason="by command", pin_s=pin_s,
        )  # fmt: skip
        if written.before.role is to:
            return f"{_held(written, to, pin_s)} ({there.words})", True
        pinned = "" if pin_s is None else f", pinned for {format_duration(pin_s)}"
        words, done = await _became(there, service, written, to, wait=wait)
        return f"{instance} → {to}{pinned}: {words} ({there.words})", done


def _held(written: Written, to: Role, pin_s: float | None) -> str:
    """What is said of an instance that had the role: it was not flipped."""
    held = f"{written.instance} has the role {to} already"
    if not written.changed:
        return f"{held}: nothing written"
    return f"{held}; " + ("its pin is taken off" if pin_s is None else f"pinned for {format_duration(pin_s)}")


async def _became(
    there: Connection, service: PDService, written: Written, to: Role, *, wait: bool
) -> tuple[str, bool]:
    """What was seen of the flip, and whether that was its end."""
    acknowledged = await _acknowledged(there, written)
    if acknowledged and not wait:
        return acknowledged, True
    if there.run is not None and acknowledged is None and not wait:
        return f"written, but the router did not acknowledge it within {LOOK_S:g} s", False
    patience_s = service.spec.drain.timeout + START_S if wait else LOOK_S
    seen, done = await look_until(
        lambda: look(there, written), lambda seen: plays(seen, written, to), timeout_s=patience_s
    )
    if done:
        took = f"plays it {time.time() - written.entry.since:.1f} s after the decision"
        return (f"{acknowledged}, {took}" if acknowledged else took), True
    how = f"{program_name()} status {service.metadata.name}"
    return f"written, not played within {patience_s:g} s, {phase_words(seen)}; see {how}", False


async def _acknowledged(there: Connection, written: Written) -> str | None:
    """The router's own word, where it can be asked; None: it cannot, or has none."""
    state = await there.router_state(min_generation=written.generation, timeout_s=LOOK_S)
    if state is None or state.generation < written.generation:
        return None
    took_ms = (state.acknowledged_at_s - written.entry.since) * 1000
    return f"acknowledged by the router after {took_ms:.1f} ms"
