"""The whole loop in one place: engines, router, store, operator and autoscaler on one virtual clock.

What is shipped runs as shipped (engine model, dispatch, memory store, watches, reconcile, the fast loop);
only sockets and processes are stood in for. Faults come from a plan that the seed draws. What happened is a
`History`.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fulcrum_autoscaler.desired import WatchedObjects
from fulcrum_autoscaler.journal import Journal
from fulcrum_autoscaler.loop import Autoscaler
from fulcrum_autoscaler.meters import Meters
from fulcrum_cluster.memory import MemoryStore
from fulcrum_cluster.watching import Mirror
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.assignment import AssignmentRules, may_apply, with_flip
from fulcrum_core.errors import Conflict, StoreError, StoreUnavailable
from fulcrum_core.merge import merge_diff
from fulcrum_core.ports import Listing, R, WatchEvent
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.controller.reconcile import Cluster, ServiceKey, reconcile
from fulcrum_operator.engines import simulated
from fulcrum_operator.plan.observed import EngineFacts
from fulcrum_simulator.engine import TokenOut
from fulcrum_simulator.workload import WorkloadRequest
from tests.simulation.engines import EngineProcess, Network, Runtime
from tests.simulation.history import History
from tests.simulation.routing import ClientRequest, Router
from tests.simulation.virtual_time import EPOCH_S, VirtualClock, run

NAME = "chat"
OPERATOR_LOOKS_S = 0.1
LATE_S = 60.0
"""How much longer than planned a world may take to answer its last request."""
CALM_S = 2.0
"""After that, for leases to be given back and watches to catch up."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a time."""

    at_s: float
    what: str
    instance: int = 0
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: a load, a service, faults, and when to stop."""

    seed: int
    load: Iterable[WorkloadRequest]
    ends_s: float
    spec: Mapping[str, Any]
    faults: tuple[Fault, ...] = ()


@dataclass(slots=True)
class Answer:
    """What one client saw."""

    request: ClientRequest
    arrived_s: float
    first_s: float | None = None
    last_s: float | None = None
    indices: list[int] = field(default_factory=list)
    wrong: int = 0
    outcome: str | None = None
    ends: int = 0

    def met(self, *, ttft_s: float, tpot_s: float) -> bool:
        """Whether it was answered within both objectives."""
        if self.outcome != "ok" or self.first_s is None or self.last_s is None:
            return False
        gaps = len(self.indices) - 1
        slow = gaps > 0 and (self.last_s - self.first_s) / gaps > tpot_s
        return self.first_s - self.arrived_s <= ttft_s and not slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A world that was run to its end."""

    plan: Plan
    service: PDService
    history: History
    answers: tuple[Answer, ...]
    assignment: PDAssignment
    instances: tuple[PDInstance, ...]
    router: Router
    lives: tuple[EngineProcess, ...]
    journal: Journal

    def attainment(self, *, since_s: float = 0.0) -> float:
        """Share of the requests offered since then that met both objectives."""
        slo = self.service.spec.slo
        offered = [a for a in self.answers if a.arrived_s >= since_s]
        return sum(a.met(ttft_s=slo.ttft, tpot_s=slo.tpot) for a in offered) / max(1, len(offered))

    def flips(self, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """Changes of role since then, in order."""
        return [e.facts for e in self.history.of("flip") if e.at_s >= since_s]


def simulate(plan: Plan) -> Ended:
    """Run one world on a virtual clock of its own."""
    return run(_World(plan).run())


class _FaultyStore(MemoryStore):
    """The memory store, with times at which it does not answer. `on_write` sees every change, in order."""

    away = False
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
        if self.away:
            raise StoreUnavailable("told to be away")


class _World:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._profile = load_profile(plan.spec.get("engine", {}).get("profile", "laptop"))
        self._rng = random.Random(plan.seed)
        self._clock = VirtualClock()

    async def run(self) -> Ended:
        self._build()
        service = parse_as(PDService, {"metadata": {"name": NAME}, "spec": dict(self._plan.spec)})
        self._cooldown_s = service.spec.autoscaling.flip.prefill_to_decode_cooldown
        await self._store.create(service)
        async with asyncio.TaskGroup() as tasks:
            forever = [tasks.create_task(work) for work in self._forever()]
            autoscaler = tasks.create_task(self._autoscale())
            faults = [tasks.create_task(self._suffer(fault)) for fault in self._plan.faults]
            requests = [tasks.create_task(self._ask(n, r)) for n, r in enumerate(self._plan.load)]
            await asyncio.sleep(self._plan.ends_s)
            await asyncio.wait(requests, timeout=LATE_S)
            await asyncio.sleep(CALM_S)
            ended = await self._ended()
            for task in (*forever, autoscaler, *faults, *requests):
                task.cancel()
        self._runtime.close()
        await asyncio.sleep(0)
        return ended

    def _build(self) -> None:
        loop = asyncio.get_running_loop()
        self._history = History(loop.time)
        self._network = Network()
        self._runtime = Runtime(
            self._profile, self._network, self._history, random.Random(self._rng.random())
        )
        uids = itertools.count(1)
        self._store = _FaultyStore(self._clock, new_uid=lambda: f"uid-{next(uids)}")
        self._store.on_write = self._record
        self._router = Router(self._history, self._network, self._profile, self._clock)
        self._journal = Journal()
        self._answers: list[Answer] = []
        self._stalled = asyncio.Event()
        self._stall_s = 0.0
        self._cluster = Cluster(
            store=self._store,
            runtime=self._runtime,
            clock=self._clock,
            engine_facts=lambda instance: EngineFacts(
                simulated.identity(instance.spec, self._profile), simulated.STRATEGY, self._profile.startup_s
            ),
            router=self._router,
        )

    def _forever(self) -> list[Any]:
        mirrors = self._router.follow(self._mirror)
        return [
            *(mirror.run() for mirror in mirrors),
            self._router.probe_for_ever(),
            self._operate(),
            self._sample_capacity(),
        ]

    def _mirror(self, kind: Any, on_change: Any) -> Mirror[Any]:
        return Mirror(
            self._store,
            kind,
            namespace="default",
            on_change=on_change,
            rng=random.Random(self._rng.random()),
        )

    async def _operate(self) -> None:
        while True:
            with suppress(Conflict, StoreUnavailable):
                await reconcile(ServiceKey("default", NAME), self._cluster)
            await asyncio.sleep(OPERATOR_LOOKS_S)

    async def _autoscale(self) -> None:
        """The autoscaler, started anew whenever it was stalled."""
        while True:
            seen = WatchedObjects(self._store, namespace="default", rng=random.Random(self._rng.random()))
            autoscaler = Autoscaler(
                desired=seen.of("default", NAME),
                store=self._store,
                router=self._router,
                clock=self._clock,
                journal=self._journal,
                meters=Meters(),
            )
            self._stalled.clear()
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(seen.run()), tasks.create_task(autoscaler.run())]
                await self._stalled.wait()
                for task in running:
                    task.cancel()
            await asyncio.sleep(self._stall_s)

    async def _ask(self, number: int, wanted: WorkloadRequest) -> None:
        await asyncio.sleep(wanted.arrival_s)
        digest = blake2b(f"{self._plan.seed}/{number}".encode(), digest_size=16).digest()
        request = ClientRequest(f"r{number}", wanted.input_tokens, wanted.output_tokens, digest)
        loop = asyncio.get_running_loop()
        answer = Answer(request, loop.time())
        self._answers.append(answer)

        def take(token: TokenOut) -> None:
            answer.last_s = loop.time()
            if answer.first_s is None:
                answer.first_s = answer.last_s
            answer.indices.append(token.index)
            answer.wrong += token.digest != digest

        answer.outcome = await self._router.serve(request, take)
        answer.ends += 1
        self._history.say(
            "answered",
            request=request.id,
            outcome=answer.outcome,
            first_s=answer.first_s,
            tokens=len(answer.indices),
        )

    # Faults

    async def _suffer(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        name = f"{NAME}-{fault.instance}"
        self._history.say("fault", fault=fault.what, instance=name)
        process = self._runtime.processes.get(name)
        match fault.what:
            case "kill":
                self._runtime.kill(name)
            case "hang" if process is not None:
                process.hang(fault.lasts_s)
            case "fail transfers" if process is not None:
                process.fetches_to_fail += 5
            case "expire leases" if process is not None:
                process.engine.expire_leases(float("inf"))
            case "store away":
                self._store.away = True
                await asyncio.sleep(fault.lasts_s)
                self._store.away = False
            case "router state away":
                self._router.answers_state = False
                await asyncio.sleep(fault.lasts_s)
                self._router.answers_state = True
            case "router clock wrong":
                self._router.clock_error_s = -20.0
                await asyncio.sleep(fault.lasts_s)
                self._router.clock_error_s = 0.0
            case "autoscaler stalls":
                self._stall_s = fault.lasts_s
                self._stalled.set()
            case "person flips":
                with suppress(StoreError):
                    await self._person_flips(name)

    async def _person_flips(self, name: str) -> None:
        """A careful person: asks first, and pins for three seconds."""
        found = await self._store.get(PDAssignment, NAME, namespace="default")
        now_s = self._clock.now_s()
        if name not in found.spec.roles:
            return
        to = Role(found.spec.roles[name].role).other
        after = with_flip(
            found.spec, name, to, by=Actor.PERSON, reason="by hand", now_s=now_s, pinned_until_s=now_s + 3
        )
        listing = await self._store.list(PDInstance, namespace="default")
        ready = {i.metadata.name for i in listing.items if i.status.phase is Phase.SERVING}
        rules = AssignmentRules(self._cooldown_s)
        if may_apply(found.spec, after, ready, rules, now_s=now_s).allowed:
            patch = {"spec": merge_diff(found.spec.dump(), after.dump())}
            await self._store.patch(
                PDAssignment,
                NAME,
                patch,
                namespace="default",
                resource_version=found.metadata.resource_version,
            )

    # Records

    def _record(self, new: Resource, old: Resource | None) -> None:
        if isinstance(new, PDAssignment):
            self._record_assignment(old if isinstance(old, PDAssignment) else None, new)
        elif isinstance(new, PDInstance):
            before = old.status.phase if isinstance(old, PDInstance) else None
            if new.status.phase is not before:
                self._history.say("phase", instance=new.metadata.name, phase=str(new.status.phase))

    def _record_assignment(self, old: PDAssignment | None, new: PDAssignment) -> None:
        roles = {name: (str(entry.role), entry.cordoned) for name, entry in new.spec.roles.items()}
        self._history.say("assignment", generation=new.metadata.generation, roles=roles)
        before = old.spec.roles if old else {}
        for name, entry in new.spec.roles.items():
            if name in before and before[name].role is not entry.role:
                self._history.say(
                    "flip",
                    instance=name,
                    to=str(entry.role),
                    by=str(entry.by),
                    reason=entry.reason,
                    since_s=entry.since - EPOCH_S,
                )

    async def _sample_capacity(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for name in sorted(self._runtime.processes):
                usage = self._runtime.processes[name].engine.gauges.kv_usage
                self._history.say("kv", instance=name, usage=round(usage, 6))

    async def _ended(self) -> Ended:
        return Ended(
            plan=self._plan,
            service=await self._store.get(PDService, NAME, namespace="default"),
            history=self._history,
            answers=tuple(self._answers),
            assignment=await self._store.get(PDAssignment, NAME, namespace="default"),
            instances=(await self._store.list(PDInstance, namespace="default")).items,
            router=self._router,
            lives=tuple(self._runtime.all_lives),
            journal=self._journal,
        )
