"""What `MemoryStore` promises beyond the contract of every store (`tests/integration/cluster`)."""

import asyncio

import pytest

from fulcrum_cluster.memory_store import MemoryStore, build_applied_document
from fulcrum_core.api import ObjectMeta, PDService, PDServiceSpec, QoSTier, QoSTierSpec, ServiceSloSpec
from fulcrum_core.errors import Gone, InvalidInput
from tests.clocks import ManualClock
from tests.waiting import run_pending_tasks


def tier(name: str = "gold", priority: int = 0) -> QoSTier:
    return QoSTier(metadata=ObjectMeta(name=name), spec=QoSTierSpec(priority=priority))


async def test_creation_time_and_versions_come_from_the_clock() -> None:
    store = MemoryStore(ManualClock(1767225600.25), new_uid=lambda: "uid-1")
    created = await store.create(tier())
    assert created.metadata == ObjectMeta(
        name="gold",
        uid="uid-1",
        resource_version="1767225600251",
        generation=1,
        creation_timestamp=1767225600.25,
    )


async def test_get_and_list_return_the_same_instance() -> None:
    store = MemoryStore(ManualClock())
    created = await store.create(tier())
    assert await store.get(QoSTier, "gold", namespace="default") is created
    assert (await store.list(QoSTier, namespace="default")).items[0] is created


async def test_version_of_an_earlier_store_is_gone() -> None:
    clock = ManualClock(1000.0)
    old = MemoryStore(clock)
    await old.create(tier())
    since = (await old.list(QoSTier, namespace="default")).resource_version
    clock.at_s = 1001.0
    new = MemoryStore(clock)
    await new.create(tier())
    with pytest.raises(Gone):
        await anext(new.watch(QoSTier, namespace="default", since=since))


@pytest.mark.parametrize("since", ["", "-1", "soon", "999999"])
async def test_invalid_or_future_version_is_gone(since: str) -> None:
    store = MemoryStore(ManualClock(1.0))
    with pytest.raises(Gone):
        await anext(store.watch(QoSTier, namespace="default", since=since))


async def test_watch_behind_the_history_is_gone() -> None:
    store = MemoryStore(ManualClock(), history=4)
    await store.create(tier())
    events = store.watch(QoSTier, namespace="default", since="0")
    await anext(events)
    for priority in range(1, 6):
        await store.patch(QoSTier, "gold", {"spec": {"priority": priority}}, namespace="default")
    with pytest.raises(Gone):
        await anext(events)


async def test_write_wakes_a_waiting_watch() -> None:
    store = MemoryStore(ManualClock())
    waiting = asyncio.ensure_future(anext(store.watch(QoSTier, namespace="default", since="0")))
    await run_pending_tasks()
    assert not waiting.done()
    created = await store.create(tier())
    assert (await waiting).object is created


async def test_durations_are_rounded_as_on_the_wire() -> None:
    """A reader gets the same object from the memory store as through a socket."""
    store = MemoryStore(ManualClock())
    spec = PDServiceSpec(model="m", slo=ServiceSloSpec(ttft=0.1234567891, tpot=0.05))
    created = await store.create(PDService(metadata=ObjectMeta(name="chat"), spec=spec))
    assert created == PDService.model_validate(created.dump())


async def test_create_validates_an_object_built_without_validation() -> None:
    broken = tier().replace(spec=QoSTierSpec.model_construct(priority=10**6))
    with pytest.raises(InvalidInput, match=r"spec\.priority"):
        await MemoryStore(ManualClock()).create(broken)


def test_applied_document_holds_only_fields_that_were_set() -> None:
    spec = PDServiceSpec(model="m", slo=ServiceSloSpec(ttft=2.0))
    assert build_applied_document(PDService(metadata=ObjectMeta(name="chat"), spec=spec)) == {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "PDService",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {"model": "m", "slo": {"ttft": "2s"}},
    }
