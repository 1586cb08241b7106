"""The store's contract (`integration/cluster/test_store_contract.py`), run on a real API server."""

import asyncio
import json
import random
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fulcrum_cluster.client import ClusterClient, RestStore, open_cluster, resolve_client_config
from fulcrum_cluster.objects import CRD, NAMESPACE, kind_of_resource
from fulcrum_cluster.transport import HttpClient
from fulcrum_core.api import QoSTier
from fulcrum_core.errors import Gone, NotFound, StoreUnavailable
from fulcrum_core.ports import Store
from tests.integration.cluster.test_store_contract import (  # noqa: F401 - collected here again
    TestApplying,
    TestCreating,
    TestDeleting,
    TestPatching,
    TestReading,
    TestStatus,
    TestValidation,
    TestWatching,
)
from tests.waiting import wait_until
from tools.kubernetes.cluster import Cluster as RealCluster
from tools.kubernetes.waiting import wait_for

DEADLINE_S = 60.0

TIERS = "/apis/fulcrum.dev/v1alpha1/namespaces/default/qostiers"


class ShortWatches(random.Random):
    """Watches end after 4 s, and a bookmark comes 2 s before: else the first one takes a minute."""

    def randint(self, a: int, b: int) -> int:  # noqa: ARG002
        return 4


@pytest.fixture(scope="session", autouse=True)
def collecting(control_plane: RealCluster) -> None:
    """The garbage collector knows our kinds: it looks for new ones every half a minute."""
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": str(uuid.uuid4())}
    metadata = {"name": f"orphan-{secrets.token_hex(4)}", "ownerReferences": [owner]}
    body = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "QoSTier", "metadata": metadata}
    control_plane.request("POST", TIERS, json.dumps(body).encode())
    path = f"{TIERS}/{metadata['name']}"
    wait_for(lambda: control_plane.get(path)[0] == 404, "the garbage collector", timeout_s=DEADLINE_S)


@pytest.fixture
def address(control_plane: RealCluster) -> str:
    return f"kubeconfig:{control_plane.kubeconfig}"


@pytest.fixture
async def cluster(address: str) -> AsyncIterator[ClusterClient]:
    async with open_cluster(address) as found:
        yield found


@pytest.fixture
async def store(address: str) -> AsyncIterator[Store]:
    http = HttpClient(resolve_client_config(address), idle_timeout_s=30.0, program="conformance")
    async with RestStore(http, rng=ShortWatches()) as client:
        yield client


@pytest.fixture
async def namespace(cluster: ClusterClient) -> AsyncIterator[str]:
    """Name of a new namespace; a second one named `<name>-other` exists as well."""
    name = f"conformance-{secrets.token_hex(4)}"
    for each in (name, f"{name}-other"):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}}
        await cluster.objects.create(NAMESPACE, body, namespace="")
    yield name
    for each in (name, f"{name}-other"):
        await cluster.objects.delete(NAMESPACE, each, namespace="")


@pytest.fixture
def forget_history(cluster: ClusterClient) -> Callable[[], Awaitable[None]]:
    """A change of the CRD makes the API server forget: it builds the kind's watch cache anew from a list."""

    async def forget() -> None:
        kind = kind_of_resource(QoSTier)
        _, before = await cluster.objects.list(kind, namespace="")
        name = f"{QoSTier.plural}.fulcrum.dev"
        categories = ["fulcrum", f"forget-{secrets.token_hex(4)}"]
        await cluster.objects.patch(CRD, name, {"spec": {"names": {"categories": categories}}}, namespace="")
        await wait_until(
            lambda: _gone(cluster, before),
            "the old version to be gone",
            timeout_s=DEADLINE_S,
            interval_s=0.05,
        )

    return forget


async def _gone(cluster: ClusterClient, since: str) -> bool:
    watch = cluster.objects.watch(kind_of_resource(QoSTier), namespace="", since=since)
    try:
        async with asyncio.timeout(0.2):
            await anext(watch)
    except Gone:
        return True
    except (TimeoutError, NotFound, StoreUnavailable):
        pass
    finally:
        await watch.aclose()
    return False
