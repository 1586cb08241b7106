"""Which pods take work, from what a watch of them tells."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fulcrum_router.observe.pods import PodWatch
from tests.unit.router.objects import MemoryObjects

DEADLINE_S = 20.0
ADDRESS = "10.0.0.1"


class Pods:
    def __init__(self, seed: int) -> None:
        self.objects = MemoryObjects()
        self.changes = 0
        self.watch = PodWatch(
            self.objects,
            service="s",
            namespace="n",
            on_change=self._count,
            rng=random.Random(seed),
            sleep=_skip,
        )

    def _count(self) -> None:
        self.changes += 1

    def put(self, name: str, *, phase: str = "Running", ip: str | None = ADDRESS, **metadata: Any) -> None:
        status = {"phase": phase, **({} if ip is None else {"podIP": ip})}
        self.objects.put("Pod", name, metadata=metadata, status=status)

    def takes_work(self) -> bool:
        return self.watch.takes_work("s-0", ADDRESS)


async def _skip(_seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def pods(seed: int) -> AsyncIterator[Pods]:
    made = Pods(seed)
    made.put("s-0")
    running = asyncio.create_task(made.watch.run())
    await asyncio.wait_for(made.watch.synced.wait(), DEADLINE_S)
    yield made
    running.cancel()
    await asyncio.wait([running])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_pod_that_stays_takes_work_at_its_address_only(pods: Pods) -> None:
    seen = {
        (name, host): pods.watch.takes_work(name, host)
        for name in ("s-0", "s-1")
        for host in (ADDRESS, "10.0.0.2")
    }
    assert [key for key, takes in seen.items() if takes] == [("s-0", ADDRESS)]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda pods: pods.put("s-0", deletionTimestamp="2026-01-01T00:00:00Z"), id="is deleted"),
        pytest.param(lambda pods: pods.put("s-0", phase="Failed"), id="failed, or was evicted"),
        pytest.param(lambda pods: pods.objects.drop("Pod", "s-0"), id="is gone"),
        pytest.param(lambda pods: pods.put("s-0", ip="10.0.0.9"), id="is another one"),
    ],
)
async def test_a_pod_gets_no_more_work_once_it(pods: Pods, end: Callable[[Pods], None]) -> None:
    assert pods.takes_work()
    before = pods.changes
    end(pods)
    await until(lambda: pods.changes > before)
    assert not pods.takes_work()


async def test_a_pod_deleted_while_the_api_server_was_away_is_noticed_after(pods: Pods) -> None:
    pods.objects.away = True
    pods.objects.cut()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pods.takes_work(), "what was known stands"
    pods.objects.away = False
    pods.objects.drop("Pod", "s-0")
    pods.watch._since = None  # as after 410 Gone
    await until(lambda: not pods.takes_work())


def test_before_the_first_list_nothing_is_held_against_a_pod(seed: int) -> None:
    assert Pods(seed).takes_work()
