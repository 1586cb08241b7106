"""The operator follows cordons and taints of nodes, also after it was refused for a while."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from fulcrum_cluster.objects import NODE, ObjectKind
from fulcrum_core.errors import Forbidden
from fulcrum_core.ports import EventType, NodeDeparture
from fulcrum_operator.controller.departing_nodes import DepartingNodes, find_departure
from tests.clocks import ManualClock

NOW_S = 1_800_000_000.0


def node(name: str, *taints: str, cordoned: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": {**spec, **({"unschedulable": True} if cordoned else {})},
    }


@pytest.mark.parametrize(
    ("given", "cause", "certain"),
    [
        pytest.param(node("n"), None, False, id="an ordinary node"),
        pytest.param(node("n", "nvidia.com/gpu"), None, False, id="a taint of the hardware"),
        pytest.param(node("n", cordoned=True), "cordoned", False, id="a cordon"),
        pytest.param(
            node("n", "node.kubernetes.io/unschedulable", cordoned=True),
            "cordoned",
            False,
            id="with its taint",
        ),
        pytest.param(node("n", "karpenter.sh/disrupted"), "karpenter.sh/disrupted", True, id="Karpenter 1"),
        pytest.param(node("n", "karpenter.sh/disruption"), "karpenter.sh/disruption", True, id="Karpenter 0"),
        pytest.param(
            node("n", "ToBeDeletedByClusterAutoscaler"),
            "ToBeDeletedByClusterAutoscaler",
            True,
            id="cluster-autoscaler",
        ),
        pytest.param(node("n", "DeletionCandidateOfClusterAutoscaler"), None, False, id="only a candidate"),
        pytest.param(
            node("n", "aws-node-termination-handler/spot-itn", cordoned=True),
            "aws-node-termination-handler/spot-itn",
            True,
            id="a spot instance that ends, cordoned too",
        ),
        pytest.param(
            node("n", "cloud.google.com/impending-node-termination"),
            "cloud.google.com/impending-node-termination",
            True,
            id="GKE",
        ),
    ],
)
def test_a_departure_is_known_by_cordon_and_taints(given: Any, cause: str | None, certain: bool) -> None:
    expected = None if cause is None else NodeDeparture(cause, NOW_S, certain)
    assert find_departure(given, now_s=NOW_S) == expected


class FakeNodes:
    """An API server with these nodes, or one that refuses to list or to watch them."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.events: list[tuple[EventType, Any]] = []
        self.refuses: set[str] = set()

    async def list(
        self, kind: ObjectKind, *, namespace: str, keep: Callable[[Any], Any]
    ) -> tuple[list[Any], str]:
        assert (kind, namespace) == (NODE, "")
        if "list" in self.refuses:
            raise Forbidden("cannot list nodes")
        return [keep(each) for each in self.nodes], "1"

    async def watch(
        self, kind: ObjectKind, *, namespace: str, since: str
    ) -> AsyncGenerator[tuple[EventType, Any], None]:
        assert (kind, namespace, since) == (NODE, "", "1")
        if "watch" in self.refuses:
            raise Forbidden("cannot watch nodes")
        for event in self.events:
            yield event


class Followed:
    """Departing nodes, followed until the watch ends or a wait begins; and the number of reported changes."""

    def __init__(self) -> None:
        self.api, self.changes, self.waits = FakeNodes(), 0, list[float]()
        self.clock = ManualClock(NOW_S)
        self.nodes = DepartingNodes(
            self.api,  # type: ignore[arg-type]  # it only lists and watches
            self.clock,
            self._count,
            sleep=self._wait,
        )

    def _count(self) -> None:
        self.changes += 1

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if seconds < 5:
            raise asyncio.CancelledError

    async def follow(self) -> tuple[dict[str, str], int]:
        with pytest.raises(asyncio.CancelledError):
            await self.nodes.run()
        self.nodes._since = None
        return {name: found.cause for name, found in self.nodes.departures.items()}, self.changes

    @property
    def reasons(self) -> list[str]:
        return [cause.reason for cause in self.nodes.causes()]


@pytest.fixture
def followed() -> Followed:
    """No node departs yet."""
    return Followed()


async def test_each_departure_is_reported_once(followed: Followed) -> None:
    followed.api.nodes = [node("n1"), node("n2")]
    assert await followed.follow() == ({}, 0)
    followed.api.nodes = [node("n1", cordoned=True), node("n2")]
    assert await followed.follow() == ({"n1": "cordoned"}, 1)
    assert await followed.follow() == ({"n1": "cordoned"}, 1)
    followed.api.events = [(EventType.MODIFIED, node("n2", "karpenter.sh/disrupted"))]
    assert await followed.follow() == ({"n1": "cordoned", "n2": "karpenter.sh/disrupted"}, 2)
    followed.api.nodes, followed.api.events = [], []
    assert await followed.follow() == ({}, 3)


async def test_a_watched_departure_ends_with_the_cordon_or_the_node(followed: Followed) -> None:
    followed.api.nodes = [node("n1", cordoned=True), node("n2", cordoned=True)]
    followed.api.events = [(EventType.MODIFIED, node("n1")), (EventType.DELETED, node("n2", cordoned=True))]
    assert await followed.follow() == ({}, 3)


async def test_a_departure_keeps_its_time(followed: Followed) -> None:
    followed.api.nodes = [node("n1", cordoned=True)]
    await followed.follow()
    followed.clock.at_s += 60
    await followed.follow()
    assert followed.nodes.departures == {"n1": NodeDeparture("cordoned", NOW_S, is_certain=False)}


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_refusal_is_reported_when_repeated_and_ends_when_allowed_again(
    followed: Followed, verb: str
) -> None:
    followed.api.nodes = [node("n1", cordoned=True)]
    followed.api.refuses = {verb}
    seen = []
    for _ in range(2):
        await followed.follow()
        seen.append((followed.nodes.allowed, followed.reasons))
    followed.api.refuses = set()
    await followed.follow()
    assert (*seen, (followed.nodes.allowed, followed.reasons), set(followed.nodes.departures)) == (
        (False, []),
        (False, ["NodesForbidden"]),
        (True, []),
        {"n1"},
    )
    assert [wait_s for wait_s in followed.waits if wait_s >= 5] == [10.0, 60.0]


async def test_no_departure_is_known_while_nodes_may_be_listed_but_not_watched(followed: Followed) -> None:
    followed.api.nodes = [node("n1", cordoned=True)]
    followed.api.refuses = {"watch"}
    seen = []
    followed.nodes._on_change = lambda: seen.append(set(followed.nodes.departures))
    for _ in range(4):
        await followed.follow()
    assert seen == [{"n1"}, set(), set()], "only the first list is believed, and each refusal reported once"
