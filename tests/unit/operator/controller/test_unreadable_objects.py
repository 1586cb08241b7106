"""An unreadable object is reported once and is not treated as deleted."""

from collections.abc import Sequence
from typing import Any

from fulcrum_cluster.objects import Object, ObjectKind, kind_of_resource
from fulcrum_core.api import ObjectMeta, PDInstance, PDService, QoSTier, Resource
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.events import Event
from fulcrum_operator.controller.unreadable_objects import UnreadableObjects
from tests.clocks import ManualClock
from tests.unit.operator.builders import NOW_S

CHAT = ServiceKey("default", "chat")
BAD_SERVICE = "PDService chat cannot be read: spec.model (7) is not text"
BAD_INSTANCE = "PDInstance chat-0 cannot be read: spec.model (7) is not text"


class FakeCluster:
    def __init__(self) -> None:
        self.cache = ObjectCache(lambda _key: None)
        self.recorded: list[tuple[str, str, str]] = []
        self.degraded: list[str] = []
        """Messages that were written into the condition Degraded."""
        api: Any = self
        self.unreadable = UnreadableObjects(
            self.cache, self._record, api, ManualClock(NOW_S), is_leader=lambda: True
        )
        self._version = 0

    async def _record(self, about: ObjectMeta, events: Sequence[Event]) -> None:
        self.recorded += [(about.uid, event.reason, event.message) for event in events]

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Object:
        known = {"type": "Ready", "status": "True", "reason": "InstancesServing"}
        return {"metadata": {"name": name, "namespace": namespace}, "status": {"conditions": [known]}}

    async def patch(
        self, _kind: ObjectKind, _name: str, patch: Object, *, namespace: str, subresource: str
    ) -> Object:
        assert (namespace, subresource) == ("default", "status")
        ready, degraded = patch["status"]["conditions"]
        assert (ready["type"], degraded["type"], degraded["status"]) == ("Ready", "Degraded", "True")
        self.degraded.append(degraded["message"])
        return patch

    def put(self, kind: type[Resource], name: str, **spec: Any) -> None:
        self._version += 1
        meta = {
            "name": name,
            "namespace": "default",
            "uid": f"u-{name}",
            "resourceVersion": str(self._version),
            "labels": {"fulcrum.dev/service": "chat"},
        }
        self.cache.put_object(
            kind_of_resource(kind), {"metadata": meta, "kind": kind.kind_name(), "spec": spec}
        )


async def test_an_unreadable_service_blocks_reconcile_and_is_reported_once() -> None:
    cluster = FakeCluster()
    cluster.put(PDService, "chat", model=7)
    assert [await cluster.unreadable.blocks_reconcile(CHAT) for _ in range(2)] == [True, True]
    assert cluster.recorded == [("u-chat", "ObjectUnreadable", BAD_SERVICE)]
    assert cluster.degraded == [f"{BAD_SERVICE}; the service is not changed until this is repaired"]
    cluster.put(PDService, "chat", model="m")
    assert not await cluster.unreadable.blocks_reconcile(CHAT)


async def test_a_service_that_was_readable_once_is_still_reconciled() -> None:
    cluster = FakeCluster()
    cluster.put(PDService, "chat", model="m")
    cluster.put(PDService, "chat", model=7)
    assert not await cluster.unreadable.blocks_reconcile(CHAT)
    assert cluster.recorded == [("u-chat", "ObjectUnreadable", BAD_SERVICE)]


async def test_an_unreadable_instance_blocks_only_its_own_service() -> None:
    """Without the instance, the plan would stop its engine and create another instance of this name."""
    cluster = FakeCluster()
    cluster.put(PDService, "chat", model="m")
    cluster.put(PDService, "other", model="m")
    cluster.put(PDInstance, "chat-0", model=7)
    assert await cluster.unreadable.blocks_reconcile(CHAT)
    assert not await cluster.unreadable.blocks_reconcile(ServiceKey("default", "other"))
    assert cluster.recorded == [("u-chat", "ObjectUnreadable", BAD_INSTANCE)]


async def test_an_object_that_becomes_unreadable_again_is_reported_again() -> None:
    cluster = FakeCluster()
    cluster.put(PDService, "chat", model="m")
    for _ in range(2):
        cluster.put(QoSTier, "gold", priority="high")
        assert not await cluster.unreadable.blocks_reconcile(CHAT)
        cluster.put(QoSTier, "gold", priority=1)
        assert not await cluster.unreadable.blocks_reconcile(CHAT)
    assert [reason for _, reason, _ in cluster.recorded] == ["ObjectUnreadable"] * 2
