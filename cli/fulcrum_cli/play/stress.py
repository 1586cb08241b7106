"""Forces flips as fast as they are acknowledged, and kills engines at an interval (--flips, --kill-every)."""

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
NO_FLIP_TIMEOUT_S = 5.0
"""Seconds without a possible flip, while all instances serve, after which none will become possible."""

_RETRY_INTERVAL_S = 0.05


class NoFlipPossible(FulcrumError):
    """No instance may flip, and waiting will not change that."""


@dataclass(slots=True)
class ForcedFlips:
    """Flips one instance after the other, alternating between flips to decode and to prefill."""

    store: Store
    observer: Observer
    service: str
    namespace: str
    flips_made: int = 0
    refusal: str = "no instance serves"
    """Why the last flip was refused."""

    async def run(self, count: int) -> None:
        """Make `count` flips, each as soon as the router has acknowledged the previous one.

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
        """Flip one instance of the role; return False if none may flip or every write conflicted."""
        candidates = self._candidates(await self._assignment(), from_role)
        if not candidates:
            return False
        instance = candidates[(self.flips_made // 2) % len(candidates)]
        try:
            write = await flip_instance(
                self.store,
                self.service,
                instance,
                from_role.other,
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
