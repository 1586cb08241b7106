"""The live page's buttons change the load and single instances, and say why they cannot."""

from typing import Any

import pytest

from fulcrum_cli.play.page_controls import PageControls
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api import PDAssignment, PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Role
from tests.clocks import ManualClock
from tests.objects import create_service_of_three, make_object


class FakeSession:
    """Notes what was asked of it."""

    def __init__(self) -> None:
        self.started = True
        self.load_name = "moving"
        self.too_slow = False
        self.killed: list[str] = []

    def change_load(self, shape: str) -> None:
        self.load_name = shape

    def kill(self, instance: str) -> None:
        if instance == "chat-9":
            raise KeyError(instance)
        self.killed.append(instance)


@pytest.fixture
async def controls() -> tuple[PageControls, FakeSession, MemoryStore]:
    session, store = FakeSession(), MemoryStore(ManualClock(0.0))
    await create_service_of_three(store)
    service = make_object(PDService, "chat", {"model": "m", "instances": 3})
    return PageControls(session, store, service), session, store


async def test_the_load_and_an_engine_are_changed(
    controls: tuple[PageControls, FakeSession, MemoryStore],
) -> None:
    page, session, _ = controls
    answers = [
        await page.run_action({"action": "load", "load": "bursty"}),
        await page.run_action({"action": "kill", "instance": "chat-1"}),
    ]
    assert answers == ["load changed to bursty", "chat-1 killed"]
    assert (page.read_state()["load"], session.killed) == ("bursty", ["chat-1"])


async def test_a_flip_and_a_drain_are_written_to_the_assignment(
    controls: tuple[PageControls, FakeSession, MemoryStore],
) -> None:
    page, _, store = controls
    flip = {"action": "flip", "instance": "chat-1", "to": "Prefill"}
    assert [await page.run_action(flip), await page.run_action(flip)] == [
        "chat-1 → Prefill", "chat-1 already has the role Prefill",
    ]  # fmt: skip
    assert await page.run_action({"action": "drain", "instance": "chat-0"}) == "chat-0 gets no new requests"
    roles = (await store.get(PDAssignment, "chat", namespace="default")).spec.roles
    assert (roles["chat-1"].role, roles["chat-0"].cordoned) == (Role.PREFILL, True)
    undone = await page.run_action({"action": "undrain", "instance": "chat-0"})
    assert undone == "chat-0 gets new requests again"


@pytest.mark.parametrize(
    "action",
    [
        {}, {"action": "format"}, {"action": "load", "load": "none"}, {"action": "load", "load": "tiers"},
        {"action": "flip", "instance": "chat-1"},
        {"action": "kill", "instance": 7}, {"action": "kill", "instance": "chat-9"},
        {"action": "flip", "instance": "chat-1", "to": "Both"},
        {"action": "flip", "instance": "chat-7", "to": "Decode"},
        {"action": "flip", "instance": "chat-0", "to": "Decode"},
    ],
    ids=str,
)  # fmt: skip
async def test_unknown_and_forbidden_actions_are_refused(
    controls: tuple[PageControls, FakeSession, MemoryStore], action: dict[str, Any]
) -> None:
    page, session, _ = controls
    with pytest.raises(InvalidInput):
        await page.run_action(action)
    assert session.killed == []


async def test_a_machine_that_is_too_slow_is_said(
    controls: tuple[PageControls, FakeSession, MemoryStore],
) -> None:
    page, session, _ = controls
    session.too_slow = True
    assert page.read_state()["too_slow"]
