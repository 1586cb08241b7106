"""The whole control loop on one virtual clock: engines, router, store, operator and autoscaler.

The engine model, dispatch policy, memory store, watches, reconcile and the autoscaler's loop are the shipped
code; only sockets and processes are simulated. The scenario's faults are drawn from its seed. The result
contains the `History` of the run.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fulcrum_autoscaler.decision_history import DecisionHistory
from fulcrum_autoscaler.loop import ServiceAutoscaler
from fulcrum_autoscaler.metrics import ServiceMetrics
from fulcrum_autoscaler.watched_objects import WatchedObjects
from fulcrum_cluster.informer import Informer
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import AssignmentRules, build_flip, may_apply
from fulcrum_core.errors import Conflict, StoreError, StoreUnavailable
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.ports import Listing, R, WatchEvent
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.controller.context import ReconcileContext, ServiceKey
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.engines import simulated
from fulcrum_operator.plan.observed import EngineFacts
from fulcrum_simulator.engine import OutputToken
from fulcrum_simulator.routing import Outcome, SimulatedRequest
from fulcrum_simulator.workload import WorkloadRequest
from tests.clocks import LoopClock
from tests.objects import make_object
from tests.simulation.engines import EngineProcess, Network, SimulatedRuntime
from tests.simulation.history import History
from tests.simulation.router import SimulatedRouter
from tests.simulation.virtual_time import EPOCH_S, run_on_virtual_time
from tests.waiting import advance, run_pending_tasks

SERVICE_NAME = "chat"
RECONCILE_INTERVAL_S = 0.1
"""Shortest time between two reconciles, in seconds."""
RESYNC_S = 0.5
"""Longest time between two reconciles, in seconds, for engines that changed without a write to the store."""
FINISH_TIMEOUT_S = 60.0
"""Time that requests may take after `Scenario.end_s`, in seconds."""
SETTLE_S = 2.0
"""Time after the last request for leases to be released and watches to catch up, in seconds."""


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault at a given time."""

    at_s: float
    kind: str
    instance: int = 0
    """Number of the affected instance, for faults of one instance."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of one run: load, service, faults, end time."""

    seed: int
    load: Iterable[WorkloadRequest]
    end_s: float
    spec: Mapping[str, Any]
    faults: tuple[ScheduledFault, ...] = ()


@dataclass(slots=True)
class RequestRecord:
    """One client's view of its request."""

    request: SimulatedRequest
    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_indices: list[int] = field(default_factory=list)
    """Index of each token received, in order."""
    wrong_tokens: int = 0
    """Tokens that continue another prompt."""
    outcome: str | None = None
    """"ok", "failed" (before the first token) or "broken" (after it); None while in flight."""
    ends: int = 0
    """Times that the request ended."""

    def meets_slo(self, *, ttft_s: float, tpot_s: float) -> bool:
        """Whether the request is ok and met both objectives."""
        if self.outcome != "ok" or self.first_token_s is None or self.last_token_s is None:
            return False
        gaps = len(self.token_indices) - 1
        too_slow = gaps > 0 and (self.last_token_s - self.first_token_s) / gaps > tpot_s
        return self.first_token_s - self.arrival_s <= ttft_s and not too_slow


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The final state and the history of a run."""

    scenario: Scenario
    service: PDService
    history: History
    requests: tuple[RequestRecord, ...]
    assignment: PDAssignment
    instances: tuple[PDInstance, ...]
    router: SimulatedRouter
    engine_processes: tuple[EngineProcess, ...]
    decisions: DecisionHistory

    def attainment(self, *, since_s: float = 0.0) -> float:
        """Return the share of requests, offered at `since_s` or later, that met both objectives."""
        slo = self.service.spec.slo
        offered = [a for a in self.requests if a.arrival_s >= since_s]
        return sum(a.meets_slo(ttft_s=slo.ttft, tpot_s=slo.tpot) for a in offered) / max(1, len(offered))

    def flips(self, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the changes of role at `since_s` or later, in order."""
        return [e.fields for e in self.history.of_kind("flip") if e.at_s >= since_s]


def simulate(scenario: Scenario) -> SimulationResult:
    """Run one scenario on a virtual clock."""
    return run_on_virtual_time(_Simulation(scenario).run())


class _FaultyStore(MemoryStore):
    """The memory store with periods of unavailability. `on_write` is called with every change, in order."""

    unavailable = False
    on_write: Callable[[Resource, Resource | None], None] = staticmethod(lambda _new, _old: None)

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        self._check()
        return await super().get(kind, name, namespace=namespace)

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        self._check()
        return await super().list(kind, namespace=namespace)

    async def patch(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        self._check()
        old = await super().get(kind, name, namespace=where["namespace"])
        new = await super().patch(kind, name, patch, **where)
        self.on_write(new, old)
        return new

    async def patch_status(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        self._check()
        old = await super().get(kind, name, namespace=where["namespace"])
        new = await super().patch_status(kind, name, patch, **where)
        self.on_write(new, old)
        return new

    async def create(self, obj: R) -> R:
        self._check()
        new = await super().create(obj)
        self.on_write(new, None)
        return new

    async def watch(
        self, kind: type[R], *, namespace: str, since: str
    ) -> AsyncGenerator[WatchEvent[R], None]:
        self._check()
        async for event in super().watch(kind, namespace=namespace, since=since):
            self._check()
            yield event

    def _check(self) -> None:
        if self.unavailable:
            raise StoreUnavailable("injected fault")


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._profile = load_profile(scenario.spec.get("engine", {}).get("profile", "laptop"))
        self._rng = random.Random(scenario.seed)
        self._clock = LoopClock(EPOCH_S)

    async def run(self) -> SimulationResult:
        self._build()
        service = make_object(PDService, SERVICE_NAME, self._scenario.spec)
        self._cooldown_s = service.spec.autoscaling.flip.prefill_to_decode_cooldown
        await self._store.create(service)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(work) for work in self._background_work()]
            autoscaler = tasks.create_task(self._run_autoscaler())
            faults = [tasks.create_task(self._inject_fault(fault)) for fault in self._scenario.faults]
            requests = [
                tasks.create_task(self._send_request(n, r)) for n, r in enumerate(self._scenario.load)
            ]
            await advance(self._scenario.end_s)
            await asyncio.wait(requests, timeout=FINISH_TIMEOUT_S)
            await advance(SETTLE_S)
            result = await self._build_result()
            for task in (*background, autoscaler, *faults, *requests):
                task.cancel()
        self._runtime.close()
        await run_pending_tasks()
        return result

    def _build(self) -> None:
        loop = asyncio.get_running_loop()
        self._history = History(loop.time)
        self._network = Network()
        self._runtime = SimulatedRuntime(
            self._profile, self._network, self._history, random.Random(self._rng.random())
        )
        uids = itertools.count(1)
        self._store = _FaultyStore(self._clock, new_uid=lambda: f"uid-{next(uids)}")
        self._store.on_write = self._record
        self._router = SimulatedRouter(self._history, self._network, self._profile, self._clock)
        self._decision_history = DecisionHistory()
        self._records: list[RequestRecord] = []
        self._written = asyncio.Event()
        self._stalled = asyncio.Event()
        self._stall_s = 0.0
        self._context = ReconcileContext(
            store=self._store,
            runtime=self._runtime,
            clock=self._clock,
            engine_facts=lambda instance: EngineFacts(
                simulated.identity(instance.spec, self._profile),
                simulated.FLIP_STRATEGY,
                self._profile.startup_s,
            ),
            router=self._router,
        )

    def _background_work(self) -> list[Any]:
        informers = self._router.make_informers(self._informer)
        return [
            *(informer.run() for informer in informers),
            self._router.run_probes(),
            self._run_operator(),
            self._sample_kv_usage(),
        ]

    def _informer(self, kind: Any, on_change: Any) -> Informer[Any]:
        return Informer(
            self._store,
            kind,
            namespace="default",
            on_change=on_change,
            rng=random.Random(self._rng.random()),
        )

    async def _run_operator(self) -> None:
        while True:
            with suppress(Conflict, StoreUnavailable):
                await reconcile(ServiceKey("default", SERVICE_NAME), self._context)
            self._written.clear()
            await advance(RECONCILE_INTERVAL_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._written.wait(), RESYNC_S - RECONCILE_INTERVAL_S)

    async def _run_autoscaler(self) -> None:
        """Run the autoscaler. After a stall, start a new one."""
        while True:
            watched = WatchedObjects(self._store, namespace="default", rng=random.Random(self._rng.random()))
            autoscaler = ServiceAutoscaler(
                objects=watched.for_service("default", SERVICE_NAME),
                store=self._store,
                router=self._router,
                clock=self._clock,
                history=self._decision_history,
                metrics=ServiceMetrics(),
            )
            self._stalled.clear()
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(watched.run()), tasks.create_task(autoscaler.run())]
                await self._stalled.wait()
                for task in running:
                    task.cancel()
            await advance(self._stall_s)

    async def _send_request(self, number: int, planned: WorkloadRequest) -> None:
        await advance(planned.arrival_s)
        digest = blake2b(f"{self._scenario.seed}/{number}".encode(), digest_size=16).digest()
        request = SimulatedRequest(f"r{number}", planned.input_tokens, planned.output_tokens, digest)
        loop = asyncio.get_running_loop()
        record = RequestRecord(request, loop.time())
        self._records.append(record)

        def record_token(token: OutputToken) -> None:
            record.last_token_s = loop.time()
            if record.first_token_s is None:
                record.first_token_s = record.last_token_s
            record.token_indices.append(token.index)
            record.wrong_tokens += token.digest != digest

        ended = asyncio.Event()

        def record_end(outcome: Outcome) -> None:
            record.outcome = outcome.value
            record.ends += 1
            self._history.record(
                "answered",
                request=request.id,
                outcome=record.outcome,
                first_token_s=record.first_token_s,
                tokens=len(record.token_indices),
            )
            ended.set()

        self._router.serve(request, record_token, record_end)
        await ended.wait()

    # Faults

    async def _inject_fault(self, fault: ScheduledFault) -> None:
        await advance(fault.at_s)
        name = f"{SERVICE_NAME}-{fault.instance}"
        self._history.record("fault", fault=fault.kind, instance=name)
        process = self._runtime.processes.get(name)
        match fault.kind:
            case "kill":
                self._runtime.kill(name)
            case "hang" if process is not None:
                process.hang(fault.duration_s)
            case "fail transfers" if process is not None:
                process.fetches_to_fail += 5
            case "expire leases" if process is not None:
                process.engine.expire_leases(float("inf"))
            case "store unavailable":
                self._store.unavailable = True
                await advance(fault.duration_s)
                self._store.unavailable = False
            case "router state unavailable":
                self._router.state_available = False
                await advance(fault.duration_s)
                self._router.state_available = True
            case "router clock wrong":
                self._router.clock_error_s = -20.0
                await advance(fault.duration_s)
                self._router.clock_error_s = 0.0
            case "autoscaler stalls":
                self._stall_s = fault.duration_s
                self._stalled.set()
            case "person flips":
                with suppress(StoreError):
                    await self._flip_by_person(name)

    async def _flip_by_person(self, name: str) -> None:
        """Flip an instance like `fulcrum flip` does: only if `may_apply` allows it, with a pin of three
        seconds.
        """
        current = await self._store.get(PDAssignment, SERVICE_NAME, namespace="default")
        now_s = self._clock.now_s()
        if name not in current.spec.roles:
            return
        to = Role(current.spec.roles[name].role).other
        after = build_flip(
            current.spec, name, to, by=Actor.PERSON, reason="by hand", now_s=now_s, pinned_until_s=now_s + 3
        )
        listing = await self._store.list(PDInstance, namespace="default")
        serving = {i.metadata.name for i in listing.items if i.status.phase is Phase.SERVING}
        rules = AssignmentRules(self._cooldown_s)
        if may_apply(current.spec, after, serving, rules, now_s=now_s).allowed:
            patch = {"spec": create_merge_patch(current.spec.dump(), after.dump())}
            await self._store.patch(
                PDAssignment,
                SERVICE_NAME,
                patch,
                namespace="default",
                resource_version=current.metadata.resource_version,
            )

    # Records

    def _record(self, new: Resource, old: Resource | None) -> None:
        self._written.set()
        if isinstance(new, PDAssignment):
            self._record_assignment(old if isinstance(old, PDAssignment) else None, new)
        elif isinstance(new, PDInstance):
            before = old.status.phase if isinstance(old, PDInstance) else None
            if new.status.phase is not before:
                self._history.record("phase", instance=new.metadata.name, phase=str(new.status.phase))

    def _record_assignment(self, old: PDAssignment | None, new: PDAssignment) -> None:
        roles = {name: (str(entry.role), entry.cordoned) for name, entry in new.spec.roles.items()}
        self._history.record("assignment", generation=new.metadata.generation, roles=roles)
        before = old.spec.roles if old else {}
        for name, entry in new.spec.roles.items():
            if name in before and before[name].role is not entry.role:
                self._history.record(
                    "flip",
                    instance=name,
                    to=str(entry.role),
                    by=str(entry.by),
                    reason=entry.reason,
                    since_s=entry.since - EPOCH_S,
                )

    async def _sample_kv_usage(self) -> None:
        while True:
            await advance(0.25)
            for name in sorted(self._runtime.processes):
                usage = self._runtime.processes[name].engine.gauges.kv_usage
                self._history.record("kv", instance=name, usage=round(usage, 6))

    async def _build_result(self) -> SimulationResult:
        return SimulationResult(
            scenario=self._scenario,
            service=await self._store.get(PDService, SERVICE_NAME, namespace="default"),
            history=self._history,
            requests=tuple(self._records),
            assignment=await self._store.get(PDAssignment, SERVICE_NAME, namespace="default"),
            instances=(await self._store.list(PDInstance, namespace="default")).items,
            router=self._router,
            engine_processes=tuple(self._runtime.all_processes),
            decisions=self._decision_history,
        )
