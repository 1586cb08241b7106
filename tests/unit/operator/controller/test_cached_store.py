"""The cached store reads its own writes at once and refreshes the cache after a refused write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api import PDService, Resource
from fulcrum_core.errors import Conflict, NamespaceNotFound, NotFound
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import CachedStore, NotLeader
from tests.unit.operator.builders import service


@dataclass
class StoreUnderTest:
    is_leader: bool = True
    backend: MemoryStore = field(default_factory=lambda: MemoryStore(SystemClock()))
    cache: ObjectCache = field(default_factory=lambda: ObjectCache(lambda _key: None))

    def __post_init__(self) -> None:
        self.store = CachedStore(self.backend, self.cache, lambda: self.is_leader)

    async def model(self) -> str:
        return (await self.store.get(PDService, "chat", namespace="default")).spec.model

    async def patch(self, model: str, version: str | None = None) -> PDService:
        patch = {"spec": {"model": model}}
        return await self.store.patch(PDService, "chat", patch, namespace="default", resource_version=version)


R = TypeVar("R", bound=Resource)


class StoreWithoutStatus(MemoryStore):
    """A store whose kinds have no status, as a kind of older CRDs."""

    async def patch_status(self, kind: type[R], name: str, patch: Mapping[str, Any], **_: Any) -> R:
        del patch
        raise NotFound(f"{kind.plural} {name}")


class StoreWithoutNamespace(MemoryStore):
    """A store with an object whose namespace is gone, which an API server can leave behind."""

    async def patch_status(self, kind: type[R], name: str, patch: Mapping[str, Any], **_: Any) -> R:
        del kind, name, patch
        raise NamespaceNotFound('namespaces "default" not found')


class StoreThatCreatesAgain(MemoryStore):
    """A store in which the object is deleted before its status arrives, and created again after that.

    `seen` gets the new object before the status is refused, as a watch may be faster than a response.
    """

    seen: Callable[[PDService], None] = staticmethod(lambda _new: None)

    async def patch_status(
        self, kind: type[R], name: str, patch: Mapping[str, Any], *, namespace: str, **_: Any
    ) -> R:
        del patch
        await self.delete(kind, name, namespace=namespace)
        self.seen(await self.create(service()))
        raise NotFound(f"{kind.plural} {name}")


@pytest.fixture
def under_test() -> StoreUnderTest:
    return StoreUnderTest()


async def test_its_own_writes_are_read_back_at_once(under_test: StoreUnderTest) -> None:
    await under_test.store.create(service())
    await under_test.patch("n")
    assert await under_test.model() == "n"


async def test_foreign_writes_are_read_only_from_the_cache(under_test: StoreUnderTest) -> None:
    await under_test.backend.create(service())
    with pytest.raises(NotFound):
        await under_test.model()


async def test_a_conflict_refreshes_the_cached_object(under_test: StoreUnderTest) -> None:
    created = await under_test.store.create(service())
    await under_test.backend.patch(PDService, "chat", {"spec": {"model": "theirs"}}, namespace="default")
    with pytest.raises(Conflict):
        await under_test.patch("ours", created.metadata.resource_version)
    assert await under_test.model() == "theirs"


async def test_creating_an_existing_object_is_a_conflict_and_caches_it(under_test: StoreUnderTest) -> None:
    await under_test.backend.create(service())
    with pytest.raises(Conflict):
        await under_test.store.create(service())
    assert await under_test.model() == "m"


async def test_patching_a_deleted_object_is_a_conflict_and_drops_it(under_test: StoreUnderTest) -> None:
    await under_test.store.create(service())
    await under_test.backend.delete(PDService, "chat", namespace="default")
    with pytest.raises(Conflict):
        await under_test.patch("n")
    with pytest.raises(NotFound):
        await under_test.model()


async def test_its_own_deletions_take_effect_at_once(under_test: StoreUnderTest) -> None:
    await under_test.store.create(service())
    await under_test.store.delete(PDService, "chat", namespace="default")
    assert (await under_test.store.list(PDService, namespace="default")).items == ()


async def test_a_recreated_object_is_not_deleted_by_its_predecessors_uid(under_test: StoreUnderTest) -> None:
    former = await under_test.store.create(service())
    await under_test.backend.delete(PDService, "chat", namespace="default")
    await under_test.backend.create(service(model="theirs"))
    with pytest.raises(Conflict):
        await under_test.store.delete(PDService, "chat", namespace="default", uid=former.metadata.uid)
    assert await under_test.model() == "theirs"


async def test_deleting_a_deleted_object_drops_it_from_the_cache(under_test: StoreUnderTest) -> None:
    created = await under_test.store.create(service())
    await under_test.backend.delete(PDService, "chat", namespace="default")
    with pytest.raises(NotFound):
        await under_test.store.delete(PDService, "chat", namespace="default", uid=created.metadata.uid)
    with pytest.raises(NotFound):
        await under_test.model()


async def test_a_standby_writes_nothing(under_test: StoreUnderTest) -> None:
    await under_test.store.create(service())
    under_test.is_leader = False
    for write in (
        under_test.store.create(service()),
        under_test.patch("n"),
        under_test.store.patch_status(PDService, "chat", {"flips": 1}, namespace="default"),
        under_test.store.delete(PDService, "chat", namespace="default"),
    ):
        with pytest.raises(NotLeader):
            await write
    assert (await under_test.backend.get(PDService, "chat", namespace="default")).spec.model == "m"


async def test_the_status_of_a_kind_without_status_is_left_out_and_named() -> None:
    older: Any = object()
    cache = ObjectCache(lambda _key: None)
    store = CachedStore(StoreWithoutStatus(SystemClock()), cache, lambda: True, objects=older)
    created = await store.create(service())
    written = await store.patch_status(PDService, "chat", {"flips": 1}, namespace="default")
    named = [cause.message.partition(" lack ")[2] for cause in store.missing_fields.causes()]
    assert (written, named) == (created, ["pdservices status; apply the operator's CRDs"])


@pytest.mark.parametrize("watch_is_faster", [False, True])
@pytest.mark.parametrize(
    ("backend", "error"),
    [(StoreWithoutNamespace, NamespaceNotFound), (StoreThatCreatesAgain, Conflict)],
)
async def test_a_status_refused_for_one_object_does_not_say_that_the_kind_has_none(
    backend: type[MemoryStore], error: type[Exception], *, watch_is_faster: bool
) -> None:
    """Else no service of the cluster would get its status."""
    objects: Any = object()
    cache = ObjectCache(lambda _key: None)
    stored = backend(SystemClock())
    if watch_is_faster and isinstance(stored, StoreThatCreatesAgain):
        stored.seen = cache.put_resource
    store = CachedStore(stored, cache, lambda: True, objects=objects)
    await store.create(service())
    with pytest.raises(error):
        await store.patch_status(PDService, "chat", {"flips": 1}, namespace="default")
    assert store.missing_fields.causes() == ()
