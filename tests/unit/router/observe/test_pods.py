"""Which pods take work, from what a watch of them tells."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fulcrum_router.observe.pods import PodWatcher
from tests.unit.router.fake_object_api import FakeObjectApi

DEADLINE_S = 20.0
ADDRESS = "10.0.0.1"


class WatchedPods:
    def __init__(self, seed: int) -> None:
        self.objects = FakeObjectApi()
        self.changes = 0
        self.watch = PodWatcher(
            self.objects,
            service="s",
            namespace="n",
            on_change=self._count,
            rng=random.Random(seed),
            sleep=_yield_once,
        )

    def _count(self) -> None:
        self.changes += 1

    def put(self, name: str, *, phase: str = "Running", ip: str | None = ADDRESS, **metadata: Any) -> None:
        status = {"phase": phase, **({} if ip is None else {"podIP": ip})}
        self.objects.put("Pod", name, metadata=metadata, status=status)

    def is_active(self) -> bool:
        return self.watch.is_active_at("s-0", ADDRESS)


async def _yield_once(_seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def pods(seed: int) -> AsyncIterator[WatchedPods]:
    made = WatchedPods(seed)
    made.put("s-0")
    running = asyncio.create_task(made.watch.run())
    await asyncio.wait_for(made.watch.synced.wait(), DEADLINE_S)
    yield made
    running.cancel()
    await asyncio.wait([running])


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_an_active_pod_is_active_at_its_own_address_only(pods: WatchedPods) -> None:
    availability = {
        (name, host): pods.watch.is_active_at(name, host)
        for name in ("s-0", "s-1")
        for host in (ADDRESS, "10.0.0.2")
    }
    assert [key for key, active in availability.items() if active] == [("s-0", ADDRESS)]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda pods: pods.put("s-0", deletionTimestamp="2026-01-01T00:00:00Z"), id="is deleted"),
        pytest.param(lambda pods: pods.put("s-0", phase="Failed"), id="failed, or was evicted"),
        pytest.param(lambda pods: pods.objects.remove("Pod", "s-0"), id="is gone"),
        pytest.param(lambda pods: pods.put("s-0", ip="10.0.0.9"), id="is another one"),
    ],
)
async def test_a_pod_is_not_active_once_it(pods: WatchedPods, end: Callable[[WatchedPods], None]) -> None:
    assert pods.is_active()
    before = pods.changes
    end(pods)
    await wait_until(lambda: pods.changes > before)
    assert not pods.is_active()


async def test_a_pod_deleted_during_an_api_server_outage_is_noticed_afterwards(pods: WatchedPods) -> None:
    pods.objects.unavailable = True
    pods.objects.end_watches()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pods.is_active(), "what was known stands"
    pods.objects.unavailable = False
    pods.objects.remove("Pod", "s-0")
    pods.watch._since = None  # as after 410 Gone
    await wait_until(lambda: not pods.is_active())


def test_every_pod_counts_as_active_before_the_first_list(seed: int) -> None:
    assert WatchedPods(seed).is_active()
