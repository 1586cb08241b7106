"""A store read from the cache: its own writes are in it at once, and a write refused has it catch up."""

from dataclasses import dataclass, field

import pytest

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory import MemoryStore
from fulcrum_core.api import PDService
from fulcrum_core.errors import Conflict, NotFound
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.cached_store import CachedStore, NotLeading
from tests.unit.operator.builders import service


@dataclass
class World:
    leads: bool = True
    behind: MemoryStore = field(default_factory=lambda: MemoryStore(SystemClock()))
    cache: Cache = field(default_factory=lambda: Cache(lambda _key: None))

    def __post_init__(self) -> None:
        self.store = CachedStore(self.behind, self.cache, lambda: self.leads)

    async def model(self) -> str:
        return (await self.store.get(PDService, "chat", namespace="default")).spec.model

    async def patch(self, model: str, version: str | None = None) -> PDService:
        patch = {"spec": {"model": model}}
        return await self.store.patch(PDService, "chat", patch, namespace="default", resource_version=version)


@pytest.fixture
def world() -> World:
    return World()


async def test_what_it_wrote_is_read_at_once(world: World) -> None:
    await world.store.create(service())
    await world.patch("n")
    assert await world.model() == "n"


async def test_what_others_wrote_is_not_read_before_it_was_heard(world: World) -> None:
    await world.behind.create(service())
    with pytest.raises(NotFound):
        await world.model()


async def test_a_conflict_has_it_catch_up(world: World) -> None:
    made = await world.store.create(service())
    await world.behind.patch(PDService, "chat", {"spec": {"model": "theirs"}}, namespace="default")
    with pytest.raises(Conflict):
        await world.patch("ours", made.metadata.resource_version)
    assert await world.model() == "theirs"


async def test_what_is_there_already_is_a_conflict_and_known_then(world: World) -> None:
    await world.behind.create(service())
    with pytest.raises(Conflict):
        await world.store.create(service())
    assert await world.model() == "m"


async def test_what_is_gone_is_a_conflict_and_gone_then(world: World) -> None:
    await world.store.create(service())
    await world.behind.delete(PDService, "chat", namespace="default")
    with pytest.raises(Conflict):
        await world.patch("n")
    with pytest.raises(NotFound):
        await world.model()


async def test_what_it_deleted_is_gone_at_once(world: World) -> None:
    await world.store.create(service())
    await world.store.delete(PDService, "chat", namespace="default")
    assert (await world.store.list(PDService, namespace="default")).items == ()


async def test_another_one_under_the_name_is_not_deleted_and_known_then(world: World) -> None:
    former = await world.store.create(service())
    await world.behind.delete(PDService, "chat", namespace="default")
    await world.behind.create(service(model="theirs"))
    with pytest.raises(Conflict):
        await world.store.delete(PDService, "chat", namespace="default", uid=former.metadata.uid)
    assert await world.model() == "theirs"


async def test_what_was_deleted_meanwhile_is_gone_then(world: World) -> None:
    made = await world.store.create(service())
    await world.behind.delete(PDService, "chat", namespace="default")
    with pytest.raises(NotFound):
        await world.store.delete(PDService, "chat", namespace="default", uid=made.metadata.uid)
    with pytest.raises(NotFound):
        await world.model()


async def test_who_does_not_lead_writes_nothing(world: World) -> None:
    await world.store.create(service())
    world.leads = False
    for write in (
        world.store.create(service()),
        world.patch("n"),
        world.store.patch_status(PDService, "chat", {"flips": 1}, namespace="default"),
        world.store.delete(PDService, "chat", namespace="default"),
    ):
        with pytest.raises(NotLeading):
            await write
    assert (await world.behind.get(PDService, "chat", namespace="default")).spec.model == "m"
