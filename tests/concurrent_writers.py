"""Concurrent writers of one PDAssignment in random interleavings, on any store.

The writers are Fulcrum's own: the autoscaler with flip requests, a person with flips and cordons, and the
operator, which follows scaling and roll-outs with cordons, drains and new instances. Each has connections of
its own, and before each call the others may run. The assertions are about the store's history.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulcrum_autoscaler.decision_history import DecisionHistory
from fulcrum_autoscaler.loop import ServiceAutoscaler
from fulcrum_autoscaler.metrics import AutoscalerMetrics, ServiceMetrics
from fulcrum_autoscaler.policy import DecisionAction
from fulcrum_cli.assignment.writes import flip_instance, set_cordon
from fulcrum_cluster.client import RestStore, open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api import EngineIdentitySpec, PDAssignment, PDInstance, PDPool, PDService, Resource
from fulcrum_core.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from fulcrum_core.ports import EventType, Listing, R, Store, WatchEvent
from fulcrum_core.router_state import FlipRequest, InstanceState, RouterState
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.controller.context import ReconcileContext, ServiceKey
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.plan.observed import EngineFacts
from tests.unit.autoscaler.builders import FakeServiceObjects, decode, make_router_state, prefill
from tests.unit.operator.fakes import FakeRuntime
from tests.waiting import wait_until, yield_control

CONNECTIONS = 8
"""Connections of each writer: a Fulcrum program sends at most 100 requests a second over one connection."""
FLOORS = {Role.PREFILL: 2, Role.DECODE: 1}
INSTANCES_MIN, INSTANCES_MAX = 4, 7
FOLLOWED: tuple[type[Resource], ...] = (PDAssignment, PDInstance)


class InterleavedStore:
    """A store that lets other tasks run before each call, and counts the assignment's writes."""

    def __init__(self, stores: Sequence[RestStore], rng: random.Random, wrote: Counter[int]) -> None:
        self._stores, self._rng, self._wrote = stores, rng, wrote

    async def _yield_then_pick(self) -> RestStore:
        await yield_control(self._rng.randrange(4))
        return self._rng.choice(self._stores)

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        return await (await self._yield_then_pick()).get(kind, name, namespace=namespace)

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        return await (await self._yield_then_pick()).list(kind, namespace=namespace)

    def watch(self, kind: type[R], *, namespace: str, since: str) -> AsyncIterator[WatchEvent[R]]:
        return self._stores[0].watch(kind, namespace=namespace, since=since)

    async def create(self, obj: R) -> R:
        return await (await self._yield_then_pick()).create(obj)

    async def apply(self, obj: R, *, manager: str) -> R:
        return await (await self._yield_then_pick()).apply(obj, manager=manager)

    async def patch(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        written = await (await self._yield_then_pick()).patch(kind, name, patch, **where)
        if isinstance(written, PDAssignment):
            self._wrote[written.metadata.generation] += 1
        return written

    async def patch_status(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        return await (await self._yield_then_pick()).patch_status(kind, name, patch, **where)

    async def delete(self, kind: type[R], name: str, **where: Any) -> None:
        await (await self._yield_then_pick()).delete(kind, name, **where)


@dataclass
class IdleRouter:
    """Applies every generation at once and has no request in flight: a drain is done at once."""

    generation: int = 0
    instances: tuple[InstanceState, ...] = ()

    def endpoint(self, key: ServiceKey) -> str:
        return f"http://{key.name}"

    async def read_state(self, key: ServiceKey) -> RouterState:
        del key
        return make_router_state(generation=self.generation)

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        del timeout_s
        return make_router_state(*self.instances, generation=min_generation, at_s=SystemClock().now_s())

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        raise AssertionError((after, timeout_s))


class RefreshedObjects(FakeServiceObjects):
    """The autoscaler's view of the objects, as of the last `refresh`."""

    async def refresh(self, store: Store, namespace: str) -> None:
        self.the_service = await store.get(PDService, "chat", namespace=namespace)
        self.the_pools = [*(await store.list(PDPool, namespace=namespace)).items]
        self.the_instances = [*(await store.list(PDInstance, namespace=namespace)).items]
        self.the_assignment = await store.get(PDAssignment, "chat", namespace=namespace)


def facts(instance: PDInstance) -> EngineFacts:
    """Engines of two revisions cannot exchange KV blocks."""
    what = f"simulated {instance.spec.engine.args}"
    identity = EngineIdentitySpec(model="m", engine=what, kv_dtype="auto", block_size=16, tensor_parallel=1)
    return EngineFacts(identity, FlipStrategy.RELABEL, startup_s=1.0)


@dataclass
class Actors:
    """All writers, and a count of the outcomes of their calls."""

    stores: Mapping[str, InterleavedStore]
    namespace: str
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    rolled: int = 0

    def __post_init__(self) -> None:
        self.key = ServiceKey(self.namespace, "chat")
        self.engines, self.router = FakeRuntime(runs_at_once=True), IdleRouter()
        self.autoscaler_view = RefreshedObjects()
        self.context = ReconcileContext(
            store=self.stores["operator"],
            runtime=self.engines,
            clock=SystemClock(),
            engine_facts=facts,
            router=self.router,
        )
        self.autoscaler = ServiceAutoscaler(
            objects=self.autoscaler_view,
            store=self.stores["autoscaler"],
            router=self.router,
            clock=SystemClock(),
            history=DecisionHistory(),
            metrics=ServiceMetrics(AutoscalerMetrics(), namespace=self.namespace, service="chat"),
        )

    async def operate(self) -> None:
        """Reconcile once; a conflict is counted."""
        try:
            self.router.generation = await self._generation()
            await reconcile(self.key, self.context)
            self.outcomes["operator reconciled"] += 1
        except Conflict:
            self.outcomes["operator lost a race"] += 1

    async def settle(self) -> None:
        """Reconcile until nothing changes."""
        store = self.stores["operator"]
        for _ in range(60):
            before = (await store.list(PDService, namespace=self.namespace)).resource_version
            await self.operate()
            if (await store.list(PDService, namespace=self.namespace)).resource_version == before:
                return
        raise AssertionError("60 reconciles changed the state")

    async def scale(self) -> None:
        """A person changes the number of instances."""
        await self._edit({"instances": self.rng.randint(INSTANCES_MIN, INSTANCES_MAX)}, "scaled")

    async def roll(self) -> None:
        """A person changes the engines' arguments, which begins a roll-out."""
        self.rolled += 1
        await self._edit({"engine": {"args": ["--seed", str(self.rolled)]}}, "rolled")

    async def flip_by_load(self) -> None:
        """The autoscaler handles a flip request of the router, half of the time on an old view."""
        if self.rng.random() < 0.5:
            await self.autoscaler_view.refresh(self.stores["autoscaler"], self.namespace)
        assignment = self.autoscaler_view.the_assignment
        self.router.instances = tuple(
            prefill(name) if entry.role is Role.PREFILL else decode(name, itl_s=0.001)
            for name, entry in (assignment.spec.roles.items() if assignment else ())
        )
        request = FlipRequest(seq=1, role=self._role(), reason="no instance meets the objective")
        decision = await self.autoscaler.handle_flip_request(request)
        assert decision.reason
        self.outcomes[f"autoscaler {decision.action}"] += 1

    async def flip_by_hand(self) -> None:
        """A person flips an instance."""
        name, store = await self._pick_instance(), self.stores["person"]
        await self._record_outcome(
            "flip", flip_instance(store, "chat", name, self._role(), namespace=self.namespace, reason="t")
        )

    async def cordon_by_hand(self) -> None:
        """A person cordons or uncordons an instance."""
        name, store, on = await self._pick_instance(), self.stores["person"], self.rng.random() < 0.4
        await self._record_outcome(
            "cordon",
            set_cordon(store, "chat", name, namespace=self.namespace, reason="t", cordoned=on),
        )

    async def _record_outcome(self, what: str, write: Awaitable[object]) -> None:
        try:
            await write
            self.outcomes[f"person's {what} accepted"] += 1
        except InvalidInput:
            self.outcomes[f"person's {what} refused"] += 1
        except Conflict:
            self.outcomes[f"person's {what} lost all races"] += 1

    async def _edit(self, spec: dict[str, Any], what: str) -> None:
        await self.stores["person"].patch(PDService, "chat", {"spec": spec}, namespace=self.namespace)
        self.outcomes[f"person {what}"] += 1

    async def _pick_instance(self) -> str:
        found = await self.stores["person"].get(PDAssignment, "chat", namespace=self.namespace)
        return self.rng.choice(sorted(found.spec.roles))

    def _role(self) -> Role:
        return Role.PREFILL if self.rng.random() < 0.5 else Role.DECODE

    async def _generation(self) -> int:
        try:
            found = await self.stores["operator"].get(PDAssignment, "chat", namespace=self.namespace)
        except NotFound:
            return 0
        return found.metadata.generation


class History:
    """Every version of the assignment and the instances, from watches of the store."""

    def __init__(self, store: RestStore, namespace: str) -> None:
        self._store, self._namespace = store, namespace
        self._states: list[tuple[int, Resource]] = []

    @property
    def states(self) -> list[tuple[int, Resource]]:
        """Resource version and object, in the order of the writes."""
        return sorted(self._states, key=lambda state: state[0])

    async def follow(self, kind: type[Resource], since: str) -> None:
        """Collect the versions written after `since`, until cancelled."""
        while True:  # an API server may end a watch at any time, and serves new kinds only after a while
            with contextlib.suppress(StoreUnavailable):
                async for event in self._store.watch(kind, namespace=self._namespace, since=since):
                    since = event.resource_version
                    if event.object is not None and event.type is not EventType.DELETED:
                        self._states.append((int(since), event.object))

    async def wait_until_caught_up(self) -> None:
        """Wait until the watches have reported the current version of every object."""

        async def caught_up() -> bool:
            return await self._current_versions() <= {version for version, _ in self._states}

        await wait_until(caught_up, "the watches have reported the current objects", timeout_s=30)

    async def _current_versions(self) -> set[int]:
        found = [await self._store.list(kind, namespace=self._namespace) for kind in FOLLOWED]
        return {int(obj.metadata.resource_version) for listing in found for obj in listing.items}


def broken_floors(states: Iterable[tuple[int, Resource]]) -> Iterator[str]:
    """Describe each version at which a role had fewer serving instances than its floor after reaching it."""
    phases: dict[str, Phase] = {}
    assignment: PDAssignment | None = None
    reached: set[Role] = set()
    for version, state in states:
        if isinstance(state, PDAssignment):
            assignment = state
        elif isinstance(state, PDInstance):
            phases[state.metadata.name] = state.status.phase
        if assignment is None:
            continue
        for role, floor in FLOORS.items():
            serve = [
                name
                for name, entry in assignment.spec.roles.items()
                if entry.role is role and not entry.cordoned and phases.get(name) is Phase.SERVING
            ]
            if len(serve) >= floor:
                reached.add(role)
            elif role in reached:
                yield f"at {version} only {serve} serve {role}: {state}"


@contextlib.asynccontextmanager
async def writers(
    address: str, namespace: str, rng: random.Random
) -> AsyncIterator[tuple[Actors, Counter[int]]]:
    wrote: Counter[int] = Counter()
    async with contextlib.AsyncExitStack() as opened:
        turns: dict[str, InterleavedStore] = {}
        for name in ("operator", "autoscaler", "person"):
            stores = [await opened.enter_async_context(open_store(address)) for _ in range(CONNECTIONS)]
            turns[name] = InterleavedStore(stores, rng, wrote)
        yield Actors(turns, namespace, rng), wrote


async def check_concurrent_writers(address: str, namespace: str, *, interleavings: int, seed: int) -> str:
    """Run the writers; assert that no floor is broken and no write lost. Returns the figures of the run."""
    rng = random.Random(seed)
    async with writers(address, namespace, rng) as (actors, wrote), open_store(address) as reader:
        history = History(reader, namespace)
        since = (await reader.list(PDAssignment, namespace=namespace)).resource_version
        followers = [asyncio.create_task(history.follow(kind, since)) for kind in FOLLOWED]
        await reader.create(_service(namespace))
        await actors.settle()
        people: list[Callable[[], Awaitable[None]]] = [
            actors.flip_by_load,
            actors.flip_by_hand,
            actors.cordon_by_hand,
            actors.scale,
            actors.roll,
        ]
        await actors.autoscaler_view.refresh(reader, namespace)
        for _ in range(interleavings):
            chosen = rng.choices(people, weights=(4, 4, 3, 1, 1), k=rng.randint(1, 3))
            await asyncio.gather(actors.operate(), *(act() for act in chosen))
        await actors.settle()
        await history.wait_until_caught_up()
        for follower in followers:
            assert follower.cancel(), follower
        states = history.states
        last = (await reader.get(PDAssignment, "chat", namespace=namespace)).metadata.generation
    generations = Counter(s.metadata.generation for _, s in states if isinstance(s, PDAssignment))
    assert list(broken_floors(states)) == []
    assert set(wrote) == set(range(2, last + 1)), (
        "each generation after the first was written by one of the writers"
    )
    assert (max(wrote.values()), set(generations)) == (1, set(range(1, last + 1)))
    assert actors.outcomes[f"autoscaler {DecisionAction.FLIP}"]
    assert actors.outcomes["operator lost a race"]
    outcomes = ", ".join(f"{what}: {count}" for what, count in sorted(actors.outcomes.items()))
    return f"{interleavings} interleavings, {last} generations; {outcomes}"


def _service(namespace: str) -> PDService:
    floors = {"prefill": {"min": FLOORS[Role.PREFILL]}, "decode": {"min": FLOORS[Role.DECODE]}}
    spec = {
        "model": "m",
        "instances": INSTANCES_MIN + 1,
        "roles": floors,
        "autoscaling": {"policy": "arrow", "flip": {"prefillToDecodeCooldown": "1ms"}},
    }
    return PDService.model_validate(
        {"kind": "PDService", "metadata": {"name": "chat", "namespace": namespace}, "spec": spec}
    )
