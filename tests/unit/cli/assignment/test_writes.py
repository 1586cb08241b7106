"""`flip_instance` checks a person's flip and writes it to the PDAssignment in one conditional write."""

from typing import Any

import pytest

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.errors import Conflict, InvalidInput
from fulcrum_core.ports import R
from fulcrum_core.values import Actor, Role
from tests.objects import create_service_of_three, make_object


@pytest.fixture
async def store() -> MemoryStore:
    """A service with one prefill and two decode instances, all serving."""
    store = MemoryStore(SystemClock())
    await create_service_of_three(store)
    return store


async def test_a_flip_is_written_with_its_reason_and_its_pin(store: MemoryStore) -> None:
    before = await store.get(PDAssignment, "chat", namespace="default")
    after = await flip_instance(
        store, "chat", "chat-1", Role.PREFILL, namespace="default", reason="by command", pin_s=60.0
    )
    entry = after.entry
    assert (entry.role, entry.by, entry.reason) == (Role.PREFILL, Actor.PERSON, "by command")
    assert entry.pinned_until == pytest.approx(entry.since + 60.0, abs=0.001)
    assert after.generation == before.metadata.generation + 1
    assert after.assignment.spec.flips == 1


async def test_an_unknown_instance_is_refused_with_the_known_names(store: MemoryStore) -> None:
    with pytest.raises(InvalidInput) as caught:
        await flip_instance(store, "chat", "chat-9", Role.PREFILL, namespace="default", reason="")
    assert (
        str(caught.value)
        == "instance (chat-9) is not an instance of service chat; it has chat-0, chat-1, chat-2"
    )


async def test_a_person_cannot_flip_the_last_instance_of_a_role(store: MemoryStore) -> None:
    with pytest.raises(InvalidInput) as caught:
        await flip_instance(store, "chat", "chat-0", Role.DECODE, namespace="default", reason="")
    assert str(caught.value) == (
        "instance (chat-0) may not flip to Decode: 0 instances would serve Prefill, the floor is 1; "
        "leaving: chat-0; flip another instance to Prefill first"
    )


async def test_with_two_serving_instances_a_flip_is_refused_and_advises_more_instances(
    store: MemoryStore,
) -> None:
    await store.patch_status(PDInstance, "chat-2", {"phase": "Starting"}, namespace="default")
    with pytest.raises(InvalidInput) as caught:
        await flip_instance(store, "chat", "chat-1", Role.PREFILL, namespace="default", reason="")
    assert str(caught.value) == (
        "instance (chat-1) may not flip to Prefill: 0 instances would serve Decode, the floor is 1; "
        "leaving: chat-1; no instance is left to flip: raise spec.instances, or the instances of a pool"
    )


async def test_a_refusal_that_more_instances_would_not_change_gives_no_advice(store: MemoryStore) -> None:
    pool = {"service": "chat", "model": "m", "engine": {}, "role": "Decode"}
    counts = {"replicas": 3, "instances": {"min": 3}}
    await store.create(make_object(PDPool, "flex", {**pool, **counts}))
    with pytest.raises(InvalidInput, match=r"belongs to a pool that only serves Decode$"):
        await flip_instance(store, "chat", "chat-1", Role.PREFILL, namespace="default", reason="")


class ReplacingStore(MemoryStore):
    """A store that replaces chat-2 by a starting instance of that name before the assignment is read."""

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        if kind is PDAssignment:
            await self.patch_status(PDInstance, "chat-2", {"phase": "Starting"}, namespace=namespace)
        return await super().get(kind, name, namespace=namespace)


async def test_an_instance_replaced_before_the_assignment_was_read_does_not_count_towards_a_floor(
    store: MemoryStore,
) -> None:
    store_with_replacement = ReplacingStore(SystemClock())
    vars(store_with_replacement).update(vars(store))
    with pytest.raises(InvalidInput, match="Decode"):
        await flip_instance(
            store_with_replacement, "chat", "chat-1", Role.PREFILL, namespace="default", reason=""
        )


class ConflictingStore(MemoryStore):
    """A store in which another client changes the object before each write, so that each write conflicts."""

    async def patch(self, *_args: object, **_kwargs: object) -> Any:
        raise Conflict("changed since")


async def test_a_flip_stops_after_ten_conflicting_writes(store: MemoryStore) -> None:
    conflicting_store = ConflictingStore(SystemClock())
    vars(conflicting_store).update(vars(store))
    with pytest.raises(Conflict, match="first, 10 times"):
        await flip_instance(conflicting_store, "chat", "chat-1", Role.PREFILL, namespace="default", reason="")
