"""The operator lists cordoned nodes, and does without where it may not."""

from typing import Any

import pytest

from fulcrum_cluster.objects import NODE, ObjectKind
from fulcrum_core.errors import Forbidden, StoreUnavailable
from fulcrum_operator.controller.cordoned_nodes import CordonedNodes


class FakeNodes:
    """An API server with these cordoned nodes, or one that refuses."""

    def __init__(self) -> None:
        self.cordoned: tuple[str, ...] = ()
        self.refusal: Exception | None = None

    async def list(self, kind: ObjectKind, *, namespace: str, fields: str) -> tuple[list[Any], str]:
        assert (kind, namespace, fields) == (NODE, "", "spec.unschedulable=true")
        if self.refusal is not None:
            raise self.refusal
        return [{"metadata": {"name": name}} for name in self.cordoned], "1"


class Watched:
    """Cordoned nodes and the number of reported changes."""

    def __init__(self) -> None:
        self.api, self.changes = FakeNodes(), 0
        self.nodes = CordonedNodes(self.api, self._count)  # type: ignore[arg-type]  # it only lists

    def _count(self) -> None:
        self.changes += 1

    async def refresh(self, *cordoned: str) -> tuple[set[str], int]:
        self.api.cordoned = cordoned
        await self.nodes.refresh()
        return set(self.nodes.names), self.changes


@pytest.fixture
def watched() -> Watched:
    """No node is cordoned yet."""
    return Watched()


async def test_each_cordon_and_uncordon_is_reported_once(watched: Watched) -> None:
    assert await watched.refresh() == (set(), 0)
    assert await watched.refresh("n1") == ({"n1"}, 1)
    assert await watched.refresh("n1") == ({"n1"}, 1)
    assert await watched.refresh("n1", "n2") == ({"n1", "n2"}, 2)
    assert await watched.refresh() == (set(), 3)


async def test_while_the_api_server_is_away_the_cordons_stay(watched: Watched) -> None:
    await watched.refresh("n1")
    watched.api.refusal = StoreUnavailable("no route")
    assert await watched.refresh() == ({"n1"}, 1)
    assert watched.nodes.allowed


async def test_an_operator_that_may_not_list_nodes_stops_asking(watched: Watched) -> None:
    watched.api.refusal = Forbidden("nodes is forbidden")
    await watched.nodes.run()
    assert (watched.nodes.allowed, watched.nodes.names) == (False, frozenset())
