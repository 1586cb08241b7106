"""The object cache has the newest version of each object and notifies the services that a change affects."""

from typing import Any

import pytest

from fulcrum_cluster.objects import POD, ObjectKind, kind_of_resource
from fulcrum_core.api import PDAssignment, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey

SERVICE, INSTANCE = kind_of_resource(PDService), kind_of_resource(PDInstance)
CHAT = ServiceKey("default", "chat")


class RecordingCache:
    """A cache that records the notified services."""

    def __init__(self) -> None:
        self.notified: list[ServiceKey] = []
        self.cache = ObjectCache(self.notified.append)

    def service(self, version: int, model: str = "m", name: str = "chat", namespace: str = "default") -> None:
        meta = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
        self.cache.put_object(SERVICE, {"metadata": meta, "kind": "PDService", "spec": {"model": model}})

    def model(self) -> str | None:
        found = self.cache.get_resource(PDService, "default", "chat")
        return found.spec.model if found else None


@pytest.fixture
def recording() -> RecordingCache:
    return RecordingCache()


def pod(name: str, version: int, **labels: str) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": "default",
        "resourceVersion": str(version),
        "uid": "u",
        "labels": {key.replace("_", "/"): value for key, value in labels.items()},
        "managedFields": [{"manager": "kubelet"}],
    }
    return {"metadata": meta, "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": "Running"}}


def test_an_older_version_does_not_replace_a_newer_one(recording: RecordingCache) -> None:
    recording.service(10, "new")
    recording.service(9, "old")
    assert (recording.model(), recording.notified) == ("new", [CHAT])


def test_versions_are_compared_as_numbers(recording: RecordingCache) -> None:
    recording.service(9, "old")
    recording.service(10, "new")
    assert recording.model() == "new"


def test_a_known_version_notifies_nobody(recording: RecordingCache) -> None:
    recording.service(10)
    recording.notified.clear()
    recording.service(10)
    assert recording.notified == []


def test_a_late_event_does_not_restore_a_deleted_object(recording: RecordingCache) -> None:
    recording.service(10)
    recording.cache.remove(SERVICE, "default", "chat", version="12")
    recording.service(11)
    assert (recording.model(), recording.notified) == (None, [CHAT, CHAT])


def test_an_object_recreated_under_its_name_is_cached(recording: RecordingCache) -> None:
    recording.service(10, "first")
    recording.cache.remove(SERVICE, "default", "chat", version="12")
    recording.service(13, "second")
    assert recording.model() == "second"


def test_a_late_deletion_does_not_remove_the_recreated_object(recording: RecordingCache) -> None:
    recording.service(13, "second")
    recording.cache.remove(SERVICE, "default", "chat", version="12")
    assert recording.model() == "second"


def test_a_list_removes_missing_objects_unless_they_are_newer(recording: RecordingCache) -> None:
    recording.service(10, name="deleted")
    recording.service(30, name="created-later")
    recording.service(10, name="chat-2", namespace="other")
    listed = {"metadata": {"name": "chat", "namespace": "default", "resourceVersion": "11"}}
    recording.cache.replace_all(
        SERVICE, "default", [{**listed, "kind": "PDService", "spec": {"model": "m"}}], "20"
    )
    assert recording.cache.list_services() == (
        CHAT,
        ServiceKey("default", "created-later"),
        ServiceKey("other", "chat-2"),
    )


def test_only_the_fields_that_are_read_of_a_pod_are_cached(recording: RecordingCache) -> None:
    recording.cache.put_object(POD, pod("chat-0", 5, fulcrum_dev="x"))
    cached = recording.cache.get_object(POD, "default", "chat-0")
    assert cached is not None
    assert (sorted(cached), cached["spec"], "managedFields" in cached["metadata"]) == (
        ["metadata", "spec", "status"],
        {"nodeName": "n1"},
        False,
    )


def body_of(kind: type[Resource], name: str, spec: dict[str, Any]) -> tuple[ObjectKind, dict[str, Any]]:
    meta = {"name": name, "namespace": "default", "resourceVersion": "7"}
    return kind_of_resource(kind), {"metadata": meta, "kind": kind.kind_name(), "spec": spec}


SPEC = {"service": "chat", "model": "m", "engine": {}}
CHANGES = [
    body_of(PDPool, "chat-flex", {**SPEC, "role": "Flexible", "replicas": 1, "instances": {"min": 1}}),
    body_of(PDInstance, "chat-0", {**SPEC, "pool": "chat-flex"}),
    body_of(PDAssignment, "chat", {"service": "chat", "roles": {}, "floors": {"prefill": 1, "decode": 1}}),
    body_of(QoSTier, "gold", {}),
    (
        POD,
        pod("chat-0", 7)
        | {"metadata": pod("chat-0", 7)["metadata"] | {"labels": {"fulcrum.dev/service": "chat"}}},
    ),
]


@pytest.mark.parametrize(("kind", "body"), CHANGES, ids=[kind.kind for kind, _ in CHANGES])
def test_a_change_notifies_the_service_it_belongs_to(
    recording: RecordingCache, kind: ObjectKind, body: dict[str, Any]
) -> None:
    recording.service(1)
    recording.notified.clear()
    recording.cache.put_object(kind, body)
    assert recording.notified == [CHAT]


def test_an_unreadable_version_keeps_the_last_readable_one(recording: RecordingCache) -> None:
    recording.service(10, "readable")
    meta = {"name": "chat", "namespace": "default", "resourceVersion": "11"}
    recording.cache.put_object(SERVICE, {"metadata": meta, "kind": "PDService", "spec": {"model": 7}})
    assert recording.model() == "readable"


def unreadable(version: int, kind: type[Resource] = PDService, name: str = "chat") -> Any:
    labels = {"fulcrum.dev/service": "chat"}
    meta = {
        "name": name,
        "namespace": "default",
        "uid": "u",
        "resourceVersion": str(version),
        "labels": labels,
    }
    return kind_of_resource(kind), {"metadata": meta, "kind": kind.kind_name(), "spec": {"model": 7}}


def descriptions(recording: RecordingCache) -> list[str]:
    return [each.description for each in recording.cache.unreadable_objects(CHAT)]


def test_an_unreadable_object_is_described_by_name_and_field_and_notifies_once(
    recording: RecordingCache,
) -> None:
    recording.cache.put_object(*unreadable(11))
    recording.cache.put_object(*unreadable(12))
    assert descriptions(recording) == ["PDService chat cannot be read: spec.model (7) is not text"]
    assert (recording.notified, recording.cache.list_services(), recording.model()) == ([CHAT], (CHAT,), None)


def test_an_object_that_is_readable_again_or_deleted_is_no_longer_unreadable(
    recording: RecordingCache,
) -> None:
    recording.cache.put_object(*unreadable(11))
    recording.service(12)
    assert (descriptions(recording), recording.model()) == ([], "m")
    recording.cache.put_object(*unreadable(13, PDInstance, "chat-0"))
    recording.cache.remove(INSTANCE, "default", "chat-0", version="14")
    recording.cache.put_object(*unreadable(13, PDInstance, "chat-0"))
    assert descriptions(recording) == []
    recording.cache.put_object(*unreadable(15, PDInstance, "chat-0"))
    assert len(descriptions(recording)) == 1
    recording.cache.replace_all(INSTANCE, "", [], "16")
    assert (descriptions(recording), recording.notified[-1]) == ([], CHAT)


def test_an_unreadable_version_older_than_the_cached_one_is_ignored(recording: RecordingCache) -> None:
    recording.service(12)
    recording.cache.put_object(*unreadable(11))
    assert descriptions(recording) == []


def test_an_unreadable_tier_notifies_every_service_of_its_namespace(recording: RecordingCache) -> None:
    recording.service(1)
    recording.service(1, name="other")
    recording.notified.clear()
    kind, body = unreadable(7, QoSTier, "gold")
    recording.cache.put_object(kind, {**body, "spec": {"priority": "high"}})
    assert (len(descriptions(recording)), recording.notified) == (1, [CHAT, ServiceKey("default", "other")])
