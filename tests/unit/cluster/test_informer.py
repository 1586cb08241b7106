"""The informer is current while the store responds, keeps its state during an outage and recovers after."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from fulcrum_cluster.informer import Informer
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api import ObjectMeta, PDService, PDServiceSpec, QoSTier, QoSTierSpec, Resource
from fulcrum_core.errors import Gone, InvalidInput, StoreUnavailable
from fulcrum_core.ports import Listing, WatchEvent
from tests.clocks import ManualClock
from tests.waiting import run_pending_tasks, wait_until, yield_control

R = TypeVar("R", bound=Resource)
Change = tuple[int | None, int | None]


class FlakyStore(MemoryStore):
    """A memory store that can be unavailable, cut its watches, or end the next watch with an error."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), bookmark_interval_s=0.0)
        self.unavailable = False
        self.fault: Exception | None = None
        """Error that ends the next watch at once."""
        self.cut = asyncio.Event()
        self.lists = 0
        self.resumed_from: list[str] = []

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        self.lists += 1
        if self.unavailable:
            raise StoreUnavailable("away")
        return await super().list(kind, namespace=namespace)

    async def watch(
        self, kind: type[R], *, namespace: str, since: str
    ) -> AsyncGenerator[WatchEvent[R], None]:
        self.resumed_from.append(since)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        events = super().watch(kind, namespace=namespace, since=since)
        while not self.unavailable:
            following, cut = asyncio.ensure_future(anext(events)), asyncio.ensure_future(self.cut.wait())
            try:
                await asyncio.wait((following, cut), return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    break
                yield following.result()
            finally:
                following.cancel()
                cut.cancel()
        raise StoreUnavailable("cut")

    async def break_watches(self) -> None:
        self.cut.set()
        await run_pending_tasks()
        self.cut.clear()


class Sleeper:
    """Sleep function that records the delays and returns after one turn of the event loop."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def __call__(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        await yield_control(1)


@asynccontextmanager
async def running_informer(
    store: FlakyStore, *, sleep: Sleeper, changes: list[Change] | None = None
) -> AsyncIterator[Informer[QoSTier]]:
    def on_change(old: QoSTier | None, new: QoSTier | None) -> None:
        if changes is not None:
            changes.append((old.spec.priority if old else None, new.spec.priority if new else None))

    informer = Informer(
        store, QoSTier, namespace="default", on_change=on_change, rng=random.Random(1), sleep=sleep
    )
    task = asyncio.ensure_future(informer.run())
    await run_pending_tasks()
    try:
        yield informer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def sleep() -> Sleeper:
    return Sleeper()


@pytest.fixture
async def store() -> FlakyStore:
    return FlakyStore()


async def put(store: FlakyStore, name: str, priority: int) -> None:
    if name in {
        obj.metadata.name for obj in (await MemoryStore.list(store, QoSTier, namespace="default")).items
    }:
        await store.patch(QoSTier, name, {"spec": {"priority": priority}}, namespace="default")
    else:
        await store.create(QoSTier(metadata=ObjectMeta(name=name), spec=QoSTierSpec(priority=priority)))


def priorities(informer: Informer[QoSTier]) -> dict[str, int]:
    return {name: obj.spec.priority for name, obj in informer.objects.items()}


async def test_first_list_fills_the_informer(store: FlakyStore, sleep: Sleeper) -> None:
    await put(store, "a", 1)
    async with running_informer(store, sleep=sleep) as informer:
        assert informer.synced.is_set()
        assert priorities(informer) == {"a": 1}


async def test_on_change_receives_the_object_before_and_after(store: FlakyStore, sleep: Sleeper) -> None:
    changes: list[Change] = []
    await put(store, "a", 1)
    async with running_informer(store, sleep=sleep, changes=changes):
        await put(store, "a", 2)
        await put(store, "b", 7)
        await store.delete(QoSTier, "a", namespace="default")
        await run_pending_tasks()
    assert changes == [(None, 1), (1, 2), (None, 7), (2, None)]


async def test_informer_is_not_synced_before_the_first_list(store: FlakyStore, sleep: Sleeper) -> None:
    store.unavailable = True
    async with running_informer(store, sleep=sleep) as informer:
        assert not informer.synced.is_set()
        store.unavailable = False
        await run_pending_tasks()
        assert informer.synced.is_set()


async def test_last_known_state_is_kept_while_the_store_is_unavailable(
    store: FlakyStore, sleep: Sleeper
) -> None:
    changes: list[Change] = []
    await put(store, "a", 1)
    async with running_informer(store, sleep=sleep, changes=changes) as informer:
        store.unavailable = True
        await store.break_watches()
        assert priorities(informer) == {"a": 1}
        assert informer.synced.is_set()
    assert changes == [(None, 1)]


async def test_interrupted_watch_resumes_without_a_new_list(store: FlakyStore, sleep: Sleeper) -> None:
    changes: list[Change] = []
    async with running_informer(store, sleep=sleep, changes=changes):
        await put(store, "a", 1)
        await run_pending_tasks()
        await store.break_watches()
        await put(store, "a", 2)
        await run_pending_tasks()
    assert (changes, store.lists) == ([(None, 1), (1, 2)], 1)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Gone("too old"), id="a version that is too old"),
        pytest.param(InvalidInput("resourceVersion", "7", "is wrong"), id="a request called invalid"),
        pytest.param(KeyError("type"), id="a response that is no event"),
    ],
)
async def test_relist_after_an_error_reports_only_differences(
    store: FlakyStore, sleep: Sleeper, fault: Exception
) -> None:
    changes: list[Change] = []
    for name in ("same", "changed", "deleted"):
        await put(store, name, 1)
    async with running_informer(store, sleep=sleep, changes=changes) as informer:
        changes.clear()
        store.unavailable = True
        await store.break_watches()
        await put(store, "changed", 2)
        await put(store, "new", 3)
        await store.delete(QoSTier, "deleted", namespace="default")
        store.fault, store.unavailable = fault, False
        await run_pending_tasks()
        assert priorities(informer) == {"same": 1, "changed": 2, "new": 3}
    assert changes == [(1, None), (1, 2), (None, 3)]


async def test_retry_delay_doubles_to_two_seconds_with_jitter(store: FlakyStore, sleep: Sleeper) -> None:
    store.unavailable = True
    async with running_informer(store, sleep=sleep):
        await wait_until(lambda: len(sleep.slept_s) > 10, "more than ten retries")
    whole = [min(2.0, 0.05 * 2**attempt) for attempt in range(len(sleep.slept_s))]
    shares = [slept / most for slept, most in zip(sleep.slept_s, whole, strict=True)]
    assert all(0.5 <= share <= 1.0 for share in shares)
    assert len(set(shares)) == len(shares)


async def test_event_resets_the_retry_delay(store: FlakyStore, sleep: Sleeper) -> None:
    store.unavailable = True
    async with running_informer(store, sleep=sleep):
        store.unavailable = False
        await run_pending_tasks()
        await put(store, "a", 1)
        await run_pending_tasks()
        sleep.slept_s.clear()
        await store.break_watches()
    assert 0.025 <= sleep.slept_s[0] <= 0.05


async def test_watch_resumes_from_the_last_bookmark(store: FlakyStore, sleep: Sleeper) -> None:
    async with running_informer(store, sleep=sleep):
        await store.create(PDService(metadata=ObjectMeta(name="chat"), spec=PDServiceSpec(model="m")))
        await run_pending_tasks()
        await store.break_watches()
        await run_pending_tasks()
    assert (store.resumed_from[0], {*store.resumed_from[1:]}) == ("0", {"1"})
