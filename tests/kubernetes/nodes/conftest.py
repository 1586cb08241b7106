"""Level 4: the product installed on three nodes, one service on it, and a steady load on that service.

All scenarios share cluster and service: to start them anew for each would take longer than the scenarios.
A scenario leaves the service as it found it: whole, with the spec and the image it was installed with.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.clusters import fresh_namespace
from tests.kubernetes.nodes.installation import Helm, values
from tests.kubernetes.nodes.load import Load, loaded
from tests.kubernetes.nodes.service import MANIFEST, Service
from tools.kubernetes.cluster import Cluster

# Scenarios that take parts of the cluster away come after those that need all of it, and deletion is the end.
ORDER = (
    "test_machine",
    "test_install",
    "test_flips",
    "test_rollout",
    "test_scale",
    "test_real_engines",
    "test_kills",
    "test_api_server",
    "test_nodes",
    "test_deletion",
    "test_one_namespace",
    "test_rights",  # by then the log tells of all
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scenarios run in the order of `ORDER`; the rest stays where it is."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    places = {name: place for place, name in enumerate(ORDER)}
    ordered = iter(sorted(ours, key=lambda item: places.get(item.path.stem, -1)))
    items[:] = [next(ordered) if item.path.parent == here else item for item in items]


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace on the three nodes, deleted after the test."""
    with fresh_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Helm:
    """Helm on the three nodes."""
    return Helm(cluster)


@pytest.fixture
def service(cluster: Cluster, helm: Helm) -> Service:
    """The manifest applied where the chart is installed: `chat` with four simulated engines, whole."""
    chat = Service(cluster, "default", "chat")
    if not chat.exists():
        helm.install(values())
        cluster.kubectl("apply", "-f", "-", stdin=MANIFEST)
    chat.reset()  # what a scenario before this one left when it failed
    chat.wait_whole(timeout_s=150)
    return chat


@pytest.fixture
def load(cluster: Cluster, service: Service, seed: int) -> Iterator[Load]:
    """A steady load on the service through its address, from node n1."""
    with loaded(cluster, service, seed, node="n1") as running:
        yield running
