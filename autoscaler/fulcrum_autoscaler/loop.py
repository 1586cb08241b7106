"""The fast loop: observe, ask the policy, write the flip.

One decision at a time, woken by its interval or by the router's "flip wanted". A flip is one conditional
write of the PDAssignment; where somebody else wrote first, all is read and decided again. What outlives this
process stands in the objects, so it may be restarted at any point.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import structlog

from fulcrum_autoscaler.journal import Journal
from fulcrum_autoscaler.meters import Meters
from fulcrum_autoscaler.policy import (
    Action,
    Decision,
    FlipRules,
    Memory,
    Observation,
    Trigger,
    answer,
    monitor,
    proposal,
)
from fulcrum_autoscaler.routers import RouterAway, RouterPort
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import may_apply, rules_of
from fulcrum_core.errors import Conflict, FulcrumError
from fulcrum_core.merge import merge_diff
from fulcrum_core.ports import Clock, Store
from fulcrum_core.state import FlipWanted, RouterState
from fulcrum_core.values import Phase

log = structlog.get_logger()

WRITE_TRIES = 4
"""How often a flip is decided anew after somebody else's write before it is given up."""
ACK_WAIT_S = 0.25
"""How long the router is given to apply the generation that a decision starts from."""
WANTED_POLL_S = 5.0
""""Flip wanted" is waited for so long at a time: a router whose node is gone says nothing at all."""
AFTER_REFUSAL_S = 0.1
"""Pause after a refused "flip wanted": an overloaded router asks with every request."""

Decide = Callable[[Observation, FlipRules, float], tuple[Memory, Decision]]


class Desired(Protocol):
    """The objects of one service as last seen. None or empty where there are none yet."""

    def service(self) -> PDService | None:
        """What the user wrote."""
        ...

    def assignment(self) -> PDAssignment | None:
        """Who shall play which role."""
        ...

    def instances(self) -> Iterable[PDInstance]:
        """The service's instances."""
        ...

    def pools(self) -> Iterable[PDPool]:
        """The service's pools."""
        ...


class Autoscaler:
    """The loop of one service."""

    def __init__(
        self,
        *,
        desired: Desired,
        store: Store,
        router: RouterPort,
        clock: Clock,
        journal: Journal,
        meters: Meters,
    ) -> None:
        self._desired, self._store, self._router = desired, store, router
        self._clock, self._journal, self._meters = clock, journal, meters
        self._memory = Memory()
        self._deciding = asyncio.Lock()

    async def run(self) -> None:
        """Tick and answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick_for_ever())
            tasks.create_task(self._answer_for_ever())

    async def tick(self) -> Decision:
        """One pass of the monitor."""
        return await self._decide(
            Trigger.TICK, lambda seen, rules, now_s: monitor(self._memory, seen, rules, now_s=now_s)
        )

    async def answer(self, wanted: FlipWanted) -> Decision:
        """Answer one "flip wanted". A flip starts the monitor's count again: its passes saw the old split."""

        def decide(seen: Observation, rules: FlipRules, now_s: float) -> tuple[Memory, Decision]:
            decision = answer(wanted, seen, rules, now_s=now_s)
            return (Memory() if decision.action is Action.FLIP else self._memory), decision

        return await self._decide(Trigger.WANTED, decide)

    async def answer_next(self, after: int) -> int:
        """Wait for one "flip wanted" after number `after`, answer it, and say from which number to go on.

        What the router wanted before it had applied a flip, that flip has answered: one burst of requests
        shall not flip an instance for each of them.
        """
        wanted = await self._router.flip_wanted(after=after, timeout_s=WANTED_POLL_S)
        if wanted is None:  # a router that was restarted meanwhile counts from 0 again
            return min(after, (await self._router.state(min_generation=0, timeout_s=0)).flip_wanted_seq)
        decision = await self.answer(wanted)
        if decision.action is Action.FLIP:
            state = await self._router.state(min_generation=decision.generation + 1, timeout_s=ACK_WAIT_S)
            return max(wanted.seq, state.flip_wanted_seq)
        await asyncio.sleep(AFTER_REFUSAL_S)
        return wanted.seq

    async def _tick_for_ever(self) -> None:
        due_s = self._clock.monotonic_s()
        while True:
            await self.tick()
            now_s = self._clock.monotonic_s()
            due_s = max(due_s + self._interval_s(), now_s)
            await asyncio.sleep(due_s - now_s)

    async def _answer_for_ever(self) -> None:
        while True:
            try:
                # A restarted router counts from 0 again, and what it wanted before we came is no news.
                after = (await self._router.state(min_generation=0, timeout_s=0)).flip_wanted_seq
                while True:
                    after = await self.answer_next(after)
            except RouterAway:
                await asyncio.sleep(self._interval_s())

    def _interval_s(self) -> float:
        service = self._desired.service()
        return service.spec.autoscaling.arrow.interval if service else 1.0

    async def _decide(self, trigger: Trigger, decide: Decide) -> Decision:
        async with self._deciding:
            decision = await self._decide_and_write(trigger, decide)
        self._journal.record(decision)
        self._meters.count(decision)
        if decision.action is Action.FLIP:
            log.info("instance flipped", instance=decision.instance, to=decision.to, reason=decision.reason)
        return decision

    async def _decide_and_write(self, trigger: Trigger, decide: Decide) -> Decision:
        service, assignment = self._desired.service(), self._desired.assignment()
        if service is None or assignment is None:
            missing = "PDService" if service is None else "PDAssignment"
            return self._hold(trigger, f"cannot tell: the store shows no {missing}")
        judge = rules_of(service.spec, self._desired.pools(), self._desired.instances())
        rules = FlipRules.of(service.spec, assignment=judge)
        try:
            for _ in range(WRITE_TRIES):
                seen = await self._observe(assignment)
                memory, decision = decide(seen, rules, self._clock.now_s())
                if decision.action is Action.FLIP:
                    wish = proposal(assignment.spec, decision)
                    refusal = await self._refusal(service, assignment, wish)
                    if refusal:
                        return _unwritten(decision, f"what serves has changed: {refusal}")
                    if not await self._wrote(assignment, wish):
                        name, namespace = assignment.metadata.name, assignment.metadata.namespace
                        assignment = await self._store.get(PDAssignment, name, namespace=namespace)
                        continue
                self._memory = memory
                return decision
        except FulcrumError as error:
            return _unwritten(decision, f"the store refused: {error}")
        return _unwritten(decision, f"others wrote the assignment first, {WRITE_TRIES} times")

    async def _observe(self, assignment: PDAssignment) -> Observation:
        generation = assignment.metadata.generation
        state = await self._state(generation)
        seen = Observation(
            assignment=assignment.spec,
            generation=generation,
            ready=_serving(self._desired.instances()),
            router=state,
        )
        self._meters.observe(seen, now_s=self._clock.now_s())
        return seen

    async def _state(self, generation: int) -> RouterState | None:
        try:
            return await self._router.state(min_generation=generation, timeout_s=ACK_WAIT_S)
        except RouterAway:
            return None

    async def _refusal(self, service: PDService, assignment: PDAssignment, wish: PDAssignmentSpec) -> str:
        """Why the flip may not be, judged by instances read after the assignment; empty if it may.

        Watches tell of instances and of the assignment apart: an instance that was replaced under its name
        can look as if it still served. Whatever leaves is cordoned first, so that the write of a flip that
        later instances allowed fails if one of them has begun to leave.
        """
        listed = await self._store.list(PDInstance, namespace=assignment.metadata.namespace)
        instances = [i for i in listed.items if i.spec.service == service.metadata.name]
        verdict = may_apply(
            assignment.spec,
            wish,
            _serving(instances),
            rules_of(service.spec, self._desired.pools(), instances),
            now_s=self._clock.now_s(),
        )
        return "" if verdict.allowed else verdict.reason

    async def _wrote(self, assignment: PDAssignment, wish: PDAssignmentSpec) -> bool:
        """Whether the flip was written; False if somebody else wrote since the assignment was read."""
        try:
            await self._store.patch(
                PDAssignment,
                assignment.metadata.name,
                {"spec": merge_diff(assignment.spec.dump(), wish.dump())},
                namespace=assignment.metadata.namespace,
                resource_version=assignment.metadata.resource_version,
            )
        except Conflict:
            self._meters.conflicts.inc()
            return False
        return True

    def _hold(self, trigger: Trigger, reason: str) -> Decision:
        return Decision(at_s=self._clock.now_s(), action=Action.HOLD, trigger=trigger, reason=reason)


def _serving(instances: Iterable[PDInstance]) -> frozenset[str]:
    return frozenset(
        i.metadata.name
        for i in instances
        if i.status.phase is Phase.SERVING and i.metadata.deletion_timestamp is None
    )


def _unwritten(decision: Decision, reason: str) -> Decision:
    """A decision to flip that could not be written. The next tick decides anew."""
    return replace(decision, action=Action.REFUSE, reason=f"{decision.reason}; not written: {reason}")
