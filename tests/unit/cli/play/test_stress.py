"""Forced flips: the requested number, or an error with the reason."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import pytest

from fulcrum_cli.play.observer import Observer
from fulcrum_cli.play.stress import NO_FLIP_TIMEOUT_S, ForcedFlips, NoFlipPossible
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.values import Role
from tests.objects import make_object
from tests.unit.cli.assignment.test_writes import store

__all__ = ["store"]

pytestmark = pytest.mark.looptime(start=0.0)


class FakeObserver:
    """An observer of a service whose router acknowledges immediately."""

    def __init__(self, instances: Mapping[str, PDInstance]) -> None:
        self.instances = instances

    async def wait_acknowledged(self, _generation: int, *, timeout_s: float) -> None:
        pass


async def make_forced_flips(store: MemoryStore) -> ForcedFlips:
    listed = (await store.list(PDInstance, namespace="default")).items
    observer = FakeObserver(MappingProxyType({i.metadata.name: i for i in listed}))
    return ForcedFlips(store, cast(Observer, observer), "chat", "default")


async def test_forced_flips_take_the_other_role_while_one_is_at_its_floor(store: MemoryStore) -> None:
    """With one prefill and two decode instances and floors of one, the first flip must be to Prefill."""
    flips = await make_forced_flips(store)
    await flips.run(5)
    spec = (await store.get(PDAssignment, "chat", namespace="default")).spec
    assert (flips.flips_made, spec.flips) == (5, 5)


async def test_forced_flips_pass_over_an_instance_whose_pool_has_a_fixed_role(store: MemoryStore) -> None:
    counts = {"replicas": 1, "instances": {"min": 1}}
    pool = {"service": "chat", "model": "m", "engine": {}, "role": "Decode", **counts}
    await store.create(make_object(PDPool, "fixed", pool))
    await store.delete(PDInstance, "chat-1", namespace="default")
    spec = {"service": "chat", "pool": "fixed", "model": "m", "engine": {"type": "Simulated"}}
    await store.create(make_object(PDInstance, "chat-1", spec))
    await store.patch_status(PDInstance, "chat-1", {"phase": "Serving"}, namespace="default")
    flips = await make_forced_flips(store)
    await flips.run(1)
    roles = (await store.get(PDAssignment, "chat", namespace="default")).spec.roles
    assert [roles[name].role for name in ("chat-1", "chat-2")] == [Role.DECODE, Role.PREFILL]


async def test_forced_flips_stop_with_the_reason_once_no_instance_may_flip(store: MemoryStore) -> None:
    await store.patch(PDService, "chat", {"spec": {"roles": {"decode": {"min": 2}}}}, namespace="default")
    flips, began_s = await make_forced_flips(store), asyncio.get_running_loop().time()
    with pytest.raises(NoFlipPossible, match=r"no instance may flip: instance .* the floor is"):
        await flips.run(1)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(NO_FLIP_TIMEOUT_S, abs=0.1)
