"""For `flip` and `drain`: polls until a written change takes effect, is overruled or times out.

`writes` makes the change; nothing is written or undone here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fulcrum_cli.assignment.writes import AssignmentWrite
from fulcrum_cli.target.connection import TargetConnection
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.errors import FulcrumError, NotFound
from fulcrum_core.values import Role

_POLL_INTERVAL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceObservation:
    """The assignment and the instance, read after a change was written; each is None if it was deleted."""

    assignment: PDAssignment | None
    instance: PDInstance | None


class ChangeOverruled(FulcrumError):
    """Another client reverted a written change, the operator refused it, or the instance was deleted."""


async def poll_until(
    observe: Callable[[], Awaitable[T]], done: Callable[[T], bool], *, timeout_s: float
) -> tuple[T, bool]:
    """Call `observe` until `done` accepts its result; return the last result, and whether it was accepted.

    `observe` is called at least once and is never interrupted; a last call may start 0.2 s after `timeout_s`.
    """
    end_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        observation = await observe()
        if done(observation):
            return observation, True
        if asyncio.get_running_loop().time() >= end_s:
            return observation, False
        await asyncio.sleep(_POLL_INTERVAL_S)


async def observe_instance(connection: TargetConnection, write: AssignmentWrite) -> InstanceObservation:
    """Read the assignment and the instance that were written to."""
    service = write.assignment.metadata.name
    try:
        assignment = await connection.store.get(PDAssignment, service, namespace=connection.namespace)
    except NotFound:
        assignment = None
    try:
        instance = await connection.store.get(PDInstance, write.instance, namespace=connection.namespace)
    except NotFound:
        instance = None
    return InstanceObservation(assignment=assignment, instance=instance)


def has_taken_role(observation: InstanceObservation, write: AssignmentWrite, role: Role) -> bool:
    """Whether the instance serves in `role`, or in both roles.

    Raises:
        ChangeOverruled: if the flip was refused or reverted, or the instance was deleted.
    """
    check_not_overruled(observation, write)
    instance = observation.instance
    return instance is not None and instance.is_serving and instance.status.role in (role, Role.BOTH)


def check_not_overruled(observation: InstanceObservation, write: AssignmentWrite) -> None:
    """Raise `ChangeOverruled` if the written role or cordon is no longer in the assignment."""
    name, desired = write.instance, write.entry
    entry = observation.assignment.spec.roles.get(name) if observation.assignment else None
    if entry is None:
        raise ChangeOverruled(f"{name} was deleted")
    if entry.role is not desired.role:
        refused = entry.refused if entry.refused and entry.refused.role is desired.role else None
        if refused:
            raise ChangeOverruled(f"{name} → {desired.role} was refused: {refused.reason}")
        raise ChangeOverruled(
            f"{name} was assigned {entry.role} again by {entry.by}: {entry.reason or 'no reason given'}"
        )
    if desired.cordoned and not entry.cordoned:
        if entry.refused and entry.refused.role is None:
            raise ChangeOverruled(f"draining {name} was refused: {entry.refused.reason}")
        raise ChangeOverruled(f"{name} gets new requests again: another client removed the cordon")


def describe_phase(observation: InstanceObservation) -> str:
    """Describe the instance's phase, for the end of a message."""
    if observation.instance is None:
        return "the instance was deleted"
    status = observation.instance.status
    return f"now {status.phase}" + (f": {status.message}" if status.message else "")
