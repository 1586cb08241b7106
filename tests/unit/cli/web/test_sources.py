"""In a cluster the page reads the active router pod through the API server, and finds a new one by itself."""

from typing import Any

import pytest

from fulcrum_cli.web.sources import ClusterRouter
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.errors import StoreUnavailable

PATH = "/api/v1/namespaces/ml/pods/{}:9094/proxy/metrics"


class FakeRouterPods:
    """An API server with router pods: the text of the metrics of each."""

    def __init__(self, **pods: str) -> None:
        self.pods = {PATH.format(name): text for name, text in pods.items()}
        self.selectors: list[tuple[str, str]] = []

    async def list(self, _kind: Any, *, namespace: str, labels: str = "") -> tuple[list[Any], str]:
        self.selectors.append((namespace, labels))
        names = [path.split("/")[6].split(":")[0] for path in self.pods]
        return [{"metadata": {"name": name}} for name in names], "1"

    async def get_raw(self, path: str) -> str:
        if path not in self.pods:
            raise StoreUnavailable("no such pod")
        return self.pods[path]


def make_router(objects: Any) -> ClusterRouter:
    return ClusterRouter(objects, "chat", namespace="ml")


async def test_the_active_router_is_found_and_remembered() -> None:
    objects = FakeRouterPods(a="fulcrum_router_active 0.0\n", b="fulcrum_router_active 1.0\n")
    router = make_router(objects)
    assert [await router.read_metrics() for _ in range(3)] == ["fulcrum_router_active 1.0\n"] * 3
    assert objects.selectors == [("ml", "app.kubernetes.io/name=fulcrum-router,fulcrum.dev/router=chat")]


async def test_after_a_failover_the_new_router_is_found() -> None:
    objects = FakeRouterPods(a="fulcrum_router_active 1.0\n")
    router = make_router(objects)
    await router.read_metrics()
    objects.pods = {PATH.format("b"): "fulcrum_router_active 1.0\nfulcrum_router_waiting_requests 2.0\n"}
    with pytest.raises(RouterUnavailable, match="no such pod"):
        await router.read_metrics()
    assert "waiting_requests" in await router.read_metrics()


async def test_without_an_active_router_there_is_nothing_to_read() -> None:
    with pytest.raises(RouterUnavailable, match="no router is active"):
        await make_router(FakeRouterPods(a="fulcrum_router_active 0.0\n")).read_metrics()
