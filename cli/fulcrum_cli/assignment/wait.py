"""What becomes of a word that was written: looked at over and over until it is plain, or for too long."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fulcrum_cli.assignment.write import Written
from fulcrum_cli.target.connection import Connection
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.errors import FulcrumError, NotFound
from fulcrum_core.values import Phase, Role

_LOOK_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look at an instance after a word about it; None: it is not there."""

    assignment: PDAssignment | None
    instance: PDInstance | None


class Overruled(FulcrumError):
    """The word was taken back after it had been written."""


async def look_until(
    look: Callable[[], Awaitable[T]], done: Callable[[T], bool], *, timeout_s: float
) -> tuple[T, bool]:
    """The first look that is `done`, or the last one after the time."""
    end_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        seen = await look()
        if done(seen):
            return seen, True
        if asyncio.get_running_loop().time() >= end_s:
            return seen, False
        await asyncio.sleep(_LOOK_S)


async def look(to: Connection, written: Written) -> Sight:
    """The assignment and the instance as they stand."""
    service = written.assignment.metadata.name
    try:
        assignment = await to.store.get(PDAssignment, service, namespace=to.namespace)
    except NotFound:
        assignment = None
    try:
        instance = await to.store.get(PDInstance, written.instance, namespace=to.namespace)
    except NotFound:
        instance = None
    return Sight(assignment=assignment, instance=instance)


def plays(seen: Sight, written: Written, role: Role) -> bool:
    """Whether the instance serves in that role.

    Raises:
        Overruled: if it will not, since the word was refused, changed by somebody, or the instance is gone.
    """
    check_stands(seen, written)
    status = seen.instance.status if seen.instance else None
    return status is not None and status.role in (role, Role.BOTH) and status.phase is Phase.SERVING


def check_stands(seen: Sight, written: Written) -> None:
    """Raises `Overruled` if the word stands no more."""
    name, wished = written.instance, written.entry
    entry = seen.assignment.spec.roles.get(name) if seen.assignment else None
    if entry is None:
        raise Overruled(f"{name} is not there any more")
    if entry.role is not wished.role:
        refused = entry.refused if entry.refused and entry.refused.role is wished.role else None
        if refused:
            raise Overruled(f"{name} → {wished.role} was refused: {refused.reason}")
        raise Overruled(f"{name} was given {entry.role} again by {entry.by}: {entry.reason or 'no reason'}")
    if wished.cordoned and not entry.cordoned:
        if entry.refused and entry.refused.role is None:
            raise Overruled(f"{name} is not drained, that was refused: {entry.refused.reason}")
        raise Overruled(f"{name} takes new work again: somebody lifted the cordon")


def phase_words(seen: Sight) -> str:
    """How the instance stands, in a few words."""
    if seen.instance is None:
        return "it is not there"
    status = seen.instance.status
    return f"it is {status.phase}" + (f": {status.message}" if status.message else "")
