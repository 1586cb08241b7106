"""Nodes are drained under the smallest service: two instances, each the last of its role, and one router."""

import time
from collections.abc import Iterator

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.components import list_component_pods
from tests.kubernetes.nodes.installation import Helm, build_values
from tests.kubernetes.nodes.load import run_load
from tests.kubernetes.nodes.service import INSTANCES, DeployedService
from tools.kubernetes.cluster import Cluster

NODES = frozenset({"n1", "n2", "n3"})
DRAIN_MAX_S = 120.0
_DRAIN_OPTIONS = ("--delete-emptydir-data", "--ignore-daemonsets", "--force", "--timeout=150s")


@pytest.fixture(scope="module")
def smallest_service(cluster: Cluster, chat: DeployedService, helm: Helm) -> Iterator[DeployedService]:
    """The service with two instances and one router."""
    chat.restore_spec()
    image = list_component_pods(cluster, "operator")[0].image
    helm.upgrade(build_values(image, router={"replicas": 1}))
    chat.patch("pdservices", {"spec": {"instances": 2}})
    _wait_for_pair(chat)
    yield chat
    chat.patch("pdservices", {"spec": {"instances": INSTANCES}})
    helm.upgrade(build_values(image))
    chat.wait_until_ready(timeout_s=120)


def _wait_for_pair(service: DeployedService) -> None:
    service.wait_until_ready(2, routers=1, timeout_s=120)


@pytest.mark.timeout(900)
def test_each_node_in_turn_is_drained_under_two_instances_and_one_router(
    cluster: Cluster, smallest_service: DeployedService, record_measurement: RecordMeasurement, seed: int
) -> None:
    results = []
    for victim in sorted(NODES):
        client = min(NODES - {victim})
        with (
            run_load(cluster, smallest_service, seed, node=client, report=record_measurement) as load,
            load.window(f"kubectl drain {victim}, two instances", timeout_s=120) as window,
        ):
            began_s = time.monotonic()
            cluster.kubectl("drain", victim, *_DRAIN_OPTIONS)
            results.append((victim, time.monotonic() - began_s <= DRAIN_MAX_S))
            record_measurement(f"drain of {victim} ended after {time.monotonic() - began_s:.1f} s")
            cluster.kubectl("uncordon", victim)
            _wait_for_pair(smallest_service)
        assert window.all_succeeded(), str(window)
    assert results == [(victim, True) for victim in sorted(NODES)]


@pytest.fixture
def cordoned_nodes(cluster: Cluster, smallest_service: DeployedService) -> Iterator[None]:
    """All nodes are cordoned, so that no replacement can start."""
    _wait_for_pair(smallest_service)
    cluster.kubectl("cordon", *sorted(NODES))
    yield
    cluster.kubectl("uncordon", *sorted(NODES))
    _wait_for_pair(smallest_service)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cordoned_nodes")
def test_a_drain_ends_on_a_cluster_without_room(
    cluster: Cluster, smallest_service: DeployedService, record_measurement: RecordMeasurement
) -> None:
    victim = next(engine.node for engine in smallest_service.engines() if engine.node)
    began_s = time.monotonic()
    cluster.kubectl("drain", victim, *_DRAIN_OPTIONS)
    record_measurement(f"drain of {victim} without room ended after {time.monotonic() - began_s:.1f} s")
    assert time.monotonic() - began_s <= DRAIN_MAX_S
    assert "EvictionAllowed" in smallest_service.messages()
