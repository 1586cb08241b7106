"""What becomes of a word that was written: looked at over and over until it is plain, or for too long."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fulcrum_cli.assignment.writes import AssignmentWrite
from fulcrum_cli.target.connection import TargetConnection
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.errors import FulcrumError, NotFound
from fulcrum_core.values import Phase, Role

_POLL_INTERVAL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceObservation:
    """One look at an instance after a word about it; None: it is not there."""

    assignment: PDAssignment | None
    instance: PDInstance | None


class ChangeOverruled(FulcrumError):
    """The word was taken back after it had been written."""


async def poll_until(
    observe: Callable[[], Awaitable[T]], done: Callable[[T], bool], *, timeout_s: float
) -> tuple[T, bool]:
    """The first look that is `done`, or the last one after the time."""
    end_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        observation = await observe()
        if done(observation):
            return observation, True
        if asyncio.get_running_loop().time() >= end_s:
            return observation, False
        await asyncio.sleep(_POLL_INTERVAL_S)


async def observe_instance(connection: TargetConnection, write: AssignmentWrite) -> InstanceObservation:
    """The assignment and the instance as they stand."""
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
    """Whether the instance serves in that role.

    Raises:
        ChangeOverruled: if it will not, since the word was refused, changed by somebody, or the instance is
        gone.
    """
    check_not_overruled(observation, write)
    status = observation.instance.status if observation.instance else None
    return status is not None and status.role in (role, Role.BOTH) and status.phase is Phase.SERVING


def check_not_overruled(observation: InstanceObservation, write: AssignmentWrite) -> None:
    """Raises `ChangeOverruled` if the word stands no more."""
    name, desired = write.instance, write.entry
    entry = observation.assignment.spec.roles.get(name) if observation.assignment else None
    if entry is None:
        raise ChangeOverruled(f"{name} is not there any more")
    if entry.role is not desired.role:
        refused = entry.refused if entry.refused and entry.refused.role is desired.role else None
        if refused:
            raise ChangeOverruled(f"{name} → {desired.role} was refused: {refused.reason}")
        raise ChangeOverruled(
            f"{name} was given {entry.role} again by {entry.by}: {entry.reason or 'no reason'}"
        )
    if desired.cordoned and not entry.cordoned:
        if entry.refused and entry.refused.role is None:
            raise ChangeOverruled(f"{name} is not drained, that was refused: {entry.refused.reason}")
        raise ChangeOverruled(f"{name} takes new work again: somebody lifted the cordon")


def describe_phase(observation: InstanceObservation) -> str:
    """How the instance stands, in a few words."""
    if observation.instance is None:
        return "it is not there"
    status = observation.instance.status
    return f"it is {status.phase}" + (f": {status.message}" if status.message else "")
