"""The assignment write against the memory store: what is checked, retried after a conflict, or refused."""

from collections.abc import Mapping
from typing import Any

import pytest

from fulcrum_cluster.assignment_write import update_assignment
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.assignment import build_flip
from fulcrum_core.errors import Conflict
from fulcrum_core.ports import R
from fulcrum_core.values import Actor, Role
from tests.objects import create_service_of_three

CLOCK = SystemClock()


class ContestedStore(MemoryStore):
    """A memory store in which another writer wins the first `conflicts_left` writes of the assignment."""

    conflicts_left = 0

    async def patch(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        if self.conflicts_left and kind is PDAssignment:
            self.conflicts_left -= 1
            flips = 40 + self.conflicts_left
            await super().patch(kind, name, {"spec": {"flips": flips}}, namespace=where["namespace"])
        return await super().patch(kind, name, patch, **where)


@pytest.fixture
async def store() -> ContestedStore:
    """A service of one prefill and two decode instances, all serving."""
    store = ContestedStore(CLOCK)
    await create_service_of_three(store)
    return store


async def flip_to_prefill(current: PDAssignment) -> PDAssignmentSpec:
    return build_flip(
        current.spec, "chat-1", Role.PREFILL, by=Actor.PERSON, reason="test", now_s=CLOCK.now_s()
    )


async def propose_nothing(_current: PDAssignment) -> None:
    return None


async def test_refused_change_is_not_written_and_has_the_reason(store: ContestedStore) -> None:
    await store.patch_status(PDInstance, "chat-2", {"phase": "Starting"}, namespace="default")
    update = await update_assignment(
        store, "chat", flip_to_prefill, namespace="default", clock=CLOCK, attempts_max=1
    )
    assert update.refusal == "0 instances would serve Decode, the floor is 1; leaving: chat-1"
    assert not update.changed
    assert update.after == await store.get(PDAssignment, "chat", namespace="default")


async def test_nothing_is_written_if_nothing_is_proposed(store: ContestedStore) -> None:
    update = await update_assignment(
        store, "chat", propose_nothing, namespace="default", clock=CLOCK, attempts_max=1
    )
    assert (update.changed, update.refusal, update.checked) == (False, None, None)


async def test_change_is_proposed_again_on_the_other_writers_assignment(store: ContestedStore) -> None:
    store.conflicts_left = 2
    conflicts: list[None] = []
    update = await update_assignment(
        store,
        "chat",
        flip_to_prefill,
        namespace="default",
        clock=CLOCK,
        attempts_max=3,
        on_conflict=lambda: conflicts.append(None),
    )
    assert (update.changed, len(conflicts)) == (True, 2)
    assert (update.after.spec.roles["chat-1"].role, update.after.spec.flips) == (Role.PREFILL, 41)


async def test_the_last_conflicting_write_raises(store: ContestedStore) -> None:
    store.conflicts_left = 2
    with pytest.raises(Conflict, match="other writers changed the assignment of chat first, 2 times"):
        await update_assignment(
            store, "chat", flip_to_prefill, namespace="default", clock=CLOCK, attempts_max=2
        )
