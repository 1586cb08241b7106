"""The leader's lists: soon after a watch began anew, now and then, and never given up in silence."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fulcrum_cluster.objects import EVENT, POD, Object, ObjectKind, Page
from fulcrum_core.errors import Forbidden, StoreUnavailable
from fulcrum_operator.controller.kopf_feed import FOLLOWED
from fulcrum_operator.controller.leader import RELIST_S, RELIST_SOON_S, Leader, Options
from fulcrum_operator.controller.metrics import Meters
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.model import Read
from fulcrum_operator.plan.pools import desired_pools
from tests.unit.operator.builders import SETTINGS, service

pytestmark = pytest.mark.looptime

OPTIONS = Options(settings=SETTINGS)


class World:
    """A leader of a cluster that is empty, and of which nothing is heard but that a watch began anew."""

    def __init__(self) -> None:
        self.lists, self.failure = 0, list[Exception]()
        self.refusal = Forbidden("exceeded quota: services")
        self.events, self.made = list[Object](), list[Object]()
        self.store: Any = None
        self.objects: Any = self
        self.stop = asyncio.Event()
        self.begins_anew: Callable[[], None] = self.stop.clear
        connection: Any = self
        self.leader = Leader(connection, lambda _cache: self.feed(), OPTIONS, Meters(), lambda: True)

    def feed(self) -> Any:
        return self

    async def run(
        self, stop: asyncio.Event, *, on_started: Callable[[], None], on_listed: Callable[[], None]
    ) -> None:
        self.begins_anew = on_listed
        on_started()
        await stop.wait()

    async def list(self, kind: ObjectKind, *, namespace: str, labels: str) -> Page:
        del namespace, labels
        if self.failure:
            raise self.failure.pop()
        self.lists += kind == POD
        return [], "1"

    async def apply(self, _body: Object, *, manager: str, force: bool) -> Object:
        del manager, force
        raise self.refusal

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        assert namespace == "default"
        (self.events if kind == EVENT else self.made).append(body)
        return {**body, "metadata": {"resourceVersion": "1", **body["metadata"]}}

    async def tend(self, read: Read | None = None) -> str:
        """What a pass whose plan is carried out says of what it could not make."""
        with pytest.raises(Forbidden) as refused:
            await self.leader._tend(Observed(service=service(), now_s=0.0), Plan(read=read))
        return str(refused.value)

    def start(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(
            self.leader.run(self.stop, on_started=lambda: None), name="leader"
        )

    async def end(self, work: asyncio.Task[None]) -> None:
        self.stop.set()
        await work
        await self.leader.aclose()


async def test_everything_is_listed_soon_after_watches_began_anew_and_else_seldom() -> None:
    world = World()
    work = world.start()
    await asyncio.sleep(RELIST_S / 2)
    once = world.lists
    for _ in FOLLOWED:
        world.begins_anew()
    await asyncio.sleep(2 * RELIST_SOON_S)
    again = world.lists
    await asyncio.sleep(RELIST_S * 0.9)
    seldom = world.lists
    await asyncio.sleep(RELIST_S * 0.2)
    assert (once, again, seldom, world.lists) == (1, 2, 2, 3)
    await world.end(work)


async def test_a_list_that_fails_is_tried_again() -> None:
    world = World()
    world.failure = [StoreUnavailable("away")] * 3
    work = world.start()
    await asyncio.sleep(2)
    before = world.leader.synced
    await asyncio.sleep(2)
    assert (before, world.leader.synced) == (False, True)
    await world.end(work)


async def test_what_nobody_thought_of_ends_the_process_and_not_only_the_lists() -> None:
    world = World()
    world.failure = [KeyError("metadata")]
    with pytest.raises(KeyError):
        await world.start()
    assert world.stop.is_set()
    await world.leader.aclose()


async def test_a_model_is_read_whichever_child_is_refused() -> None:
    world = World()
    await world.tend(Read(desired_pools(service(), ())[0].spec.start, "k", 1))
    assert [pod["metadata"]["name"] for pod in world.made] == ["chat-model"]
    await world.leader.aclose()


async def test_a_child_that_is_refused_is_told_on_the_service_once_for_each_reason() -> None:
    world = World()
    for _ in range(3):
        assert await world.tend() == "exceeded quota: services"
    world.refusal = Forbidden("a webhook says no")
    await world.tend()
    told = [(event["reason"], event["message"].split(": ", 1)[1]) for event in world.events]
    assert told == [
        ("ChildRefused", "exceeded quota: services; tried again every few seconds"),
        ("ChildRefused", "a webhook says no; tried again every few seconds"),
    ]
    await world.leader.aclose()
