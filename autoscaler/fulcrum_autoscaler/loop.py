"""The control loop of one service: observe, let the policy decide, write the flip.

A decision is triggered by the tick interval or by a flip request of the router; decisions never overlap. A
flip is one conditional write of the PDAssignment: after a conflicting write, the loop reads everything and
decides again. All state that must survive a restart is in the API objects. `supervisor` starts one such loop
for each service. What to flip is decided in `policy`.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import structlog

from fulcrum_autoscaler.decision_history import DecisionHistory
from fulcrum_autoscaler.metrics import ServiceMetrics
from fulcrum_autoscaler.policy import (
    AutoscalingRules,
    DecisionAction,
    FlipDecision,
    Observation,
    PolicyState,
    Trigger,
    decide_on_flip_request,
    decide_on_tick,
    propose_assignment,
)
from fulcrum_autoscaler.policy.intervals import ACKNOWLEDGEMENT_TIMEOUT_S, REFUSAL_PAUSE_S
from fulcrum_cluster.assignment_write import update_assignment
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import build_assignment_rules, list_serving_instances
from fulcrum_core.errors import Conflict, FulcrumError
from fulcrum_core.ports import Clock, Store
from fulcrum_core.router_state import FlipRequest, RouterState

log = structlog.get_logger()

WRITE_ATTEMPTS_MAX = 4
"""Most attempts to decide and write one flip while other writers keep changing the assignment."""
FLIP_REQUEST_POLL_S = 5.0
"""Longest wait of one poll for a flip request: a router on a lost node never responds."""

DecisionFunction = Callable[[Observation, AutoscalingRules, float], tuple[PolicyState, FlipDecision]]


class ServiceObjects(Protocol):
    """The latest known API objects of one service. None or empty where the objects do not exist yet."""

    def service(self) -> PDService | None:
        """The service's PDService."""
        ...

    def assignment(self) -> PDAssignment | None:
        """The service's PDAssignment: the desired role of each instance."""
        ...

    def instances(self) -> Iterable[PDInstance]:
        """The service's PDInstances."""
        ...

    def pools(self) -> Iterable[PDPool]:
        """The service's PDPools."""
        ...


class RouterClient(Protocol):
    """The state port of the service's router."""

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """Return the router's state once it has applied the generation, else its state after `timeout_s`.

        Raises:
            RouterUnavailable: if there is no usable response.
        """
        ...

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """Return the last flip request, if its sequence number is above `after`; None after `timeout_s`.

        Raises:
            RouterUnavailable: if there is no usable response.
        """
        ...


class ServiceAutoscaler:
    """The control loop of one service."""

    def __init__(
        self,
        *,
        objects: ServiceObjects,
        store: Store,
        router: RouterClient,
        clock: Clock,
        history: DecisionHistory,
        metrics: ServiceMetrics,
    ) -> None:
        self._objects, self._store, self._router = objects, store, router
        self._clock, self._history, self._metrics = clock, history, metrics
        self._policy_state = PolicyState()
        self._decision_lock = asyncio.Lock()

    async def run(self) -> None:
        """Run ticks and handle flip requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_ticks())
            tasks.create_task(self._handle_flip_requests())

    async def tick(self) -> FlipDecision:
        """Let the service's policy decide once, and write the flips that it decides on."""
        return await self._decide_and_record(
            Trigger.TICK,
            lambda observation, rules, now_s: decide_on_tick(
                self._policy_state, observation, rules, now_s=now_s
            ),
        )

    async def handle_flip_request(self, request: FlipRequest) -> FlipDecision:
        """Decide on one flip request of the router and write the flip."""
        return await self._decide_and_record(
            Trigger.FLIP_REQUEST,
            lambda observation, rules, now_s: decide_on_flip_request(
                self._policy_state, request, observation, rules, now_s=now_s
            ),
        )

    async def handle_next_flip_request(self, after: int) -> int:
        """Wait for flip requests with sequence numbers above `after`, handle them, return the next `after`.

        If the last one causes no flip, the one for the other role is handled, too. Flip requests that the
        router sent before it had applied a flip are skipped: one burst of client requests must not flip one
        instance for each of them.
        """
        request = await self._router.wait_for_flip_request(after=after, timeout_s=FLIP_REQUEST_POLL_S)
        if request is None:  # a restarted router numbers its flip requests from 0 again
            return min(after, (await self._router.get_state(min_generation=0, timeout_s=0)).flip_request_seq)
        for unread in (request, request.other):
            if unread is None:
                continue
            decision = await self.handle_flip_request(unread)
            if decision.action is DecisionAction.FLIP:
                state = await self._router.get_state(
                    min_generation=decision.generation + 1, timeout_s=ACKNOWLEDGEMENT_TIMEOUT_S
                )
                return max(request.seq, state.flip_request_seq)
        await asyncio.sleep(REFUSAL_PAUSE_S)
        return request.seq

    async def _run_ticks(self) -> None:
        due_s = self._clock.monotonic_s()
        while True:
            await self.tick()
            now_s = self._clock.monotonic_s()
            due_s = max(due_s + self._tick_interval_s(), now_s)
            await asyncio.sleep(due_s - now_s)

    async def _handle_flip_requests(self) -> None:
        while True:
            try:
                # Skip flip requests from before this loop started. A restarted router numbers from 0 again.
                after = (await self._router.get_state(min_generation=0, timeout_s=0)).flip_request_seq
                while True:
                    after = await self.handle_next_flip_request(after)
            except RouterUnavailable:
                await asyncio.sleep(self._tick_interval_s())

    def _tick_interval_s(self) -> float:
        service = self._objects.service()
        return service.spec.autoscaling.arrow.interval if service else 1.0

    async def _decide_and_record(self, trigger: Trigger, decide: DecisionFunction) -> FlipDecision:
        began_s = self._clock.now_s()
        async with self._decision_lock:
            decision = await self._decide_and_write(trigger, decide)
        self._history.record(decision)
        self._metrics.record_decision(decision)
        self._metrics.trace_flip(decision, began_s=began_s, now_s=self._clock.now_s())
        if decision.action is DecisionAction.FLIP:
            instances = (decision.instance, *decision.further_instances)
            log.info("instances flipped", instances=instances, to=decision.to, reason=decision.reason)
        return decision

    async def _decide_and_write(self, trigger: Trigger, decide: DecisionFunction) -> FlipDecision:
        service, assignment = self._objects.service(), self._objects.assignment()
        if service is None or assignment is None:
            missing = "PDService" if service is None else "PDAssignment"
            return self._hold_decision(trigger, f"cannot decide: the store has no {missing}")
        assignment_rules = build_assignment_rules(
            service.spec, self._objects.pools(), self._objects.instances()
        )
        rules = AutoscalingRules.from_spec(service.spec, assignment_rules=assignment_rules)
        self._metrics.record_rules(rules)
        policy_state, decision = self._policy_state, self._hold_decision(trigger, "not decided yet")

        async def propose(current: PDAssignment) -> PDAssignmentSpec | None:
            nonlocal policy_state, decision
            observation = await self._observe(current)
            policy_state, decision = decide(observation, rules, self._clock.now_s())
            if decision.action is not DecisionAction.FLIP:
                return None
            return propose_assignment(current.spec, decision)

        try:
            update = await update_assignment(
                self._store,
                service.metadata.name,
                propose,
                namespace=assignment.metadata.namespace,
                clock=self._clock,
                attempts_max=WRITE_ATTEMPTS_MAX,
                current=assignment,
                configuration=(service, tuple(self._objects.pools())),
                on_conflict=self._metrics.write_conflicts.inc,
            )
        except Conflict:
            return _refuse_unwritten(
                decision, f"other writers changed the assignment first, {WRITE_ATTEMPTS_MAX} times"
            )
        except FulcrumError as error:
            return _refuse_unwritten(decision, f"the store did not accept the write: {error}")
        if update.refusal:
            return _refuse_unwritten(decision, f"the serving instances have changed: {update.refusal}")
        self._policy_state = policy_state
        return decision

    async def _observe(self, assignment: PDAssignment) -> Observation:
        generation = assignment.metadata.generation
        state = await self._read_router_state(generation)
        observation = Observation(
            assignment=assignment.spec,
            generation=generation,
            serving_by_phase=list_serving_instances(self._objects.instances()),
            router=state,
        )
        self._metrics.record_observation(observation, now_s=self._clock.now_s())
        return observation

    async def _read_router_state(self, generation: int) -> RouterState | None:
        try:
            return await self._router.get_state(
                min_generation=generation, timeout_s=ACKNOWLEDGEMENT_TIMEOUT_S
            )
        except RouterUnavailable:
            return None

    def _hold_decision(self, trigger: Trigger, reason: str) -> FlipDecision:
        return FlipDecision(
            at_s=self._clock.now_s(), action=DecisionAction.HOLD, trigger=trigger, reason=reason
        )


def _refuse_unwritten(decision: FlipDecision, reason: str) -> FlipDecision:
    """Return the refusal that replaces a decision whose flip was not written. The next tick decides again."""
    return replace(decision, action=DecisionAction.REFUSE, reason=f"{decision.reason}; not written: {reason}")
