"""For `play`: makes flips one after the other (--flips) and kills engines at an interval (--kill-every).

`session` runs both beside the load. A flip is one checked assignment write; nothing forces a refused one.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.play.observer import Observer
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.assignment import list_assigned
from fulcrum_core.errors import Conflict, FulcrumError, InvalidInput
from fulcrum_core.ports import Store
from fulcrum_core.values import Role

ACKNOWLEDGE_TIMEOUT_S = 5.0
"""Longest wait for the router's acknowledgement of a flip. After it the flip counts as made."""
NO_FLIP_TIMEOUT_S = 5.0
"""If all instances serve and every flip is refused for this long, `run` gives up."""

_RETRY_INTERVAL_S = 0.05


class NoFlipPossible(FulcrumError):
    """No instance may flip, and waiting will not change that."""


@dataclass(slots=True)
class ForcedFlips:
    """Flips one instance after the other, to decode and to prefill in turn.

    If no instance may flip in one direction, one is flipped in the other.
    """

    store: Store
    observer: Observer
    service: str
    namespace: str
    flips_made: int = 0
    refusal: str = "no instance serves"
    """Why the last flip was refused."""

    async def run(self, count: int) -> None:
        """Make `count` flips, each once the previous one is acknowledged or its wait timed out.

        Raises:
            NoFlipPossible: if all instances serve and none may flip for `NO_FLIP_TIMEOUT_S`.
        """
        clock_s = asyncio.get_running_loop().time
        last_flip_s = clock_s()
        while self.flips_made < count:
            from_role = (Role.PREFILL, Role.DECODE)[self.flips_made % 2]
            if await self._flip_one(from_role) or await self._flip_one(from_role.other):
                last_flip_s = clock_s()
                continue
            if not self._all_serving():
                last_flip_s = clock_s()
            elif clock_s() - last_flip_s >= NO_FLIP_TIMEOUT_S:
                raise NoFlipPossible(f"no instance may flip: {self.refusal}")
            await asyncio.sleep(_RETRY_INTERVAL_S)

    def _all_serving(self) -> bool:
        return all(i.is_serving for i in self.observer.instances.values())

    async def _flip_one(self, from_role: Role) -> bool:
        """Flip the next instance of the role that may flip; False if none may, or all writes conflicted."""
        candidates = self._candidates(await self._assignment(), from_role)
        first = self.flips_made // 2
        for number in range(len(candidates)):
            if await self._flip(candidates[(first + number) % len(candidates)], from_role.other):
                return True
        return False

    async def _flip(self, instance: str, role: Role) -> bool:
        """Flip the instance, and wait for the acknowledgement; False if it is refused or conflicts."""
        try:
            write = await flip_instance(
                self.store,
                self.service,
                instance,
                role,
                namespace=self.namespace,
                reason=f"forced, number {self.flips_made + 1}",
            )
        except (InvalidInput, Conflict) as error:
            self.refusal = str(error)
            return False
        await self.observer.wait_acknowledged(write.generation, timeout_s=ACKNOWLEDGE_TIMEOUT_S)
        self.flips_made += 1
        return True

    async def _assignment(self) -> PDAssignment:
        return await self.store.get(PDAssignment, self.service, namespace=self.namespace)

    def _candidates(self, assignment: PDAssignment, from_role: Role) -> Sequence[str]:
        instances = self.observer.instances
        ready = [name for name, i in instances.items() if i.is_serving]
        return list_assigned(assignment.spec.roles, ready, from_role)


async def kill_engines_in_turn(observer: Observer, kill: Callable[[str], None], *, every_s: float) -> None:
    """Kill a serving engine every `every_s` seconds, each instance in turn."""
    killed = 0
    while True:
        await asyncio.sleep(every_s)
        serving_now = [name for name, i in observer.instances.items() if i.is_serving]
        if serving_now:
            kill(serving_now[killed % len(serving_now)])
            killed += 1
