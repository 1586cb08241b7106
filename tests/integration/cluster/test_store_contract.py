"""The contract of `fulcrum_core.ports.Store`, tested on each adapter that `conftest.py` provides."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

import pytest

from fulcrum_core.api import (
    Bounds,
    Floors,
    ObjectMeta,
    OwnerReference,
    PDAssignment,
    PDAssignmentSpec,
    PDService,
    PDServiceSpec,
    PDServiceStatus,
    PoolSpec,
    QoSTier,
    QoSTierSpec,
    Resource,
    ServiceSloSpec,
    SloSpec,
)
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.errors import AlreadyExists, Conflict, Gone, InvalidInput, NotFound
from fulcrum_core.ports import EventType, Store, WatchEvent
from tests.waiting import wait_until

R = TypeVar("R", bound=Resource)

DEADLINE_S = 10.0


def service(namespace: str, name: str = "chat", **spec: Any) -> PDService:
    return PDService(
        metadata=ObjectMeta(name=name, namespace=namespace), spec=PDServiceSpec(model="m", **spec)
    )


def tier(namespace: str, name: str = "gold", *owners: Resource, **spec: Any) -> QoSTier:
    references = tuple(owner.owner_reference() for owner in owners)
    references = references[:1] + tuple(
        owner.model_copy(update={"controller": False}) for owner in references[1:]
    )
    metadata = ObjectMeta(name=name, namespace=namespace, owner_references=references)
    return QoSTier(metadata=metadata, spec=QoSTierSpec(**spec))


async def events(store: Store, kind: type[R], namespace: str, since: str, count: int) -> list[WatchEvent[R]]:
    """Return the next `count` events, without bookmarks."""
    seen: list[WatchEvent[R]] = []
    stream = cast(AsyncGenerator[WatchEvent[R], None], store.watch(kind, namespace=namespace, since=since))
    async with asyncio.timeout(DEADLINE_S), aclosing(stream) as stream_events:
        async for event in stream_events:
            if event.type is not EventType.BOOKMARK:
                seen.append(event)
            if len(seen) == count:
                break
    return seen


async def next_event(store: Store, kind: type[R], namespace: str, since: str) -> WatchEvent[R]:
    """Return the next event, which may be a bookmark; a watch that the server ends is begun again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stream = store.watch(kind, namespace=namespace, since=since)
            async with aclosing(cast(AsyncGenerator[WatchEvent[R], None], stream)) as stream_events:
                async for event in stream_events:
                    return event


async def names(store: Store, kind: type[Resource], namespace: str) -> list[str]:
    return [obj.metadata.name for obj in (await store.list(kind, namespace=namespace)).items]


async def version(store: Store, namespace: str) -> str:
    return (await store.list(QoSTier, namespace=namespace)).resource_version


class TestReading:
    async def test_get_returns_the_created_object(self, store: Store, namespace: str) -> None:
        created = await store.create(service(namespace, instances=3))
        assert await store.get(PDService, "chat", namespace=namespace) == created

    async def test_get_of_an_absent_object_raises_not_found(self, store: Store, namespace: str) -> None:
        with pytest.raises(NotFound, match="chat"):
            await store.get(PDService, "chat", namespace=namespace)

    async def test_list_is_ordered_by_name(self, store: Store, namespace: str) -> None:
        for name in ("b", "c", "a"):
            await store.create(tier(namespace, name))
        assert await names(store, QoSTier, namespace) == ["a", "b", "c"]

    async def test_list_returns_one_namespace_only(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace))
        assert await names(store, QoSTier, f"{namespace}-other") == []

    async def test_list_returns_one_kind_only(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace, "chat"))
        assert await names(store, PDService, namespace) == []


class TestCreating:
    async def test_create_sets_uid_version_and_generation_1(self, store: Store, namespace: str) -> None:
        metadata = (await store.create(service(namespace))).metadata
        assert metadata.uid
        assert metadata.resource_version
        assert (metadata.generation, metadata.creation_timestamp is not None) == (1, True)

    async def test_create_refuses_an_existing_name(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace))
        with pytest.raises(AlreadyExists, match="gold"):
            await store.create(tier(namespace))

    async def test_recreated_object_has_another_uid(self, store: Store, namespace: str) -> None:
        first = await store.create(tier(namespace))
        await store.delete(QoSTier, "gold", namespace=namespace)
        second = await store.create(tier(namespace))
        assert first.metadata.uid != second.metadata.uid

    async def test_create_drops_the_status(self, store: Store, namespace: str) -> None:
        given = service(namespace).replace(status=PDServiceStatus(flips=7))
        assert (await store.create(given)).status == PDServiceStatus()

    async def test_create_refuses_a_resource_version(self, store: Store, namespace: str) -> None:
        created = await store.create(tier(namespace))
        with pytest.raises(InvalidInput):
            await store.create(created)

    async def test_create_fills_in_defaults(self, store: Store, namespace: str) -> None:
        created = await store.create(service(namespace))
        assert created.spec == parse_as(PDService, {**service(namespace).dump()}).spec
        assert created.spec.slo == ServiceSloSpec(ttft=1.0, tpot=0.05)


class TestPatching:
    async def test_patch_merges_and_increases_version_and_generation(
        self, store: Store, namespace: str
    ) -> None:
        before = await store.create(tier(namespace, priority=1))
        after = await store.patch(QoSTier, "gold", {"spec": {"slo": {"ttft": "2s"}}}, namespace=namespace)
        assert after.spec == QoSTierSpec(priority=1, slo=SloSpec(ttft=2.0))
        assert after.metadata.generation == 2
        assert after.metadata.resource_version != before.metadata.resource_version

    async def test_null_in_a_patch_removes_the_field(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace, priority=5, slo=SloSpec()))
        patch = {"spec": {"priority": None, "slo": None}}
        after = await store.patch(QoSTier, "gold", patch, namespace=namespace)
        assert after.spec == QoSTierSpec()

    async def test_patch_replaces_a_whole_list(self, store: Store, namespace: str) -> None:
        await store.create(service(namespace, qos_tiers=("a", "b")))
        after = await store.patch(PDService, "chat", {"spec": {"qosTiers": ["c"]}}, namespace=namespace)
        assert after.spec.qos_tiers == ("c",)

    async def test_patch_with_the_current_version_is_accepted(self, store: Store, namespace: str) -> None:
        current = (await store.create(tier(namespace))).metadata.resource_version
        after = await store.patch(
            QoSTier, "gold", {"spec": {"priority": 1}}, namespace=namespace, resource_version=current
        )
        assert after.spec.priority == 1

    async def test_only_one_of_several_writers_with_the_same_version_succeeds(
        self, store: Store, namespace: str
    ) -> None:
        current = (await store.create(tier(namespace))).metadata.resource_version

        async def write(priority: int) -> object:
            patch = {"spec": {"priority": priority}}
            return await store.patch(QoSTier, "gold", patch, namespace=namespace, resource_version=current)

        results = await asyncio.gather(*(write(n) for n in range(1, 9)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Conflict"] * 7 + ["QoSTier"]

    async def test_patch_without_a_difference_keeps_the_version_and_sends_no_event(
        self, store: Store, namespace: str
    ) -> None:
        before = await store.create(tier(namespace, priority=1))
        since = await version(store, namespace)
        same = await store.patch(QoSTier, "gold", {"spec": {"priority": 1}}, namespace=namespace)
        seen = await store.patch(QoSTier, "gold", {"spec": {"priority": 2}}, namespace=namespace)
        assert same == before
        assert [e.object for e in await events(store, QoSTier, namespace, since, 1)] == [seen]

    async def test_label_changes_do_not_increase_the_generation(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace))
        after = await store.patch(QoSTier, "gold", {"metadata": {"labels": {"a": "b"}}}, namespace=namespace)
        assert (after.metadata.labels, after.metadata.generation) == ({"a": "b"}, 1)

    @pytest.mark.parametrize("key", ["name", "uid"])
    async def test_identity_cannot_be_patched(self, store: Store, namespace: str, key: str) -> None:
        before = await store.create(tier(namespace))
        with pytest.raises((InvalidInput, Conflict)):
            await store.patch(QoSTier, "gold", {"metadata": {key: "other"}}, namespace=namespace)
        assert await store.get(QoSTier, "gold", namespace=namespace) == before

    async def test_patch_of_an_absent_object_is_not_found(self, store: Store, namespace: str) -> None:
        with pytest.raises(NotFound):
            await store.patch(QoSTier, "gold", {"spec": {"priority": 1}}, namespace=namespace)

    async def test_patch_of_one_role_keeps_the_other_roles(self, store: Store, namespace: str) -> None:
        role = {"role": "Prefill", "since": "2026-01-01T00:00:00.000000Z", "by": "Operator"}
        raw = {"service": "chat", "roles": {"chat-0": role, "chat-1": role}, "floors": {"prefill": 1}}
        spec = PDAssignmentSpec.model_validate(raw)
        await store.create(PDAssignment(metadata=ObjectMeta(name="chat", namespace=namespace), spec=spec))
        patch = {"spec": {"roles": {"chat-1": {"role": "Decode", "by": "Autoscaler"}}}}
        after = await store.patch(PDAssignment, "chat", patch, namespace=namespace)
        flipped = {**role, "role": "Decode", "by": "Autoscaler"}
        expected = {**raw, "roles": {"chat-0": role, "chat-1": flipped}}
        assert after.spec == PDAssignmentSpec.model_validate(expected)
        assert after.spec.floors == Floors(prefill=1, decode=1)


class TestStatus:
    async def test_patch_does_not_change_status(self, store: Store, namespace: str) -> None:
        await store.create(service(namespace))
        before = await store.patch_status(PDService, "chat", {"flips": 3}, namespace=namespace)
        after = await store.patch(PDService, "chat", {"status": {"flips": 9}}, namespace=namespace)
        assert after == before

    async def test_status_patch_increases_only_the_version(self, store: Store, namespace: str) -> None:
        before = await store.create(service(namespace))
        after = await store.patch_status(PDService, "chat", {"flips": 3}, namespace=namespace)
        assert after.spec == before.spec
        assert after.status == PDServiceStatus(flips=3)
        assert after.metadata.generation == before.metadata.generation
        assert after.metadata.resource_version != before.metadata.resource_version

    async def test_patch_status_with_an_old_version_conflicts(self, store: Store, namespace: str) -> None:
        old = (await store.create(service(namespace))).metadata.resource_version
        await store.patch_status(PDService, "chat", {"flips": 3}, namespace=namespace, resource_version=old)
        with pytest.raises(Conflict):
            await store.patch_status(
                PDService, "chat", {"flips": 4}, namespace=namespace, resource_version=old
            )

    async def test_unknown_status_field_is_refused(self, store: Store, namespace: str) -> None:
        await store.create(service(namespace))
        with pytest.raises(InvalidInput, match=r"status\.flops"):
            await store.patch_status(PDService, "chat", {"flops": 3}, namespace=namespace)

    async def test_patch_status_of_a_kind_without_status_is_not_found(
        self, store: Store, namespace: str
    ) -> None:
        await store.create(tier(namespace))
        with pytest.raises(NotFound):
            await store.patch_status(QoSTier, "gold", {"x": 1}, namespace=namespace)


class TestValidation:
    @pytest.mark.parametrize(
        ("spec", "path"),
        [
            pytest.param({"nonsense": 1}, "spec.nonsense", id="an unknown field"),
            pytest.param({"slo": {"nonsense": 1}}, "spec.slo.nonsense", id="an unknown nested field"),
            pytest.param({"model": None}, "spec.model", id="a required field removed"),
            pytest.param({"instances": 0}, "spec.instances", id="a number below its minimum"),
            pytest.param({"slo": {"ttft": "0s"}}, "spec.slo.ttft", id="an objective of zero"),
            pytest.param({"slo": {"ttft": "soon"}}, "spec.slo.ttft", id="not a duration"),
            pytest.param({"autoscaling": {"mode": "Maybe"}}, "spec.autoscaling.mode", id="an unknown mode"),
        ],
    )
    async def test_invalid_patch_is_refused_with_the_path_and_changes_nothing(
        self, store: Store, namespace: str, spec: dict[str, Any], path: str
    ) -> None:
        before = await store.create(service(namespace))
        with pytest.raises(InvalidInput) as refused:
            await store.patch(PDService, "chat", {"spec": spec}, namespace=namespace)
        assert refused.value.path == path
        assert await store.get(PDService, "chat", namespace=namespace) == before

    async def test_immutable_field_cannot_be_changed(self, store: Store, namespace: str) -> None:
        spec = PDAssignmentSpec(service="chat")
        before = await store.create(
            PDAssignment(metadata=ObjectMeta(name="chat", namespace=namespace), spec=spec)
        )
        with pytest.raises(InvalidInput, match="cannot be changed") as refused:
            await store.patch(PDAssignment, "chat", {"spec": {"service": "other"}}, namespace=namespace)
        assert refused.value.path == "spec.service"
        assert await store.get(PDAssignment, "chat", namespace=namespace) == before

    async def test_rule_between_fields_is_enforced(self, store: Store, namespace: str) -> None:
        await store.create(service(namespace, instances=2))
        pools = [{"name": "a", "instances": {"min": 1}}]
        with pytest.raises(InvalidInput, match="both instances and pools"):
            await store.patch(PDService, "chat", {"spec": {"pools": pools}}, namespace=namespace)


class TestWatching:
    async def test_watch_delivers_changes_in_order_with_the_object_after_each(
        self, store: Store, namespace: str
    ) -> None:
        since = await version(store, namespace)
        created = await store.create(tier(namespace))
        patched = await store.patch(QoSTier, "gold", {"spec": {"priority": 1}}, namespace=namespace)
        await store.delete(QoSTier, "gold", namespace=namespace)
        seen = await events(store, QoSTier, namespace, since, 3)
        assert [event.type for event in seen] == [EventType.ADDED, EventType.MODIFIED, EventType.DELETED]
        assert [event.object for event in seen[:2]] == [created, patched]
        assert seen[2].object is not None
        assert seen[2].object.spec == patched.spec

    async def test_all_watches_see_all_writes_in_the_same_order(self, store: Store, namespace: str) -> None:
        since = await version(store, namespace)
        watches = [asyncio.ensure_future(events(store, QoSTier, namespace, since, 24)) for _ in range(3)]
        await asyncio.gather(*(store.create(tier(namespace, f"t-{n}")) for n in range(24)))
        first, *others = await asyncio.gather(*watches)
        assert others == [first, first]
        assert sorted(e.object.metadata.name for e in first if e.object) == sorted(
            f"t-{n}" for n in range(24)
        )

    async def test_watch_resumes_from_the_version_of_the_last_event(
        self, store: Store, namespace: str
    ) -> None:
        since = await version(store, namespace)
        for name in ("a", "b", "c", "d"):
            await store.create(tier(namespace, name))
        first = await events(store, QoSTier, namespace, since, 2)
        rest = await events(store, QoSTier, namespace, first[-1].resource_version, 2)
        assert [e.object.metadata.name for e in first + rest if e.object] == ["a", "b", "c", "d"]

    async def test_watch_from_a_list_version_misses_no_change(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace, "listed"))
        since = await version(store, namespace)
        later = await store.create(tier(namespace, "watched"))
        assert [e.object for e in await events(store, QoSTier, namespace, since, 1)] == [later]

    async def test_watch_sees_only_its_kind_and_namespace(self, store: Store, namespace: str) -> None:
        since = await version(store, namespace)
        await store.create(service(namespace))
        await store.create(tier(f"{namespace}-other"))
        mine = await store.create(tier(namespace))
        assert [e.object for e in await events(store, QoSTier, namespace, since, 1)] == [mine]

    async def test_empty_namespace_lists_and_watches_all_namespaces(
        self, store: Store, namespace: str
    ) -> None:
        both = {namespace, f"{namespace}-other"}
        since = (await store.list(QoSTier, namespace="")).resource_version
        for where in sorted(both):
            await store.create(tier(where))
        listed = {obj.metadata.namespace for obj in (await store.list(QoSTier, namespace="")).items}
        stream = cast(
            AsyncGenerator[WatchEvent[QoSTier], None], store.watch(QoSTier, namespace="", since=since)
        )
        watched: set[str] = set()
        async with asyncio.timeout(DEADLINE_S), aclosing(stream) as stream_events:
            while not both <= watched:
                event = await anext(stream_events)
                watched |= {event.object.metadata.namespace} if event.object else set()
        assert both <= listed

    async def test_watch_delivers_status_changes(self, store: Store, namespace: str) -> None:
        await store.create(service(namespace))
        since = (await store.list(PDService, namespace=namespace)).resource_version
        after = await store.patch_status(PDService, "chat", {"flips": 1}, namespace=namespace)
        assert [e.object for e in await events(store, PDService, namespace, since, 1)] == [after]

    async def test_watch_from_a_dropped_version_is_gone_and_a_new_list_can_be_watched(
        self, store: Store, namespace: str, forget_history: Callable[[], Awaitable[None]]
    ) -> None:
        since = await version(store, namespace)
        await store.create(tier(namespace, "a"))
        await forget_history()
        with pytest.raises(Gone):
            await events(store, QoSTier, namespace, since, 1)
        listing = await store.list(QoSTier, namespace=namespace)
        later = await store.create(tier(namespace, "b"))
        assert [obj.metadata.name for obj in listing.items] == ["a"]
        resumed = await events(store, QoSTier, namespace, listing.resource_version, 1)
        assert [e.object for e in resumed] == [later]

    async def test_bookmark_lets_an_idle_watch_resume(
        self, store: Store, namespace: str, forget_history: Callable[[], Awaitable[None]]
    ) -> None:
        await forget_history()
        event = await next_event(store, QoSTier, namespace, await version(store, namespace))
        later = await store.create(tier(namespace))
        assert (event.type, event.object) == (EventType.BOOKMARK, None)
        resumed = await events(store, QoSTier, namespace, event.resource_version, 1)
        assert [e.object for e in resumed] == [later]


class TestDeleting:
    async def test_deleted_object_is_not_listed(self, store: Store, namespace: str) -> None:
        await store.create(tier(namespace))
        await store.delete(QoSTier, "gold", namespace=namespace)
        assert await names(store, QoSTier, namespace) == []

    async def test_delete_of_an_absent_object_is_not_found(self, store: Store, namespace: str) -> None:
        with pytest.raises(NotFound):
            await store.delete(QoSTier, "gold", namespace=namespace)

    async def test_delete_with_the_uid_of_a_former_object_conflicts(
        self, store: Store, namespace: str
    ) -> None:
        former = await store.create(tier(namespace))
        await store.delete(QoSTier, "gold", namespace=namespace, uid=former.metadata.uid)
        await store.create(tier(namespace))
        with pytest.raises(Conflict):
            await store.delete(QoSTier, "gold", namespace=namespace, uid=former.metadata.uid)
        assert await names(store, QoSTier, namespace) == ["gold"]

    async def test_delete_also_deletes_owned_objects_recursively(self, store: Store, namespace: str) -> None:
        owner = await store.create(service(namespace))
        child = await store.create(tier(namespace, "child", owner))
        await store.create(tier(namespace, "grandchild", child))
        await store.create(tier(namespace, "stranger"))
        await store.delete(PDService, "chat", namespace=namespace)

        async def collected() -> bool:
            return await names(store, QoSTier, namespace) == ["stranger"]

        await wait_until(collected, "garbage collected", timeout_s=DEADLINE_S)

    async def test_object_with_a_remaining_owner_is_kept(self, store: Store, namespace: str) -> None:
        first = await store.create(service(namespace, "first"))
        second = await store.create(service(namespace, "second"))
        await store.create(tier(namespace, "shared", first, second.replace()))
        await store.create(tier(namespace, "alone", first))
        await store.delete(PDService, "first", namespace=namespace)

        async def collected() -> bool:
            return await names(store, QoSTier, namespace) == ["shared"]

        await wait_until(collected, "garbage collected", timeout_s=DEADLINE_S)

    async def test_owner_is_matched_by_uid_not_by_name(self, store: Store, namespace: str) -> None:
        await store.create(service(namespace))
        stale = OwnerReference(kind="PDService", name="chat", uid="00000000-0000-0000-0000-000000000000")
        metadata = ObjectMeta(name="orphan", namespace=namespace, owner_references=(stale,))
        await store.create(QoSTier(metadata=metadata))

        async def collected() -> bool:
            return await names(store, QoSTier, namespace) == []

        await wait_until(collected, "garbage collected", timeout_s=DEADLINE_S)


class TestApplying:
    async def test_first_apply_creates_the_object(self, store: Store, namespace: str) -> None:
        applied = await store.apply(tier(namespace, priority=3), manager="me")
        assert await store.get(QoSTier, "gold", namespace=namespace) == applied
        assert (applied.spec, applied.metadata.generation) == (QoSTierSpec(priority=3), 1)

    async def test_second_apply_of_the_same_manifest_changes_nothing(
        self, store: Store, namespace: str
    ) -> None:
        manifest = service(namespace, instances=3, slo=ServiceSloSpec(ttft=2.0))
        first = await store.apply(manifest, manager="me")
        assert await store.apply(manifest, manager="me") == first

    async def test_field_left_out_of_a_later_apply_is_removed(self, store: Store, namespace: str) -> None:
        await store.apply(service(namespace, instances=3, qos_tiers=("a",)), manager="me")
        after = await store.apply(service(namespace, instances=3), manager="me")
        assert after.spec == service(namespace, instances=3).spec

    async def test_field_set_by_a_patch_survives_an_apply(self, store: Store, namespace: str) -> None:
        await store.apply(service(namespace, instances=3), manager="me")
        await store.patch(PDService, "chat", {"spec": {"qosTiers": ["a"]}}, namespace=namespace)
        after = await store.apply(service(namespace, instances=4), manager="me")
        assert after.spec == service(namespace, instances=4, qos_tiers=("a",)).spec

    async def test_apply_of_a_field_that_another_manager_applied_conflicts(
        self, store: Store, namespace: str
    ) -> None:
        await store.apply(service(namespace, instances=3), manager="you")
        with pytest.raises(Conflict, match="you"):
            await store.apply(service(namespace, instances=4), manager="me")
        assert (await store.get(PDService, "chat", namespace=namespace)).spec.instances == 3

    async def test_apply_of_a_field_that_a_patch_changed_conflicts(
        self, store: Store, namespace: str
    ) -> None:
        await store.apply(service(namespace, instances=3), manager="me")
        await store.patch(PDService, "chat", {"spec": {"instances": 5}}, namespace=namespace)
        with pytest.raises(Conflict, match="instances"):
            await store.apply(service(namespace, instances=4), manager="me")

    async def test_field_applied_by_two_managers_stays_while_one_applies_it(
        self, store: Store, namespace: str
    ) -> None:
        await store.apply(service(namespace, instances=3), manager="you")
        await store.apply(service(namespace, instances=3), manager="me")
        after = await store.apply(service(namespace), manager="you")
        assert after.spec.instances == 3

    async def test_list_items_are_owned_by_their_key(self, store: Store, namespace: str) -> None:
        def pool(name: str, least: int) -> PoolSpec:
            return PoolSpec(name=name, instances=Bounds(min=least))

        await store.apply(service(namespace, pools=(pool("a", 1), pool("b", 1))), manager="me")
        await store.apply(service(namespace, pools=(pool("c", 1),)), manager="you")
        after = await store.apply(service(namespace, pools=(pool("b", 2),)), manager="me")
        assert after.spec.pools == service(namespace, pools=(pool("b", 2), pool("c", 1))).spec.pools

    async def test_apply_leaves_status_alone(self, store: Store, namespace: str) -> None:
        await store.apply(service(namespace), manager="me")
        before = await store.patch_status(PDService, "chat", {"flips": 3}, namespace=namespace)
        manifest = service(namespace).replace(status=PDServiceStatus(flips=9))
        assert await store.apply(manifest, manager="me") == before
