"""What cannot be read is told once, and is not taken for gone."""

from collections.abc import Sequence
from typing import Any

from fulcrum_cluster.objects import kind_of_resource
from fulcrum_core.api import ObjectMeta, PDInstance, PDService, QoSTier, Resource
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.events import Event
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_operator.controller.unreadable_objects import Unread

CHAT = ServiceKey("default", "chat")
BAD_SERVICE = "PDService chat cannot be read: spec.model: Input should be a valid string"
BAD_INSTANCE = "PDInstance chat-0 cannot be read: spec.model: Input should be a valid string"


class World:
    def __init__(self) -> None:
        self.cache = Cache(lambda _key: None)
        self.told: list[tuple[str, str, str]] = []
        self.unread = Unread(self.cache, self._tell)
        self._version = 0

    async def _tell(self, about: ObjectMeta, events: Sequence[Event]) -> None:
        self.told += [(about.uid, event.reason, event.message) for event in events]

    def put(self, kind: type[Resource], name: str, **spec: Any) -> None:
        self._version += 1
        meta = {
            "name": name,
            "namespace": "default",
            "uid": f"u-{name}",
            "resourceVersion": str(self._version),
            "labels": {"fulcrum.dev/service": "chat"},
        }
        self.cache.take(kind_of_resource(kind), {"metadata": meta, "kind": kind.kind_name(), "spec": spec})


async def test_a_service_that_was_never_read_is_hidden_and_an_event_at_it_says_why() -> None:
    world = World()
    world.put(PDService, "chat", model=7)
    assert [await world.unread.hides(CHAT) for _ in range(2)] == [True, True]
    assert world.told == [("u-chat", "ObjectUnreadable", BAD_SERVICE)]
    world.put(PDService, "chat", model="m")
    assert not await world.unread.hides(CHAT)


async def test_a_service_that_was_read_once_goes_on_as_it_was() -> None:
    world = World()
    world.put(PDService, "chat", model="m")
    world.put(PDService, "chat", model=7)
    assert not await world.unread.hides(CHAT)
    assert world.told == [("u-chat", "ObjectUnreadable", BAD_SERVICE)]


async def test_an_instance_that_was_never_read_hides_its_service_alone() -> None:
    """Without it the plan would end its engine, and make another instance under its name."""
    world = World()
    world.put(PDService, "chat", model="m")
    world.put(PDService, "other", model="m")
    world.put(PDInstance, "chat-0", model=7)
    assert await world.unread.hides(CHAT)
    assert not await world.unread.hides(ServiceKey("default", "other"))
    assert world.told == [("u-chat", "ObjectUnreadable", BAD_INSTANCE)]


async def test_what_is_seen_again_and_then_hidden_again_is_told_again() -> None:
    world = World()
    world.put(PDService, "chat", model="m")
    for _ in range(2):
        world.put(QoSTier, "gold", priority="high")
        assert not await world.unread.hides(CHAT)
        world.put(QoSTier, "gold", priority=1)
        assert not await world.unread.hides(CHAT)
    assert [reason for _, reason, _ in world.told] == ["ObjectUnreadable"] * 2
