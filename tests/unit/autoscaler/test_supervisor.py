"""The supervisor runs one loop per service, each with its own router client, history and metrics."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable

import pytest

from fulcrum_autoscaler.decision_history import DecisionHistories
from fulcrum_autoscaler.metrics import AutoscalerMetrics
from fulcrum_autoscaler.supervisor import AutoscalerSupervisor
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import FlipRequest, RouterState
from tests.waiting import run_pending_tasks, wait_until

Key = tuple[str, str]


class UnavailableRouter:
    """A `RouterClient` that never responds and records that it was called."""

    def __init__(self, polled: set[Key], key: Key, *, fault: bool) -> None:
        self._polled, self._key, self._fault = polled, key, fault

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:  # noqa: ARG002
        self._polled.add(self._key)
        if self._fault:
            raise ValueError("a bug in the loop")
        raise RouterUnavailable("no response")

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:  # noqa: ARG002
        raise RouterUnavailable("no response")


class SupervisorSetup:
    def __init__(self, namespace: str = "", only_service: str | None = None, faulty: str = "") -> None:
        self.store = MemoryStore(SystemClock())
        self.histories, self.metrics = DecisionHistories(), AutoscalerMetrics()
        self.polled: set[Key] = set()
        self.supervisor = AutoscalerSupervisor(
            self.store,
            namespace=namespace,
            only_service=only_service,
            router_client_for=lambda namespace, name, _service: UnavailableRouter(
                self.polled, (namespace, name), fault=name == faulty
            ),
            clock=SystemClock(),
            histories=self.histories,
            metrics=self.metrics,
        )

    async def create(self, namespace: str, name: str) -> None:
        manifest = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"model": "m", "instances": 2},
        }
        await self.store.create(parse_as(PDService, manifest))

    def services_with_decisions(self) -> set[Key]:
        """Services with a decision in their history."""
        return {(entry["namespace"], entry["service"]) for entry in self.histories.recent(1000)}

    def services_with_metrics(self) -> set[Key]:
        """Services with series in the metrics."""
        series = [s.labels for family in self.metrics.registry.collect() for s in family.samples]
        return {(labels["namespace"], labels["service"]) for labels in series if "service" in labels}


@pytest.fixture
async def start() -> AsyncIterator[Callable[[SupervisorSetup], None]]:
    running: list[asyncio.Task[None]] = []
    yield lambda setup: running.append(asyncio.ensure_future(setup.supervisor.run()))
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_each_service_of_each_namespace_has_a_loop_while_it_exists(
    start: Callable[[SupervisorSetup], None],
) -> None:
    setup = SupervisorSetup()
    await setup.create("prod", "chat")
    start(setup)
    await wait_until(lambda: setup.services_with_decisions() == {("prod", "chat")})
    assert setup.supervisor.ready
    await setup.create("test", "chat")
    await setup.create("prod", "code")
    every = {("prod", "chat"), ("prod", "code"), ("test", "chat")}
    await wait_until(lambda: (setup.services_with_decisions(), setup.polled) == (every, every))
    await setup.store.delete(PDService, "chat", namespace="prod")
    rest = every - {("prod", "chat")}
    await wait_until(lambda: (setup.services_with_decisions(), setup.services_with_metrics()) == (rest, rest))
    await setup.create("prod", "chat")
    await wait_until(lambda: setup.services_with_decisions() == every)


async def test_a_service_deleted_and_created_again_at_once_has_a_loop(
    start: Callable[[SupervisorSetup], None],
) -> None:
    setup = SupervisorSetup()
    await setup.create("prod", "chat")
    start(setup)
    await wait_until(lambda: bool(setup.services_with_decisions()))
    await setup.store.delete(PDService, "chat", namespace="prod")
    await setup.create("prod", "chat")
    setup.polled.clear()
    await wait_until(
        lambda: bool(setup.polled and setup.services_with_decisions() and setup.services_with_metrics())
    )


def count_ended_loops() -> int:
    """Tasks of loops that have ended and are still referred to."""
    tasks = (known for known in gc.get_objects() if isinstance(known, asyncio.Task))
    return sum(task.done() and "_run_loop" in repr(task.get_coro()) for task in tasks)


async def test_the_loop_of_a_deleted_service_is_forgotten(start: Callable[[SupervisorSetup], None]) -> None:
    setup = SupervisorSetup()
    start(setup)
    for number in range(5):
        await setup.create("prod", f"chat-{number}")
        await wait_until(lambda: bool(setup.services_with_metrics()))
        await setup.store.delete(PDService, f"chat-{number}", namespace="prod")
        await wait_until(lambda: not setup.services_with_metrics())
    await run_pending_tasks()
    gc.collect()
    assert count_ended_loops() == 0


async def test_with_a_namespace_other_namespaces_are_ignored(
    start: Callable[[SupervisorSetup], None],
) -> None:
    setup = SupervisorSetup(namespace="prod")
    await setup.create("test", "chat")
    await setup.create("prod", "chat")
    start(setup)
    await wait_until(lambda: bool(setup.services_with_decisions()))
    assert setup.services_with_decisions() == {("prod", "chat")}


async def test_a_named_service_has_a_loop_before_it_exists(start: Callable[[SupervisorSetup], None]) -> None:
    setup = SupervisorSetup(namespace="default", only_service="chat")
    await setup.create("default", "other")
    start(setup)
    await wait_until(lambda: bool(setup.services_with_decisions()))
    [entry] = setup.histories.recent(1, service="chat")
    assert entry["reason"] == "cannot decide: the store has no PDService"
    assert setup.services_with_decisions() == {("default", "chat")}


async def test_a_failing_loop_does_not_stop_the_others(start: Callable[[SupervisorSetup], None]) -> None:
    setup = SupervisorSetup(faulty="bad")
    await setup.create("prod", "bad")
    start(setup)
    await wait_until(lambda: ("prod", "bad") in setup.polled)
    await setup.create("prod", "chat")
    await wait_until(lambda: ("prod", "chat") in setup.services_with_decisions())
