"""`fulcrum flip`: changes an instance's role and reports what happened.

Without --wait, a local run ends with the router's acknowledgement; a cluster, where people cannot read the
router, is observed for `FOLLOW_S`. With --wait the flip is done when the instance has taken the role.
Without --pin, an earlier pin of the instance is removed, also if it already has the role.
"""

import asyncio
import time

from fulcrum_cli.assignment.polling import describe_phase, has_taken_role, observe_instance, poll_until
from fulcrum_cli.assignment.writes import AssignmentWrite, flip_instance
from fulcrum_cli.option_values import parse_choice, parse_duration_s
from fulcrum_cli.program_name import program_name
from fulcrum_cli.target.connection import TargetConnection, connect, find_service_of_instance
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_core.api.meta import format_duration
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.values import Role

FOLLOW_S = 5.0
"""Longest time, in seconds, to wait for the acknowledgement, and for the flip without --wait."""

ENGINE_RESTART_S = 300.0
"""Seconds that restarting the engine may take, in addition to the drain."""


def run(target_options: TargetOptions, instance: str, *, to: str, pin: str | None, wait: bool) -> int:
    """Flip the instance and print the result; return 1 if --wait timed out, else 0."""
    role = parse_choice("--to", to, Role, Role.PREFILL, Role.DECODE)
    pin_s = parse_duration_s("--pin", pin)
    line, done = asyncio.run(_flip(target_options, instance, role, pin_s, wait=wait))
    print(line)
    return 0 if done or not wait else 1


async def _flip(
    target_options: TargetOptions, instance: str, to: Role, pin_s: float | None, *, wait: bool
) -> tuple[str, bool]:
    async with connect(choose_target(target_options), instance=instance) as connection:
        service = await find_service_of_instance(connection, instance)
        write = await flip_instance(
            connection.store, service.metadata.name, instance, to, namespace=connection.namespace,
            reason="by command", pin_s=pin_s,
        )  # fmt: skip
        if write.entry_before.role is to:
            return f"{_describe_unchanged(write, to, pin_s)} ({connection.description})", True
        pinned = "" if pin_s is None else f", pinned for {format_duration(pin_s)}"
        message, done = await _follow(connection, service, write, to, wait=wait)
        return f"{instance} → {to}{pinned}: {message} ({connection.description})", done


def _describe_unchanged(write: AssignmentWrite, to: Role, pin_s: float | None) -> str:
    """Describe a flip of an instance that had the role already."""
    unchanged = f"{write.instance} already has the role {to}"
    if not write.changed:
        return f"{unchanged}: nothing written"
    return f"{unchanged}; " + (
        "its pin was removed" if pin_s is None else f"pinned for {format_duration(pin_s)}"
    )


async def _follow(
    connection: TargetConnection, service: PDService, write: AssignmentWrite, to: Role, *, wait: bool
) -> tuple[str, bool]:
    """Observe the flip; return a message and whether it is done (see the module), not only written."""
    acknowledged = await _wait_acknowledged(connection, write)
    if acknowledged and not wait:
        return acknowledged, True
    if connection.local_run is not None and acknowledged is None and not wait:
        return f"written, but the router did not acknowledge the flip within {FOLLOW_S:g} s", False
    timeout_s = service.spec.drain.timeout + ENGINE_RESTART_S if wait else FOLLOW_S
    observation, done = await poll_until(
        lambda: observe_instance(connection, write),
        lambda observation: has_taken_role(observation, write, to),
        timeout_s=timeout_s,
    )
    if done:
        effect = f"serves {to} {time.time() - write.entry.since:.1f} s after the decision"
        return (f"{acknowledged}, {effect}" if acknowledged else effect), True
    command = f"{program_name()} status {service.metadata.name}"
    return (
        f"written, but not in effect after {timeout_s:g} s, {describe_phase(observation)}; see {command}",
        False,
    )


async def _wait_acknowledged(connection: TargetConnection, write: AssignmentWrite) -> str | None:
    """Describe the router's acknowledgement; None if none comes in `FOLLOW_S`, and always in a cluster."""
    state = await connection.router_state(min_generation=write.generation, timeout_s=FOLLOW_S)
    if state is None or state.generation < write.generation:
        return None
    took_ms = (state.acknowledged_at_s - write.entry.since) * 1000
    return f"acknowledged by the router after {took_ms:.1f} ms"
