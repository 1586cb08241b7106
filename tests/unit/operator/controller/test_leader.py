"""The leader lists all kinds after a watch restarted and from time to time, and reports refused children."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fulcrum_cluster.objects import EVENT, POD, SERVICE, Object, ObjectKind, ObjectList
from fulcrum_core.api import KINDS
from fulcrum_core.errors import Forbidden, NotFound, StoreUnavailable
from fulcrum_operator.controller.context import Problems
from fulcrum_operator.controller.kopf_feed import WATCHED_KINDS
from fulcrum_operator.controller.leader import RELIST_AFTER_GAP_S, RELIST_S, Leader, OperatorOptions
from fulcrum_operator.controller.metrics import Metrics
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.model import ModelReadRequest
from fulcrum_operator.plan.pools import desired_pools
from tests.unit.operator.builders import SETTINGS, service
from tests.waiting import advance

pytestmark = pytest.mark.looptime

OPTIONS = OperatorOptions(settings=SETTINGS)


class World:
    """A leader of an empty cluster whose feed reports restarted watches only."""

    def __init__(self) -> None:
        self.lists, self.failures = 0, list[Exception]()
        self.refusal = Forbidden("exceeded quota: services")
        self.events, self.created = list[Object](), list[Object]()
        self.store: Any = None
        self.objects: Any = self
        self.stop = asyncio.Event()
        self.restart_watch: Callable[[], None] = self.stop.clear
        connection: Any = self
        self.leader = Leader(connection, lambda _cache: self.feed(), OPTIONS, Metrics(), lambda: True)

    def feed(self) -> Any:
        return self

    async def run(
        self, stop: asyncio.Event, *, on_started: Callable[[], None], on_object_listed: Callable[[], None]
    ) -> None:
        self.restart_watch = on_object_listed
        on_started()
        await stop.wait()

    async def get_raw(self, path: str) -> Object:
        assert path == "/apis/fulcrum.dev/v1alpha1"
        return {"resources": [{"name": kind.plural} for kind in KINDS]}

    async def list(self, kind: ObjectKind, *, namespace: str, labels: str) -> ObjectList:
        del namespace, labels
        if self.failures:
            raise self.failures.pop()
        self.lists += kind == POD
        return [], "1"

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Object:
        raise NotFound(f"{namespace}/{name}")

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        assert namespace == "default"
        if kind == SERVICE:
            raise self.refusal
        (self.events if kind == EVENT else self.created).append(body)
        return {**body, "metadata": {"resourceVersion": "1", **body["metadata"]}}

    async def after_apply(self, read: ModelReadRequest | None = None) -> Problems:
        """Run what follows the applied plan."""
        return await self.leader._after_apply(Observed(service=service(), now_s=0.0), Plan(model_read=read))

    def start(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(
            self.leader.run(self.stop, on_started=lambda: None), name="leader"
        )

    async def end(self, work: asyncio.Task[None]) -> None:
        self.stop.set()
        await work
        await self.leader.aclose()


async def test_restarted_watches_cause_one_relist_soon_and_otherwise_relists_are_rare() -> None:
    world = World()
    work = world.start()
    await advance(RELIST_S / 2)
    at_start = world.lists
    for _ in WATCHED_KINDS:
        world.restart_watch()
    await advance(2 * RELIST_AFTER_GAP_S)
    after_gap = world.lists
    await advance(RELIST_S * 0.9)
    before_period = world.lists
    await advance(RELIST_S * 0.2)
    # At the start: once before the watches, and once for what was deleted before they listed.
    assert (at_start, after_gap, before_period, world.lists) == (2, 3, 3, 4)
    await world.end(work)


async def test_a_failed_list_is_retried() -> None:
    world = World()
    world.failures = [StoreUnavailable("no response")] * 3
    work = world.start()
    await advance(2)
    before = world.leader.synced
    await advance(2)
    assert (before, world.leader.synced) == (False, True)
    await world.end(work)


async def test_an_unexpected_error_in_a_list_ends_the_leader() -> None:
    world = World()
    world.failures = [KeyError("metadata")]
    with pytest.raises(KeyError):
        await world.start()
    assert world.stop.is_set()
    await world.leader.aclose()


async def test_a_refused_child_stops_no_other_child_and_delays_no_model_read() -> None:
    world = World()
    launch = desired_pools(service(), ())[0].spec.launch_spec
    problems = await world.after_apply(ModelReadRequest(launch, "k", 1))
    assert problems.causes == (("ChildRefused", "Service chat: exceeded quota: services"),)
    created = [f"{body['kind']} {body['metadata']['name']}" for body in world.created]
    assert len(created) == 11  # the EndpointSlice waits for the Service, whose address decides its family
    assert {"Deployment chat-router", "NetworkPolicy chat-engines", "Pod chat-model"} <= set(created)
    await world.leader.aclose()
