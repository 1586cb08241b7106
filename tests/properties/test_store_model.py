"""The memory store against a dictionary: after any sequence of writes, both have the same content.

The dictionary has no versions, events or field managers. Further checks cover these: versions only grow, a
watch replayed from the start ends in the listed state, and the generation changes with the spec.
"""

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api import ObjectMeta, PDService, PDServiceSpec, PDServiceStatus
from fulcrum_core.errors import AlreadyExists, Conflict, NotFound
from fulcrum_core.ports import EventType
from tests.clocks import ManualClock

T = TypeVar("T")

NAMESPACE = "default"

names = st.sampled_from(["a", "b", "c"])
numbers = st.integers(1, 3)


def run_without_waiting(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a call of the memory store waited")


class StoreAgainstDictionary(RuleBasedStateMachine):
    """Random writes; `model` maps a name to (instances, flips)."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(ManualClock(), history=10_000)
        self.model: dict[str, tuple[int, int]] = {}
        self.versions: dict[str, str] = {}
        self.last_version = 0

    def read(self, name: str) -> PDService:
        return run_without_waiting(self.store.get(PDService, name, namespace=NAMESPACE))

    @rule(name=names, instances=numbers)
    def create(self, name: str, instances: int) -> None:
        spec = PDServiceSpec(model="m", instances=instances)
        desired = PDService(metadata=ObjectMeta(name=name), spec=spec, status=PDServiceStatus(flips=9))
        try:
            run_without_waiting(self.store.create(desired))
        except AlreadyExists:
            assert name in self.model
        else:
            assert name not in self.model
            self.model[name] = (instances, 0)

    @rule(name=names, instances=numbers)
    def patch(self, name: str, instances: int) -> None:
        patch = {"spec": {"instances": instances}, "status": {"flips": 9}}
        try:
            run_without_waiting(self.store.patch(PDService, name, patch, namespace=NAMESPACE))
        except NotFound:
            assert name not in self.model
        else:
            self.model[name] = (instances, self.model[name][1])

    @rule(name=names, flips=numbers)
    def patch_status(self, name: str, flips: int) -> None:
        try:
            run_without_waiting(
                self.store.patch_status(PDService, name, {"flips": flips}, namespace=NAMESPACE)
            )
        except NotFound:
            assert name not in self.model
        else:
            self.model[name] = (self.model[name][0], flips)

    @rule(name=names)
    def remember_a_version(self, name: str) -> None:
        if name in self.model:
            self.versions[name] = self.read(name).metadata.resource_version

    @precondition(lambda self: self.versions)
    @rule(data=st.data(), instances=numbers)
    def patch_with_a_remembered_version(self, data: st.DataObject, instances: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.versions)))
        version, patch = self.versions.pop(name), {"spec": {"instances": instances}}
        current = self.read(name).metadata.resource_version if name in self.model else None
        try:
            run_without_waiting(
                self.store.patch(PDService, name, patch, namespace=NAMESPACE, resource_version=version)
            )
        except Conflict:
            assert current != version
        except NotFound:
            assert current is None
        else:
            assert current == version
            self.model[name] = (instances, self.model[name][1])

    @rule(name=names, instances=numbers, manager=st.sampled_from(["first", "second"]))
    def apply(self, name: str, instances: int, manager: str) -> None:
        spec = PDServiceSpec(model="m", instances=instances)
        desired = PDService(metadata=ObjectMeta(name=name), spec=spec)
        try:
            run_without_waiting(self.store.apply(desired, manager=manager))
        except Conflict:
            assert self.model[name][0] != instances
        else:
            self.model[name] = (instances, self.model.get(name, (0, 0))[1])

    @rule(name=names)
    def delete(self, name: str) -> None:
        try:
            run_without_waiting(self.store.delete(PDService, name, namespace=NAMESPACE))
        except NotFound:
            assert name not in self.model
        else:
            del self.model[name]

    @invariant()
    def store_and_dictionary_are_equal(self) -> None:
        items = run_without_waiting(self.store.list(PDService, namespace=NAMESPACE)).items
        stored = {obj.metadata.name: (obj.spec.instances, obj.status.flips) for obj in items}
        assert stored == self.model
        assert [obj.metadata.name for obj in items] == sorted(self.model)

    @invariant()
    def versions_only_grow(self) -> None:
        version = int(run_without_waiting(self.store.list(PDService, namespace=NAMESPACE)).resource_version)
        assert version >= self.last_version
        self.last_version = version

    def teardown(self) -> None:
        """A watch from the beginning ends in the listed state, and each generation follows its spec."""
        listing = run_without_waiting(self.store.list(PDService, namespace=NAMESPACE))
        events = self.store.watch(PDService, namespace=NAMESPACE, since="0")
        replayed: dict[str, PDService] = {}
        for version in range(1, int(listing.resource_version) + 1):
            event = run_without_waiting(anext(events))
            assert event.object is not None
            assert event.resource_version == event.object.metadata.resource_version == str(version)
            name, before = event.object.metadata.name, replayed.pop(event.object.metadata.name, None)
            assert (event.type is EventType.ADDED) == (before is None)
            if before is not None:
                changed = before.spec != event.object.spec
                assert event.object.metadata.generation == before.metadata.generation + changed
            if event.type is not EventType.DELETED:
                replayed[name] = event.object
        assert tuple(replayed[name] for name in sorted(replayed)) == listing.items


TestStoreAgainstDictionary = StoreAgainstDictionary.TestCase
TestStoreAgainstDictionary.settings = settings(max_examples=60, stateful_step_count=30)
