"""Refused children are tried again with growing delays; what of a child depends on other objects.

Level 3 tests the rest.
"""

from typing import Any

import pytest

from fulcrum_cluster.objects import (
    DEPLOYMENT,
    SERVICE,
    SERVICE_ACCOUNT,
    Object,
    ObjectKind,
    kind_of_body,
)
from fulcrum_core.errors import AlreadyExists, Conflict, Forbidden, NotFound
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.children import Children
from fulcrum_operator.controller.field_ownership import FIELD_MANAGER
from tests.clocks import ManualClock
from tests.unit.operator.builders import NOW_S, SETTINGS, service


class QuotaOnServices:
    """An API server whose quota allows no Service, with another text for each try; it counts the tries."""

    def __init__(self) -> None:
        self.tries = 0

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Object:
        raise NotFound(f"{namespace}/{name}")

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        del namespace
        if kind == SERVICE:
            self.tries += 1
            raise Forbidden(f"exceeded quota: services (request {self.tries})")
        return {**body, "metadata": {"resourceVersion": "1", **body["metadata"]}}


async def test_a_refused_child_is_tried_again_with_a_growing_delay() -> None:
    clock, objects = ManualClock(NOW_S), QuotaOnServices()
    api: Any = objects
    children = Children(api, ObjectCache(lambda _key: None), SETTINGS, clock, is_leader=lambda: True)
    delays_s = []
    for tries in range(1, 5):
        problems = await children.sync(service(), min_available=1)
        delay_s = problems.retry_after_s or 0.0
        clock.at_s += delay_s - 0.1
        early = await children.sync(service(), min_available=1)
        assert objects.tries == tries
        assert early.retry_after_s == pytest.approx(0.1)
        clock.at_s += 0.2
        delays_s.append(delay_s)
    assert delays_s == [0.5, 1.0, 2.0, 4.0]


async def test_a_refused_child_is_tried_again_at_once_when_its_manifest_changes() -> None:
    clock, objects = ManualClock(NOW_S), QuotaOnServices()
    api: Any = objects
    children = Children(api, ObjectCache(lambda _key: None), SETTINGS, clock, is_leader=lambda: True)
    await children.sync(service(), min_available=1)
    renamed = service().replace(metadata=service().metadata.model_copy(update={"uid": "u-another"}))
    await children.sync(renamed, min_available=1)
    assert objects.tries == 2


class OrphanOfTerminatingService:
    """An API server with an orphaned ServiceAccount; the watches have not reported yet that its PDService
    is being deleted. Counts writes."""

    def __init__(self) -> None:
        self.writes = 0

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        if kind.kind != "PDService":
            raise NotFound(f"{namespace}/{name}")
        meta = service().metadata
        return {"metadata": {"name": name, "uid": meta.uid, "deletionTimestamp": "2026-01-01T00:00:00Z"}}

    async def create(self, _kind: ObjectKind, _body: Object, *, namespace: str) -> Object:
        del namespace
        self.writes += 1
        raise AlreadyExists("ServiceAccount")

    apply = create


async def test_an_orphan_is_not_adopted_for_a_service_that_is_being_deleted() -> None:
    objects, cache = OrphanOfTerminatingService(), ObjectCache(lambda _key: None)
    api: Any = objects
    labels = {"fulcrum.dev/service": "chat", "app.kubernetes.io/managed-by": "fulcrum-operator"}
    meta = {"namespace": "default", "name": "chat-engine", "labels": labels, "resourceVersion": "1"}
    cache.put_object(SERVICE_ACCOUNT, {"metadata": meta})
    children = Children(api, cache, SETTINGS, ManualClock(NOW_S), is_leader=lambda: True)
    with pytest.raises(Conflict):
        await children.sync(service(), min_available=1)
    assert objects.writes == 0


class Objects:
    """An API server that stores objects and counts versions."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Object] = {}
        self.version = 0

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        del namespace
        if (kind.kind, name) not in self.stored:
            raise NotFound(name)
        return self.stored[kind.kind, name]

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        self.version += 1
        meta = {**body["metadata"], "namespace": namespace, "uid": f"u-{self.version}"}
        body = {**body, "metadata": {**meta, "resourceVersion": str(self.version)}}
        self.stored[kind.kind, meta["name"]] = body
        return body

    async def delete(self, kind: ObjectKind, name: str, *, namespace: str, uid: str) -> None:
        del namespace
        assert self.stored.pop((kind.kind, name))["metadata"]["uid"] == uid


async def test_the_endpoint_slice_is_replaced_when_the_family_of_the_service_changes() -> None:
    objects, cache = Objects(), ObjectCache(lambda _key: None)
    api: Any = objects
    children = Children(api, cache, SETTINGS, ManualClock(NOW_S), is_leader=lambda: True)
    await children.sync(service(), min_available=1)
    before = objects.stored["EndpointSlice", "chat-router"]["addressType"]
    made = objects.stored["Service", "chat"]
    newer = {**made["metadata"], "resourceVersion": "100"}
    cache.put_object(SERVICE, {**made, "metadata": newer, "spec": {**made["spec"], "ipFamilies": ["IPv6"]}})
    objects.version = 100
    await children.sync(service(), min_available=1)
    assert (before, objects.stored["EndpointSlice", "chat-router"]["addressType"]) == ("IPv4", "IPv6")


class EditedWhileCreated:
    """An API server where somebody scales the Deployment right after its creation."""

    def __init__(self) -> None:
        self.deployment: Object = {}
        self.applied: list[str] = []

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        if kind != DEPLOYMENT or not self.deployment:
            raise NotFound(f"{namespace}/{name}")
        return self.deployment

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        del namespace
        created = self._store(body, "1", set(body.get("spec", ())))
        if kind == DEPLOYMENT:
            self.deployment = self._store(body, "2", set(body["spec"]) - {"replicas"})
        return created

    async def patch(
        self, kind: ObjectKind, name: str, patch: Object, *, namespace: str, resource_version: str
    ) -> Object:
        if kind != DEPLOYMENT:
            raise NotFound(f"{namespace}/{name}")
        if resource_version != self.deployment["metadata"]["resourceVersion"]:
            raise Conflict("it was edited")
        meta = {**self.deployment["metadata"], **patch["metadata"], "resourceVersion": "3"}
        self.deployment = {**self.deployment, "metadata": meta}
        return self.deployment

    async def apply(self, body: Object, *, manager: str, force: bool) -> Object:
        assert (manager, force) == (FIELD_MANAGER, True)
        self.applied.append(f"{body['kind']} {body['metadata']['name']}")
        return self._store(body, "4", set(body["spec"]))

    @staticmethod
    def _store(body: Object, version: str, owned: set[str]) -> Object:
        fields: Object = {f"f:{key}": {} for key in body}
        fields["f:spec"] = {f"f:{key}": {} for key in owned}
        entry = {"manager": FIELD_MANAGER, "operation": "Update", "fieldsV1": fields}
        kind = kind_of_body(body)
        entries = {"managedFields": [entry]} if kind == DEPLOYMENT else {}
        meta = {"resourceVersion": version, "uid": f"u-{body['metadata']['name']}", **entries}
        return {**body, "metadata": {**body["metadata"], **meta}}


async def test_an_edit_between_creation_and_taking_over_the_fields_is_reverted() -> None:
    objects = EditedWhileCreated()
    api: Any = objects
    children = Children(
        api, ObjectCache(lambda _key: None), SETTINGS, ManualClock(NOW_S), is_leader=lambda: True
    )
    for _ in range(3):
        await children.sync(service(), min_available=1)
    assert objects.applied == ["Deployment chat-router"]
