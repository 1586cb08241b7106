"""What the operator last heard of: the newest stays, the dead stay dead, who is concerned is woken."""

from typing import Any

import pytest

from fulcrum_cluster.objects import POD, ObjectKind, kind_of_resource
from fulcrum_core.api import PDAssignment, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.reconcile import ServiceKey

SERVICE, INSTANCE = kind_of_resource(PDService), kind_of_resource(PDInstance)
CHAT = ServiceKey("default", "chat")


class Heard:
    """A cache, and whom it woke."""

    def __init__(self) -> None:
        self.woken: list[ServiceKey] = []
        self.cache = Cache(self.woken.append)

    def service(self, version: int, model: str = "m", name: str = "chat", namespace: str = "default") -> None:
        meta = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
        self.cache.take(SERVICE, {"metadata": meta, "kind": "PDService", "spec": {"model": model}})

    def model(self) -> str | None:
        found = self.cache.resource(PDService, "default", "chat")
        return found.spec.model if found else None


@pytest.fixture
def heard() -> Heard:
    return Heard()


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


def test_of_two_states_the_newer_one_stays(heard: Heard) -> None:
    heard.service(10, "new")
    heard.service(9, "old")
    assert (heard.model(), heard.woken) == ("new", [CHAT])


def test_versions_are_compared_as_numbers(heard: Heard) -> None:
    heard.service(9, "old")
    heard.service(10, "new")
    assert heard.model() == "new"


def test_the_echo_of_what_is_known_wakes_nobody(heard: Heard) -> None:
    heard.service(10)
    heard.woken.clear()
    heard.service(10)
    assert heard.woken == []


def test_a_late_event_does_not_bring_back_what_was_deleted(heard: Heard) -> None:
    heard.service(10)
    heard.cache.drop(SERVICE, "default", "chat", version="12")
    heard.service(11)
    assert (heard.model(), heard.woken) == (None, [CHAT, CHAT])


def test_what_is_made_again_under_its_old_name_is_there(heard: Heard) -> None:
    heard.service(10, "first")
    heard.cache.drop(SERVICE, "default", "chat", version="12")
    heard.service(13, "second")
    assert heard.model() == "second"


def test_a_deletion_that_comes_late_does_not_end_its_successor(heard: Heard) -> None:
    heard.service(13, "second")
    heard.cache.drop(SERVICE, "default", "chat", version="12")
    assert heard.model() == "second"


def test_a_list_takes_away_what_it_lacks_but_nothing_newer(heard: Heard) -> None:
    heard.service(10, name="gone")
    heard.service(30, name="born-since")
    heard.service(10, name="elsewhere", namespace="other")
    listed = {"metadata": {"name": "chat", "namespace": "default", "resourceVersion": "11"}}
    heard.cache.relisted(SERVICE, "default", [{**listed, "kind": "PDService", "spec": {"model": "m"}}], "20")
    assert heard.cache.services() == (
        ServiceKey("default", "born-since"),
        CHAT,
        ServiceKey("other", "elsewhere"),
    )


def test_pods_are_kept_as_far_as_they_are_read(heard: Heard) -> None:
    heard.cache.take(POD, pod("chat-0", 5, fulcrum_dev="x"))
    kept = heard.cache.object(POD, "default", "chat-0")
    assert kept is not None
    assert (sorted(kept), kept["spec"], "managedFields" in kept["metadata"]) == (
        ["metadata", "spec", "status"],
        {"nodeName": "n1"},
        False,
    )


def of(kind: type[Resource], name: str, spec: dict[str, Any]) -> tuple[ObjectKind, dict[str, Any]]:
    meta = {"name": name, "namespace": "default", "resourceVersion": "7"}
    return kind_of_resource(kind), {"metadata": meta, "kind": kind.kind_name(), "spec": spec}


MADE = {"service": "chat", "model": "m", "engine": {}}
WAKES = [
    of(PDPool, "chat-flex", {**MADE, "role": "Flexible", "replicas": 1, "instances": {"min": 1}}),
    of(PDInstance, "chat-0", {**MADE, "pool": "chat-flex"}),
    of(PDAssignment, "chat", {"service": "chat", "roles": {}, "floors": {"prefill": 1, "decode": 1}}),
    of(QoSTier, "gold", {}),
    (
        POD,
        pod("chat-0", 7)
        | {"metadata": pod("chat-0", 7)["metadata"] | {"labels": {"fulcrum.dev/service": "chat"}}},
    ),
]


@pytest.mark.parametrize(("kind", "body"), WAKES, ids=[kind.kind for kind, _ in WAKES])
def test_a_change_wakes_the_service_that_it_concerns(
    heard: Heard, kind: ObjectKind, body: dict[str, Any]
) -> None:
    heard.service(1)
    heard.woken.clear()
    heard.cache.take(kind, body)
    assert heard.woken == [CHAT]


def test_what_a_newer_writer_wrote_stays_as_it_was_last_read(heard: Heard) -> None:
    heard.service(10, "read")
    meta = {"name": "chat", "namespace": "default", "resourceVersion": "11"}
    heard.cache.take(SERVICE, {"metadata": meta, "kind": "PDService", "spec": {"model": 7}})
    assert heard.model() == "read"


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


def words(heard: Heard) -> list[str]:
    return [each.words for each in heard.cache.unreadable(CHAT)]


def test_what_cannot_be_read_is_known_by_name_and_field_and_wakes_its_service_once(heard: Heard) -> None:
    heard.cache.take(*unreadable(11))
    heard.cache.take(*unreadable(12))
    assert words(heard) == ["PDService chat cannot be read: spec.model: Input should be a valid string"]
    assert (heard.woken, heard.cache.services(), heard.model()) == ([CHAT], (CHAT,), None)


def test_what_can_be_read_again_or_is_gone_is_not_held_against_anybody(heard: Heard) -> None:
    heard.cache.take(*unreadable(11))
    heard.service(12)
    assert (words(heard), heard.model()) == ([], "m")
    heard.cache.take(*unreadable(13, PDInstance, "chat-0"))
    heard.cache.drop(INSTANCE, "default", "chat-0", version="14")
    heard.cache.take(*unreadable(13, PDInstance, "chat-0"))
    assert words(heard) == []
    heard.cache.take(*unreadable(15, PDInstance, "chat-0"))
    assert len(words(heard)) == 1
    heard.cache.relisted(INSTANCE, "", [], "16")
    assert (words(heard), heard.woken[-1]) == ([], CHAT)


def test_a_state_that_is_older_than_what_was_read_is_no_trouble(heard: Heard) -> None:
    heard.service(12)
    heard.cache.take(*unreadable(11))
    assert words(heard) == []


def test_a_tier_that_cannot_be_read_is_told_to_every_service_of_its_namespace(heard: Heard) -> None:
    heard.service(1)
    heard.service(1, name="other")
    heard.woken.clear()
    kind, body = unreadable(7, QoSTier, "gold")
    heard.cache.take(kind, {**body, "spec": {"priority": "high"}})
    assert (len(words(heard)), heard.woken) == (1, [CHAT, ServiceKey("default", "other")])
