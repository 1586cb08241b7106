"""Reconciling a service on the memory store, with engines that start and stop at once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api import KINDS, PDAssignment, PDInstance, PDPool, PDService, Refusal
from fulcrum_core.assignment import build_flip
from fulcrum_core.errors import Conflict, Forbidden, InvalidInput
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.controller.context import Problems, ReconcileContext, ServiceKey
from fulcrum_operator.controller.reconcile import RECHECK_S, reconcile
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.assignment import REFUSED_FOR_S
from fulcrum_operator.plan.observed import EngineFacts
from tests.clocks import ManualClock
from tests.unit.operator.builders import (
    ENGINE_FACTS,
    NOW_S,
    D,
    P,
    assignment_spec,
    router,
    service,
    tier,
)
from tests.unit.operator.fakes import FakeRuntime
from tests.waiting import run_pending_tasks

KEY = ServiceKey("default", "chat")


class RefusingStore:
    """A store that refuses to create one object; everything else goes to another store."""

    def __init__(self, store: MemoryStore, refused: str) -> None:
        self._store, self.refused = store, refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, obj: Any) -> Any:
        if obj.metadata.name == self.refused:
            raise Forbidden("exceeded quota")
        return await self._store.create(obj)


@dataclass
class FakeRouter:
    """A `RouterView` that returns `state`, once `released` is set, and counts the requests."""

    state: RouterState | None = None
    requests: int = 0
    released: asyncio.Event | None = None

    def endpoint(self, key: ServiceKey) -> str | None:
        assert key == KEY
        return "http://127.0.0.1:8000"

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        assert key == KEY
        self.requests += 1
        if self.released is not None:
            await self.released.wait()
        return self.state


@dataclass
class ServiceUnderTest:
    """The service `chat`, its store, engines, router and clock."""

    clock: ManualClock
    store: MemoryStore
    engines: FakeRuntime
    router: FakeRouter
    context: ReconcileContext

    async def reconcile_until_stable(self) -> float | None:
        """Reconcile until nothing changes; returns the result of the last reconcile."""
        for _ in range(10):
            before = await self.version()
            requeue_after_s = await reconcile(KEY, self.context)
            if await self.version() == before:
                return requeue_after_s
        raise AssertionError("ten reconciles changed the state")

    async def version(self) -> str:
        return (await self.store.list(PDService, namespace="default")).resource_version

    async def up(self, **spec: Any) -> None:
        """Create a service and wait until all its instances serve."""
        await self.store.create(service(**spec))
        await self.reconcile_until_stable()
        self.engines.become_ready()
        await self.reconcile_until_stable()

    async def instances(self) -> dict[str, PDInstance]:
        found = await self.store.list(PDInstance, namespace="default")
        return {instance.metadata.name: instance for instance in found.items}

    async def phases(self) -> dict[str, str]:
        return {name: instance.status.phase.value for name, instance in (await self.instances()).items()}

    async def roles(self) -> dict[str, Role | None]:
        return {name: instance.status.role for name, instance in (await self.instances()).items()}

    async def assignment(self) -> PDAssignment:
        return await self.store.get(PDAssignment, "chat", namespace="default")

    async def service(self) -> PDService:
        return await self.store.get(PDService, "chat", namespace="default")

    async def flip(self, name: str, to: Role, by: Actor = Actor.PERSON) -> None:
        now = await self.assignment()
        spec = build_flip(now.spec, name, to, by=by, reason="requested", now_s=self.clock.at_s)
        patch = {"spec": create_merge_patch(now.spec.dump(), spec.dump())}
        await self.store.patch(PDAssignment, "chat", patch, namespace="default")

    async def scale(self, replicas: int) -> None:
        patch = {"spec": {"replicas": replicas}}
        await self.store.patch(PDPool, "chat-flex", patch, namespace="default")


@pytest.fixture
def under_test() -> ServiceUnderTest:
    clock, engines, router = ManualClock(NOW_S), FakeRuntime(), FakeRouter()
    store = MemoryStore(clock)
    context = ReconcileContext(
        store=store,
        runtime=engines,
        clock=clock,
        engine_facts=lambda _: ENGINE_FACTS,
        router=router,
    )
    return ServiceUnderTest(clock, store, engines, router, context)


async def test_a_minimal_service_makes_pools_instances_an_assignment_and_engines(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.store.create(service(instances=4))
    await under_test.reconcile_until_stable()
    created = {
        kind.kind_name(): [
            obj.metadata.name for obj in (await under_test.store.list(kind, namespace="default")).items
        ]
        for kind in KINDS
    }
    names = ["chat-0", "chat-1", "chat-2", "chat-3"]
    assert (created, await under_test.phases(), under_test.engines.startups_s) == (
        {
            "PDService": ["chat"],
            "PDPool": ["chat-flex"],
            "PDInstance": names,
            "PDAssignment": ["chat"],
            "QoSTier": [],
        },
        dict.fromkeys(names, "Starting"),
        dict.fromkeys(names, ENGINE_FACTS.startup_s),
    )


async def test_running_engines_serve_their_roles(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    status = (await under_test.service()).status
    assert (await under_test.phases(), await under_test.roles(), status.ready, status.ratio) == (
        dict.fromkeys(["chat-0", "chat-1", "chat-2", "chat-3"], "Serving"),
        {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D},
        "4/4",
        "2:2",
    )


async def test_a_settled_service_is_not_written(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    before = await under_test.version()
    under_test.clock.at_s += 3600
    router_poll_interval_s = 10.0
    assert (await reconcile(KEY, under_test.context), await under_test.version()) == (
        router_poll_interval_s,
        before,
    )


async def test_a_new_operator_writes_nothing_to_a_settled_service(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    under_test.clock.at_s += 60
    await under_test.flip("chat-0", D)
    await under_test.reconcile_until_stable()
    before = await under_test.version()
    await reconcile(KEY, replace(under_test.context, memory={}))
    assert await under_test.version() == before


async def test_a_deleted_services_engines_are_stopped(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=2)
    await under_test.store.delete(PDService, "chat", namespace="default")
    await under_test.reconcile_until_stable()
    assert (under_test.engines.observations, await under_test.instances(), under_test.context.memory) == (
        {},
        {},
        {},
    )


async def test_a_flip_becomes_the_effective_role_in_one_reconcile(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    await under_test.flip("chat-0", D)
    await reconcile(KEY, under_test.context)
    assert await under_test.roles() == {"chat-0": D, "chat-1": P, "chat-2": D, "chat-3": D}


async def test_an_assignment_below_the_floor_is_reverted_once(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=2)
    before = (await under_test.assignment()).spec
    await under_test.flip("chat-0", D)
    await under_test.reconcile_until_stable()
    reason = "0 instances would serve Prefill, the floor is 1; leaving: chat-0"
    refusal = Refusal(role=D, reason=reason, until=NOW_S + REFUSED_FOR_S)
    entry = before.roles["chat-0"].model_copy(update={"refused": refusal})
    expected = assignment_spec({**before.roles, "chat-0": entry}, last_prefill_to_decode=NOW_S)
    assert (await under_test.assignment()).spec == expected


async def test_a_crashed_engines_phases_are_failed_then_starting_then_serving(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.up(instances=2)
    trace = []
    for change in (under_test.engines.crash, under_test.engines.restart, under_test.engines.become_ready):
        change("chat-1")
        await reconcile(KEY, under_test.context)
        status = (await under_test.instances())["chat-1"].status
        trace.append((status.phase, status.endpoint, status.role, status.restarts))
    assert trace == [
        (Phase.FAILED, None, None, 0),
        (Phase.STARTING, None, None, 1),
        (Phase.SERVING, "127.0.0.1:9001", D, 1),
    ]


async def test_scaling_up_adds_instances_to_the_smaller_role(under_test: ServiceUnderTest) -> None:
    await under_test.up(pools=[{"name": "flex", "instances": {"min": 2, "max": 4}}])
    await under_test.scale(4)
    await under_test.reconcile_until_stable()
    roles = {name: entry.role for name, entry in (await under_test.assignment()).spec.roles.items()}
    assert (roles, await under_test.phases()) == (
        {"chat-0": P, "chat-1": D, "chat-2": D, "chat-3": P},
        {"chat-0": "Serving", "chat-1": "Serving", "chat-2": "Starting", "chat-3": "Starting"},
    )


async def scale_to_three(under_test: ServiceUnderTest) -> None:
    await under_test.up(pools=[{"name": "flex", "instances": {"min": 4, "max": 4}}])
    await under_test.store.patch(
        PDService,
        "chat",
        {"spec": {"pools": [{"name": "flex", "instances": {"min": 1, "max": 4}}]}},
        namespace="default",
    )
    await under_test.scale(3)
    under_test.router.state = router(1, {"chat-0": 1, "chat-1": 2, "chat-2": 1, "chat-3": 2})
    await under_test.reconcile_until_stable()


async def test_scaling_down_drains_and_removes_the_least_loaded_instance(
    under_test: ServiceUnderTest,
) -> None:
    await scale_to_three(under_test)
    generation = (await under_test.assignment()).metadata.generation
    drains = await under_test.phases()
    under_test.router.state = router(generation, {"chat-2": 0})
    await under_test.reconcile_until_stable()
    assert (
        drains,
        await under_test.phases(),
        sorted((await under_test.assignment()).spec.roles),
        sorted(under_test.engines.observations),
    ) == (
        {"chat-0": "Serving", "chat-1": "Serving", "chat-2": "Draining", "chat-3": "Serving"},
        {"chat-0": "Serving", "chat-1": "Serving", "chat-3": "Serving"},
        ["chat-0", "chat-1", "chat-3"],
        ["chat-0", "chat-1", "chat-3"],
    )


async def test_scaling_up_during_a_drain_keeps_the_instance(under_test: ServiceUnderTest) -> None:
    await scale_to_three(under_test)
    await under_test.scale(4)
    await under_test.reconcile_until_stable()
    entry = (await under_test.assignment()).spec.roles["chat-2"]
    assert (await under_test.phases(), entry.cordoned) == (
        dict.fromkeys(["chat-0", "chat-1", "chat-2", "chat-3"], "Serving"),
        False,
    )


async def test_a_drain_is_cut_off_at_its_deadline(under_test: ServiceUnderTest) -> None:
    await scale_to_three(under_test)
    under_test.clock.at_s += 121
    under_test.router.state = None
    await under_test.reconcile_until_stable()
    assert sorted(await under_test.phases()) == ["chat-0", "chat-1", "chat-3"]


async def test_the_routers_state_is_polled_every_ten_seconds_and_sooner_in_the_first_minute(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.up(instances=4)
    counts = []
    for pause_s in (0.0, 1.0, 1.0, 60.0, 9.0, 1.0):  # the first minute has a shorter interval
        under_test.clock.at_s += pause_s
        await under_test.flip("chat-0", D)
        await under_test.reconcile_until_stable()
        counts.append(under_test.router.requests)
    assert counts == [1, 1, 2, 3, 3, 4]


async def test_the_router_of_a_single_instance_is_polled_too(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=1)
    under_test.clock.at_s += 3600
    before = under_test.router.requests
    assert (await reconcile(KEY, under_test.context), under_test.router.requests) == (10.0, before + 1)


@pytest.mark.looptime
async def test_an_open_router_request_survives_a_failed_write_and_is_not_repeated(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.up(instances=4)
    under_test.clock.at_s += 3600
    before, under_test.router.released = under_test.router.requests, asyncio.Event()

    async def fail(_observed: Observed, _plan: Plan) -> Problems:
        raise Conflict("changed meanwhile")

    with pytest.raises(Conflict):
        await reconcile(KEY, replace(under_test.context, after_apply=fail))
    while_open = await reconcile(KEY, under_test.context)
    under_test.router.released.set()
    after = await reconcile(KEY, under_test.context)
    assert (while_open, after, under_test.router.requests) == (RECHECK_S, 10.0, before + 1)


@pytest.mark.looptime
async def test_a_failed_router_request_is_raised_once_and_then_repeated(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    under_test.clock.at_s += 3600

    async def fail() -> None:
        raise KeyError("a fault")

    request: Any = asyncio.ensure_future(fail())
    await run_pending_tasks()
    under_test.context.memory[KEY] = replace(under_test.context.memory[KEY], state_request=request)
    before = under_test.router.requests
    assert (await reconcile(KEY, under_test.context), under_test.router.requests) == (10.0, before + 1)


async def test_a_status_whose_counts_alone_changed_is_written_every_ten_seconds(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.up(instances=4)
    under_test.clock.at_s += 4
    await under_test.flip("chat-0", D)
    await under_test.reconcile_until_stable()
    ratios = []
    for pause_s in (0.0, 5.0, 1.0):
        under_test.clock.at_s += pause_s
        requeue_after_s = await under_test.reconcile_until_stable()
        assert requeue_after_s is not None
        ratios.append((await under_test.service()).status.ratio)
    assert ratios == ["2:2", "2:2", "1:3"]


async def test_a_changed_condition_is_written_at_once(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    under_test.engines.crash("chat-0")
    await reconcile(KEY, under_test.context)
    status = (await under_test.service()).status
    assert (
        status.ready,
        {c.type for c in status.conditions if c.type == "Degraded" and c.status == "True"},
    ) == (
        "3/4",
        {"Degraded"},
    )


async def test_a_tier_created_later_is_accepted(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=2, qosTiers=["gold"])

    async def verdict() -> str:
        return next(
            c.reason for c in (await under_test.service()).status.conditions if c.type == "TiersAccepted"
        )

    before = await verdict()
    await under_test.store.create(tier("gold"))
    await under_test.reconcile_until_stable()
    assert (before, await verdict()) == ("TierNotFound", "TiersFound")


class RacingStore:
    """A store in which another client patches the assignment just before the operator does."""

    def __init__(self, store: MemoryStore, race: Callable[[], Awaitable[None]]) -> None:
        self._store, self._race = store, race

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def patch(self, kind: Any, name: str, patch: Any, **options: Any) -> Any:
        if kind is PDAssignment:
            await self._race()
        return await self._store.patch(kind, name, patch, **options)


async def test_a_concurrent_write_of_the_assignment_is_a_conflict_and_stays(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.up(instances=4, roles={"prefill": {"min": 1}})
    await under_test.store.patch(
        PDService, "chat", {"spec": {"roles": {"decode": {"min": 2}}}}, namespace="default"
    )
    racing: Any = RacingStore(under_test.store, lambda: under_test.flip("chat-3", P))
    with pytest.raises(Conflict):
        await reconcile(KEY, replace(under_test.context, store=racing))
    assert (await under_test.assignment()).spec.roles["chat-3"].role is P


async def degraded(under_test: ServiceUnderTest) -> tuple[str, str, str]:
    found = {condition.type: condition for condition in (await under_test.service()).status.conditions}
    return found["Degraded"].status, found["Degraded"].reason, found["Degraded"].message


async def test_an_instance_with_invalid_engine_settings_is_named_and_stops_no_other(
    under_test: ServiceUnderTest,
) -> None:
    def facts(instance: PDInstance) -> EngineFacts:
        if instance.metadata.name == "chat-1":
            raise InvalidInput("profile", "lapptop", "is not one of laptop")
        return ENGINE_FACTS

    under_test.context = replace(under_test.context, engine_facts=facts)
    await under_test.up(instances=4)
    assert await under_test.phases() == {
        "chat-0": "Serving",
        "chat-1": "Starting",
        "chat-2": "Serving",
        "chat-3": "Serving",
    }
    why = "chat-1: its engine is starting: profile (lapptop) is not one of laptop"
    assert await degraded(under_test) == ("True", "EngineStartFailed", why)
    under_test.context = replace(under_test.context, engine_facts=lambda _: ENGINE_FACTS)
    await under_test.reconcile_until_stable()
    under_test.engines.become_ready()
    await under_test.reconcile_until_stable()
    assert set((await under_test.phases()).values()) == {"Serving"}
    assert (await degraded(under_test))[0] == "False"


async def test_an_instance_with_invalid_engine_settings_can_be_removed(under_test: ServiceUnderTest) -> None:
    def facts(instance: PDInstance) -> EngineFacts:
        if instance.metadata.name == "chat-3":
            raise InvalidInput("profile", "lapptop", "is not one of laptop")
        return ENGINE_FACTS

    under_test.context = replace(under_test.context, engine_facts=facts)
    await under_test.up(pools=[{"name": "flex", "instances": {"min": 3, "max": 4}}])
    await under_test.scale(4)
    await under_test.reconcile_until_stable()
    assert (await under_test.phases())["chat-3"] == "Starting"
    await under_test.scale(3)
    await under_test.reconcile_until_stable()
    assert await under_test.phases() == dict.fromkeys(("chat-0", "chat-1", "chat-2"), "Serving")


async def test_an_unexpected_error_is_a_condition_within_one_pass_until_a_pass_succeeds(
    under_test: ServiceUnderTest,
) -> None:
    await under_test.up(instances=2)

    def fail(_instance: PDInstance) -> EngineFacts:
        raise KeyError("a fault")

    broken = replace(under_test.context, engine_facts=fail)
    for _ in range(3):
        with pytest.raises(KeyError):
            await reconcile(KEY, broken)
    why = "internal error, please report it: KeyError('a fault')"
    assert await degraded(under_test) == ("True", "ReconcileFailed", why)
    version = await under_test.version()
    with pytest.raises(KeyError):
        await reconcile(KEY, broken)
    assert await under_test.version() == version, "a repeated failure is written once"
    assert await reconcile(KEY, under_test.context) == 0.0, "the next reconcile reports the success"
    await under_test.reconcile_until_stable()
    assert (await degraded(under_test))[0] == "False"


class StoreWithoutStatusPermission(RefusingStore):
    """A store that refuses the status of PDAssignments, as with a Role of an earlier version."""

    async def patch_status(self, kind: Any, name: str, patch: Any, *, namespace: str) -> Any:
        if kind is PDAssignment:
            raise Forbidden('cannot patch resource "pdassignments/status"')
        return await self._store.patch_status(kind, name, patch, namespace=namespace)


async def test_a_refused_status_of_the_assignment_is_named_and_stops_nothing(
    under_test: ServiceUnderTest,
) -> None:
    store: Any = StoreWithoutStatusPermission(under_test.store, "")
    under_test.context = replace(under_test.context, store=store)
    await under_test.up(instances=2)
    assert await under_test.phases() == dict.fromkeys(("chat-0", "chat-1"), "Serving")
    why = 'PDAssignment chat: cannot patch resource "pdassignments/status"'
    assert await degraded(under_test) == ("True", "ChildRefused", why)


async def test_a_refused_object_is_named_and_stops_no_other(under_test: ServiceUnderTest) -> None:
    store = RefusingStore(under_test.store, "chat-2")
    under_test.context = replace(under_test.context, store=store)
    await under_test.up(instances=4)
    assert await under_test.phases() == dict.fromkeys(("chat-0", "chat-1", "chat-3"), "Serving")
    assert await degraded(under_test) == ("True", "ChildRefused", "PDInstance chat-2: exceeded quota")
    store.refused = ""
    await under_test.reconcile_until_stable()
    under_test.engines.become_ready()
    await under_test.reconcile_until_stable()
    assert await under_test.phases() == dict.fromkeys(("chat-0", "chat-1", "chat-2", "chat-3"), "Serving")
    assert (await degraded(under_test))[0] == "False"
