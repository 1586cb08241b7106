"""A simulated cluster for the operator's plan: objects in dictionaries, a clock, and engines that fail.

The tests apply each plan to it, as the controller would. Engines start, die or get lost when a test says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fulcrum_core.api import (
    EngineIdentitySpec,
    PDAssignment,
    PDAssignmentSpec,
    PDInstance,
    PDPool,
    PDService,
    Resource,
    conditions,
)
from fulcrum_core.assignment import group_by_compatibility, list_assigned
from fulcrum_core.ports import EngineObservation, EngineState, NodeDeparture
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.plan import Observed, Plan, plan_service
from fulcrum_operator.plan.observed import EngineFacts
from tests.unit.core.router_states import instance_state, router_state

STARTUP_S = 4.0
TERMINATION_S = 2.0
BAD_PROFILE = "bad"
"""Engines of this profile exit as soon as they are started."""
BOTH = (Role.PREFILL, Role.DECODE)


@dataclass(slots=True)
class SimulatedEngine:
    """One engine. It runs with the spec that its instance had at its start."""

    created_from: PDInstance
    ready_at_s: float
    state: EngineState = EngineState.STARTING
    restarts: int = 0
    ends_at_s: float | None = None
    endpoint: str | None = None
    """Endpoint that is known before the engine serves."""
    placed: bool = True
    """Whether a node has room for it; `ready_at_s` counts only then."""
    exit_reason: str | None = None
    is_bad: bool = False
    """Whether it exits whenever it is started."""


@dataclass(slots=True)
class SimulatedService:
    """One service, its objects and its engines."""

    service: PDService
    now_s: float = 1_800_000_000.0
    pools: dict[str, PDPool] = field(default_factory=dict)
    instances: dict[str, PDInstance] = field(default_factory=dict)
    assignment: PDAssignment | None = None
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    accepted: PDAssignmentSpec | None = None
    router_up: bool = True
    capacity: int | None = None
    """Engines for which nodes that are not cordoned have room; None: any number."""
    cordoned: dict[str, NodeDeparture] = field(default_factory=dict)
    """Instances whose nodes are cordoned, or will be deleted; these take no part of `capacity`."""
    starts_fail: bool = False
    """Whether engines that start from now on exit at once."""
    starts_hang: bool = False
    """Whether engines that start from now on never serve."""
    refuses_instances: bool = False
    """Whether the API server refuses new PDInstances."""
    min_available: int = 0
    """The disruption budget of the last plan."""
    disturbed: set[str] = field(default_factory=set)
    """Instances that lost their engine, or part of it, since the last reconcile."""

    def observe(self) -> Observed:
        """Return the operator's observation at this time."""
        return Observed(
            service=self.service,
            now_s=self.now_s,
            pools=tuple(self.pools.values()),
            instances=tuple(self.instances.values()),
            assignment=self.assignment,
            engines={name: self._observation(name, engine) for name, engine in self.engines.items()},
            engine_facts={name: _facts(instance) for name, instance in self.instances.items()},
            router=self._router() if self.router_up else None,
            endpoint="http://127.0.0.1:8000",
            accepted_assignment=self.accepted,
        )

    def reconcile(self) -> tuple[Observed, Plan]:
        """Run one reconcile; returns the observation and the plan that was applied."""
        observed = self.observe()
        plan = plan_service(observed)
        for obj in plan.objects:
            self._store(obj)
        for obj in plan.delete:
            self._drop(obj)
        for instance in plan.start:
            name = instance.metadata.name
            if name not in self.engines and name in self.instances:
                placed = self._has_room()
                ready_at_s = math.inf if self.starts_hang else self.now_s + STARTUP_S
                self.engines[name] = SimulatedEngine(
                    self.instances[name], ready_at_s, placed=placed, is_bad=self.starts_fail
                )
        for name in plan.stop:
            engine = self.engines[name]
            engine.ends_at_s = engine.ends_at_s or self.now_s + TERMINATION_S
        self.accepted, self.min_available = plan.accepted_assignment, plan.min_available
        self.disturbed.clear()
        return observed, plan

    def advance(self, seconds: float) -> None:
        """Move the clock; engines finish starting or stopping."""
        self.now_s += seconds
        for name, engine in list(self.engines.items()):
            if engine.ends_at_s is not None and engine.ends_at_s <= self.now_s:
                del self.engines[name]
                self.cordoned.pop(name, None)
            elif not engine.placed:
                engine.placed, engine.ready_at_s = self._has_room(), self.now_s + STARTUP_S
            elif (
                engine.state in (EngineState.STARTING, EngineState.EXITED) and engine.ready_at_s <= self.now_s
            ):
                self._finish_startup(engine)

    def settle(self, reconciles: int = 400) -> int:
        """Reconcile and advance until nothing changes; returns the number of reconciles."""
        for number in range(reconciles):
            before = (dict(self.instances), dict(self.pools), self.assignment, self.service.status)
            self.reconcile()
            moving = any(e.state is not EngineState.RUNNING or e.ends_at_s for e in self.engines.values())
            if before == (self.instances, self.pools, self.assignment, self.service.status) and not moving:
                return number
            self.advance(2.0)
        raise AssertionError(f"does not settle: {self.describe()}")

    def describe(self) -> str:
        """Describe the instances in one line."""
        roles = self.assignment.spec.roles if self.assignment else {}
        return ", ".join(
            f"{n} {i.status.phase} {i.spec.revision[:4]} {roles[n].role if n in roles else '-'}"
            f"{' cordoned' if n in roles and roles[n].cordoned else ''} ({i.status.message})"
            for n, i in sorted(self.instances.items())
        )

    def serving_names(self, spec: PDAssignmentSpec, role: Role) -> set[str]:
        """Return the instances that serve `role` under this assignment and have an engine."""
        ready = {
            name
            for name, instance in self.instances.items()
            if instance.status.phase is Phase.SERVING
            and name in self.engines
            and instance.spec.role in (None, role)
        }
        return set(list_assigned(spec.roles, ready, role))

    def groups_missing_a_role(self) -> list[list[str]]:
        """Return the compatible groups of serving instances that lack a role, if there are several groups.

        Engines started for prefill only cannot decode. Where the floors need all instances, the last such
        engine of the old revision may idle until the next one of the new revision serves, as long as other
        groups serve both roles.
        """
        up = [i for i in self.instances.values() if i.status.phase is Phase.SERVING]
        group = group_by_compatibility(up)
        numbers = set(group.values())
        members = {n: [i for i in up if group[i.metadata.name] == n] for n in numbers}
        incomplete = {n for n in numbers if not _serve_both(members[n])}
        idle = {n for n in incomplete if all(i.spec.role is Role.PREFILL for i in members[n])}
        if incomplete == idle and incomplete != numbers:
            return []
        return [sorted(i.metadata.name for i in members[n]) for n in incomplete] if len(numbers) > 1 else []

    def edit_service(self, **spec: Any) -> None:
        """Edit the spec as a user would."""
        dump = self.service.dump()
        dump["spec"] = {**dump["spec"], **spec}
        changed = PDService.model_validate(dump)
        meta = self.service.metadata.model_copy(update={"generation": self.service.metadata.generation + 1})
        self.service = self.service.replace(spec=changed.spec, metadata=meta)

    def scale(self, pool: str, replicas: int) -> None:
        """Scale a pool, like `kubectl scale`."""
        spec = self.pools[pool].spec.model_copy(update={"replicas": replicas})
        self.pools[pool] = self.pools[pool].replace(spec=spec)

    def write_assignment(self, spec: PDAssignmentSpec) -> None:
        """Write the assignment as any actor would."""
        assert self.assignment
        meta = self.assignment.metadata
        if spec != self.assignment.spec:
            meta = meta.model_copy(update={"generation": meta.generation + 1})
        self.assignment = self.assignment.replace(spec=spec, metadata=meta)

    def crash(self, name: str) -> None:
        """End an engine's process, which is restarted in place."""
        engine = self.engines[name]
        engine.state, engine.ready_at_s = EngineState.EXITED, self.now_s + STARTUP_S
        engine.restarts, engine.exit_reason = engine.restarts + 1, "signal SIGKILL"
        self.disturbed.add(name)

    def lose_engine(self, name: str, *, deleted: bool) -> None:
        """Lose an engine: its node stops responding, or the engine disappears (`deleted`)."""
        self.disturbed.add(name)
        if deleted:
            del self.engines[name]
        else:
            self.engines[name].state = EngineState.LOST

    def evict(self, name: str) -> None:
        """Terminate an engine without the operator."""
        self.engines[name].ends_at_s = self.now_s + TERMINATION_S
        self.disturbed.add(name)

    def cordon(self, *names: str, taint: str = "") -> None:
        """Cordon the nodes of these instances, or taint them; these take their room with them."""
        departure = NodeDeparture(taint or "cordoned", self.now_s, is_certain=bool(taint))
        self.cordoned |= dict.fromkeys(names, departure)
        if self.capacity is not None:
            self.capacity -= len(names)

    def evict_from_cordoned_nodes(self) -> None:
        """Evict as `kubectl drain` does: as many as the disruption budget allows now."""
        for name in sorted(self.cordoned.keys() & self.engines.keys()):
            healthy = [
                e for e in self.engines.values() if e.state is EngineState.RUNNING and e.ends_at_s is None
            ]
            if self.engines[name].ends_at_s is None and len(healthy) > self.min_available:
                self.evict(name)

    def _has_room(self) -> bool:
        placed = [name for name, e in self.engines.items() if e.placed and name not in self.cordoned]
        return self.capacity is None or len(placed) < self.capacity

    def _finish_startup(self, engine: SimulatedEngine) -> None:
        if engine.created_from.spec.engine.profile == BAD_PROFILE or engine.is_bad:
            engine.restarts, engine.exit_reason = engine.restarts + 1, "exit code 2"
            engine.ready_at_s = self.now_s + STARTUP_S
        else:
            engine.state = EngineState.RUNNING

    def _observation(self, name: str, engine: SimulatedEngine) -> EngineObservation:
        runs = engine.state is EngineState.RUNNING
        return EngineObservation(
            name,
            engine.state,
            engine.restarts,
            endpoint="127.0.0.1:1" if runs else engine.endpoint,
            exit_reason=engine.exit_reason,
            reason="" if engine.placed else conditions.UNSCHEDULABLE,
            message="its node n does not respond" if engine.state is EngineState.LOST else "",
            lacks_room=not engine.placed,
            node_departure=self.cordoned.get(name),
            node_lost=engine.state is EngineState.LOST,
            terminating=engine.ends_at_s is not None,
        )

    def _router(self) -> RouterState:
        states = map(instance_state, self.instances)
        generation = self.assignment.metadata.generation if self.assignment else 0
        return router_state(*states, generation=generation, acknowledged_at_s=self.now_s, at_s=self.now_s)

    def _drop(self, obj: Resource) -> None:
        if isinstance(obj, PDInstance):
            self.instances.pop(obj.metadata.name, None)
        else:
            self.pools.pop(obj.metadata.name, None)

    def _store(self, obj: Resource) -> None:
        name = obj.metadata.name
        if isinstance(obj, PDAssignment):
            meta = obj.metadata.model_copy(
                update={"generation": self.assignment.metadata.generation if self.assignment else 1}
            )
            spec, self.assignment = obj.spec, self.assignment or obj.replace(metadata=meta)
            self.write_assignment(spec)
        elif isinstance(obj, PDService):
            self.service = obj
        elif isinstance(obj, PDPool):
            self.pools[name] = _create(obj, self.now_s) if name not in self.pools else obj
        elif isinstance(obj, PDInstance):
            self._store_instance(obj)

    def _store_instance(self, instance: PDInstance) -> None:
        name = instance.metadata.name
        if name in self.instances:
            self.instances[name] = instance
        elif not self.refuses_instances:
            self.instances[name] = _create(instance, self.now_s)


def _serve_both(instances: list[PDInstance]) -> bool:
    roles = [i.status.role for i in instances if i.status.role is not None]
    return all(any(role.serves(phase) for role in roles) for phase in BOTH)


def _create(obj: Any, now_s: float) -> Any:
    meta = obj.metadata.model_copy(update={"uid": f"u-{obj.metadata.name}", "creation_timestamp": now_s})
    return obj.replace(metadata=meta)


def _facts(instance: PDInstance) -> EngineFacts:
    """Return the facts of an engine; its image is its version."""
    identity = EngineIdentitySpec(
        model=instance.spec.model,
        engine=instance.spec.engine.image or "first",
        kv_dtype="auto",
        block_size=16,
        tensor_parallel=1,
    )
    return EngineFacts(identity, FlipStrategy.RELABEL, STARTUP_S)


def make_settled_service(spec: Mapping[str, Any]) -> SimulatedService:
    """Create a service `chat` with this spec and let it settle."""
    meta = {"name": "chat", "uid": "u-service", "generation": 1}
    service = PDService.model_validate({"metadata": meta, "spec": {"model": "m", **spec}})
    simulated = SimulatedService(service)
    simulated.settle()
    return simulated
