"""A cluster may run several autoscalers: the CLI fetches decisions of the one that manages the service."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from fulcrum_cli.target.autoscaler import AutoscalerUnavailable, fetch_cluster_decisions
from fulcrum_cluster.objects import ObjectApi
from fulcrum_core.errors import Forbidden, StoreUnavailable

DECISIONS = [{"action": "hold"}]
UNAVAILABLE = StoreUnavailable("no endpoints available")


class FakeCluster:
    """A cluster with one autoscaler in each namespace of `responses`.

    Each autoscaler responds with the value for its namespace; an exception is raised.
    """

    def __init__(self, responses: Mapping[str, object], *, may_list_all: bool = True) -> None:
        self._responses, self._may_list_all = responses, may_list_all

    async def list(
        self, _kind: object, *, namespace: str, labels: str
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        assert "component=autoscaler" in labels
        if not namespace and not self._may_list_all:
            raise Forbidden("you may not list services")
        found = [
            {"metadata": {"namespace": each, "name": "f-autoscaler"}, "spec": {"ports": [{"name": "http"}]}}
            for each in self._responses
            if namespace in ("", each)
        ]
        return found, "1"

    async def get_raw(self, path: str) -> object:
        assert path.endswith("/services/f-autoscaler:http/proxy/decisions?namespace=n&service=chat&limit=5")
        response = self._responses[path.split("/")[4]]
        if isinstance(response, Exception):
            raise response
        return response


async def fetch(cluster: FakeCluster) -> Sequence[dict[str, Any]]:
    return await fetch_cluster_decisions(cast(ObjectApi, cluster), "chat", namespace="n", limit=5)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        pytest.param(
            FakeCluster({"a": [], "fulcrum": DECISIONS}), DECISIONS, id="the autoscaler that has decisions"
        ),
        pytest.param(
            FakeCluster({"a": [{"action": "flip"}], "n": DECISIONS}),
            DECISIONS,
            id="the autoscaler of the same namespace first",
        ),
        pytest.param(
            FakeCluster({"a": UNAVAILABLE, "b": DECISIONS}),
            DECISIONS,
            id="another autoscaler does not respond",
        ),
        pytest.param(
            FakeCluster({"n": DECISIONS}, may_list_all=False),
            DECISIONS,
            id="no permission to list other namespaces",
        ),
        pytest.param(FakeCluster({"a": [], "n": []}), [], id="no decision yet"),
    ],
)
async def test_decisions_come_from_the_autoscaler_that_manages_the_service(
    cluster: FakeCluster, expected: list[dict[str, Any]]
) -> None:
    assert list(await fetch(cluster)) == expected


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        pytest.param(FakeCluster({}), "no Service with the labels", id="no autoscaler"),
        pytest.param(
            FakeCluster({"a": [], "n": UNAVAILABLE}),
            "does not respond through",
            id="the autoscaler that does not respond may manage the service",
        ),
        pytest.param(FakeCluster({"n": {}}), "does not respond with a list", id="the response is not a list"),
    ],
)
async def test_an_unavailable_autoscaler_is_reported(cluster: FakeCluster, message: str) -> None:
    with pytest.raises(AutoscalerUnavailable, match=message):
        await fetch(cluster)
