"""Trouble on purpose: flips as fast as they are acknowledged, engines killed on a timer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fulcrum_cli.assignment.write import flip
from fulcrum_cli.play.observer import Observer
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.assignment import serving
from fulcrum_core.errors import Conflict, FulcrumError, InvalidInput
from fulcrum_core.ports import Store
from fulcrum_core.values import Phase, Role

ACKNOWLEDGE_S = 5.0
STUCK_S = 5.0
"""While all instances serve, nothing but a flip changes which of them may flip."""

_BLOCKED_S = 0.05


class Stuck(FulcrumError):
    """No instance may flip, and waiting does not change that."""


@dataclass(slots=True)
class ForcedFlips:
    """Flips one instance after the other, in turn away from prefill and away from decode."""

    store: Store
    observer: Observer
    service: str
    namespace: str
    done: int = 0
    refusal: str = "no instance serves"
    """Why the last flip could not be made."""

    async def run(self, count: int) -> None:
        """Makes `count` flips, each as soon as the router has acknowledged the one before.

        Raises:
            Stuck: if all instances serve and none may flip, `STUCK_S` long.
        """
        clock_s = asyncio.get_running_loop().time
        moved_s = clock_s()
        while self.done < count:
            turn = (Role.PREFILL, Role.DECODE)[self.done % 2]
            if await self._flip_one(turn) or await self._flip_one(turn.other):
                moved_s = clock_s()
                continue
            if not self._all_serve():
                moved_s = clock_s()
            elif clock_s() - moved_s >= STUCK_S:
                raise Stuck(f"no instance may flip: {self.refusal}")
            await asyncio.sleep(_BLOCKED_S)

    def _all_serve(self) -> bool:
        return all(i.status.phase is Phase.SERVING for i in self.observer.instances.values())

    async def _flip_one(self, origin: Role) -> bool:
        """False if no instance may leave that role now, or others write all the time."""
        candidates = self._candidates(await self._assignment(), origin)
        if not candidates:
            return False
        instance = candidates[(self.done // 2) % len(candidates)]
        try:
            changed = await flip(
                self.store,
                self.service,
                instance,
                origin.other,
                namespace=self.namespace,
                reason=f"forced, number {self.done + 1}",
            )
        except (InvalidInput, Conflict) as error:
            self.refusal = str(error)
            return False
        await self.observer.acknowledge(changed.generation, timeout_s=ACKNOWLEDGE_S)
        self.done += 1
        return True

    async def _assignment(self) -> PDAssignment:
        return await self.store.get(PDAssignment, self.service, namespace=self.namespace)

    def _candidates(self, assignment: PDAssignment, origin: Role) -> Sequence[str]:
        instances = self.observer.instances
        ready = [name for name, i in instances.items() if i.status.phase is Phase.SERVING]
        return serving(assignment.spec.roles, ready, origin)


async def kill_in_turn(observer: Observer, kill: Callable[[str], None], *, every_s: float) -> None:
    """Kills a serving engine every so often, each in its turn."""
    killed = 0
    while True:
        await asyncio.sleep(every_s)
        serving_now = [name for name, i in observer.instances.items() if i.status.phase is Phase.SERVING]
        if serving_now:
            kill(serving_now[killed % len(serving_now)])
            killed += 1
