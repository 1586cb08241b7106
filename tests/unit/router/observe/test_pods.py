"""Which pods count as active, from a watch of a fake API server."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fulcrum_router.observe.pods import PodWatcher
from tests.unit.router.fake_object_api import FakeObjectApi
from tests.waiting import run_pending_tasks, wait_until

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
            sleep=_retry_at_once,
        )

    def _count(self) -> None:
        self.changes += 1

    def put(self, name: str, *, phase: str = "Running", ip: str | None = ADDRESS, **metadata: Any) -> None:
        status = {"phase": phase, **({} if ip is None else {"podIP": ip})}
        self.objects.put("Pod", name, metadata=metadata, status=status)

    def is_active(self) -> bool:
        return self.watch.is_active_at("s-0", ADDRESS)


async def _retry_at_once(_seconds: float) -> None:
    await run_pending_tasks()


@pytest.fixture
async def pods(seed: int) -> AsyncIterator[WatchedPods]:
    made = WatchedPods(seed)
    made.put("s-0")
    running = asyncio.create_task(made.watch.run())
    await asyncio.wait_for(made.watch.synced.wait(), DEADLINE_S)
    yield made
    running.cancel()
    await asyncio.wait([running])


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
        pytest.param(
            lambda pods: pods.put("s-0", deletionTimestamp="2026-01-01T00:00:00Z"), id="is being deleted"
        ),
        pytest.param(lambda pods: pods.put("s-0", phase="Failed"), id="has failed or was evicted"),
        pytest.param(lambda pods: pods.objects.remove("Pod", "s-0"), id="was deleted"),
        pytest.param(lambda pods: pods.put("s-0", ip="10.0.0.9"), id="has another address"),
        pytest.param(
            lambda pods: pods.put("s-0", phase="Pending", ip=None), id="was created again without an address"
        ),
    ],
)
async def test_a_pod_is_not_active_once_it(pods: WatchedPods, end: Callable[[WatchedPods], None]) -> None:
    assert pods.is_active()
    before = pods.changes
    end(pods)
    await wait_until(lambda: pods.changes > before, "the change is noticed")
    assert not pods.is_active()


async def test_a_pod_deleted_during_an_api_server_outage_is_noticed_afterwards(pods: WatchedPods) -> None:
    pods.objects.unavailable = True
    pods.objects.expire_watches()
    lists = pods.objects.lists
    await wait_until(lambda: pods.objects.lists > lists + 1, "two lists were refused")
    assert pods.is_active(), "the last known state is used"
    pods.objects.remove("Pod", "s-0")
    pods.objects.unavailable = False
    await wait_until(lambda: not pods.is_active(), "the pod is not active")


def test_every_pod_counts_as_active_before_the_first_list(seed: int) -> None:
    assert WatchedPods(seed).is_active()
