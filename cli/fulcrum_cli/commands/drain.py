"""`fulcrum drain`: cordons an instance or removes the cordon; with `--wait`, polls until it is drained.

It changes the assignment only: the pod of a drained instance stays.
"""

import asyncio

from fulcrum_cli.assignment.polling import (
    InstanceObservation,
    check_not_overruled,
    describe_phase,
    observe_instance,
    poll_until,
)
from fulcrum_cli.assignment.writes import AssignmentWrite, set_cordon
from fulcrum_cli.program_name import program_name
from fulcrum_cli.target.connection import TargetConnection, connect, find_service_of_instance
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Phase

STATUS_GRACE_S = 10.0
"""Seconds in addition to the drain timeout, so that the operator can report the end of the drain."""


def run(target_options: TargetOptions, instance: str, *, wait: bool, undo: bool) -> int:
    """Cordon the instance, or remove its cordon; return 1 if --wait timed out, else 0."""
    if undo and wait:
        raise InvalidInput("--wait", "given", "cannot be combined with --undo")
    line, done = asyncio.run(_drain(target_options, instance, wait=wait, undo=undo))
    print(line)
    return 0 if done or not wait else 1


async def _drain(target_options: TargetOptions, instance: str, *, wait: bool, undo: bool) -> tuple[str, bool]:
    async with connect(choose_target(target_options), instance=instance) as connection:
        service = await find_service_of_instance(connection, instance)
        write = await set_cordon(
            connection.store,
            service.metadata.name,
            instance,
            namespace=connection.namespace,
            reason="drained by command",
            cordoned=not undo,
        )
        message = _describe_write(write, undo=undo)
        done = True
        if wait:
            end, done = await _wait_drained(connection, service, write)
            message = f"{message}; {end}"
        return f"{instance}: {message} ({connection.description})", done


def _describe_write(write: AssignmentWrite, *, undo: bool) -> str:
    if undo:
        return "gets new requests again" if write.changed else "was not cordoned: nothing written"
    if not write.changed:
        entry = write.entry_before
        by, reason = entry.effective_cordoned_by, entry.effective_cordon_reason
        return f"was already cordoned by {by} ({reason}): nothing written"
    undo_command = f"{program_name()} drain {write.instance} --undo"
    return f"cordoned, gets no new requests; undo with `{undo_command}`"


async def _wait_drained(
    connection: TargetConnection, service: PDService, write: AssignmentWrite
) -> tuple[str, bool]:
    """Wait until no request is left on the instance, as the operator or the router reports."""
    timeout_s = service.spec.drain.timeout + STATUS_GRACE_S
    (_, observation), done = await poll_until(
        lambda: _observe_drained(connection, write), lambda drained: drained[0], timeout_s=timeout_s
    )
    if not done:
        return f"not drained within {timeout_s:g} s, {describe_phase(observation)}", False
    return "deleted" if observation.instance is None else "drained, no request is left on it", True


async def _observe_drained(
    connection: TargetConnection, write: AssignmentWrite
) -> tuple[bool, InstanceObservation]:
    observation = await observe_instance(connection, write)
    if observation.instance is None:
        return True, observation
    check_not_overruled(observation, write)
    status = observation.instance.status
    reported = status.phase is Phase.DRAINING and status.reason == DRAINED
    return reported or await _is_idle(connection, write), observation


async def _is_idle(connection: TargetConnection, write: AssignmentWrite) -> bool:
    """Whether the router has applied the cordon and the instance is idle; False if it does not respond."""
    state = await connection.router_state()
    if state is None or state.generation < write.generation:
        return False
    states = [instance for instance in state.instances if instance.name == write.instance]
    return all(instance.is_idle(since_s=state.acknowledged_at_s) for instance in states)
