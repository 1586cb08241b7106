"""Flips that are forced: as many as asked for, or a plain word why not."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import pytest

from fulcrum_cli.play.drivers import STUCK_S, ForcedFlips, Stuck
from fulcrum_cli.play.observer import Observer
from fulcrum_cluster.memory import MemoryStore
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from tests.unit.cli.assignment.test_write import store

__all__ = ["store"]

pytestmark = pytest.mark.looptime(start=0.0)


class Watching:
    """An observer of a service whose router acknowledges at once."""

    def __init__(self, instances: Mapping[str, PDInstance]) -> None:
        self.instances = instances

    async def acknowledge(self, _generation: int, *, timeout_s: float) -> None:
        pass


async def forced(store: MemoryStore) -> ForcedFlips:
    listed = (await store.list(PDInstance, namespace="default")).items
    watching = Watching(MappingProxyType({i.metadata.name: i for i in listed}))
    return ForcedFlips(store, cast(Observer, watching), "chat", "default")


async def test_flips_go_on_from_the_other_role_where_one_is_at_its_floor(store: MemoryStore) -> None:
    """One prefills and two decode with floors of one: the first flip can only go to Prefill."""
    flips = await forced(store)
    await flips.run(5)
    spec = (await store.get(PDAssignment, "chat", namespace="default")).spec
    assert (flips.done, spec.flips) == (5, 5)


async def test_flips_that_no_wait_makes_possible_end_with_the_reason(store: MemoryStore) -> None:
    await store.patch(PDService, "chat", {"spec": {"roles": {"decode": {"min": 2}}}}, namespace="default")
    flips, began_s = await forced(store), asyncio.get_running_loop().time()
    with pytest.raises(Stuck, match=r"no instance may flip: instance .* the floor is"):
        await flips.run(1)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(STUCK_S, abs=0.1)
