"""Nodes are drained, disconnected or killed under constant load from another node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.components import are_components_ready
from tests.kubernetes.nodes.load import run_load
from tests.kubernetes.nodes.service import DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

NODES = frozenset({"n1", "n2", "n3"})
DRAIN_MAX_S = 120.0
_DRAIN_OPTIONS = ("--delete-emptydir-data", "--ignore-daemonsets", "--force", "--timeout=150s")


@pytest.fixture
def restored_nodes(cluster: Cluster, service: DeployedService, archives: tuple[Path, ...]) -> Iterator[None]:
    """After the test, restore all three nodes and wait until the service is ready on them."""
    yield
    for name in sorted(NODES - cluster.nodes.keys()):
        cluster.add_node(name, archives=archives)
    wait_for(lambda: all(map(cluster.is_ready, NODES)), "all nodes to be ready", timeout_s=60)
    service.wait_until_ready(timeout_s=120)
    wait_for(lambda: are_components_ready(cluster), "the installed parts", timeout_s=60)


def _choose_victim_and_client(service: DeployedService, *, router: bool) -> tuple[str, str]:
    """Return a victim node with engines, with or without the active router, and a node to send load from."""
    active = service.active_router().node
    engines = {pod.node for pod in service.engines()}
    victim = active if router else min(engines - {active})
    return victim, min(NODES - {victim, active} or NODES - {victim})


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("restored_nodes")
def test_drained_node_fails_no_request(
    cluster: Cluster, service: DeployedService, record_measurement: RecordMeasurement, seed: int
) -> None:
    victim, client = _choose_victim_and_client(service, router=True)
    try:
        with (
            run_load(cluster, service, seed, node=client, report=record_measurement) as load,
            load.window(f"kubectl drain {victim}") as window,
        ):
            drain = ("drain", victim, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=150s")
            cluster.kubectl(*drain)
            ready_s = service.wait_until_ready(timeout_s=90)
            cluster.kubectl(*drain)  # pods that were being scheduled when the node was cordoned
            service.wait_until_ready(timeout_s=90)
        left = [pod.name for pod in (*service.engines(), *service.routers()) if pod.node == victim]
    finally:
        cluster.kubectl("uncordon", victim)
    record_measurement(f"node drained: ready {ready_s:.1f} s afterwards")
    assert (window.all_succeeded(), left) == (True, [])


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("restored_nodes")
@pytest.mark.parametrize("router", [False, True], ids=["with engines", "with the active router"])
def test_capacity_of_a_killed_node_is_restored_elsewhere(
    cluster: Cluster, service: DeployedService, record_measurement: RecordMeasurement, seed: int, router: bool
) -> None:
    victim, client = _choose_victim_and_client(service, router=router)
    with (
        run_load(cluster, service, seed, node=client, report=record_measurement) as load,
        load.window(f"{victim} killed", timeout_s=120) as window,
    ):
        cluster.kill_node(victim)
        ready_s = wait_for(
            lambda: service.is_fully_ready_without(victim), "capacity elsewhere", timeout_s=120
        )
    record_measurement(
        f"node killed, with {'the active router' if router else 'engines'}: capacity restored after "
        f"{ready_s:.1f} s; no right responses for {window.outage_s():.1f} s"
    )
    assert (window.wrong, service.find_duplicate_endpoints()) == (0, [])
    if not router:
        assert (window.failed, window.broken_silently) == (0, 0)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("restored_nodes")
def test_capacity_of_a_partitioned_node_is_restored_elsewhere_and_the_node_recovers(
    cluster: Cluster, service: DeployedService, record_measurement: RecordMeasurement, seed: int
) -> None:
    victim, client = _choose_victim_and_client(service, router=False)
    with run_load(cluster, service, seed, node=client, report=record_measurement) as load:
        with load.window(f"{victim} disconnected", timeout_s=120) as cut:
            cluster.disconnect_node(victim)
            try:
                ready_s = wait_for(
                    lambda: service.is_fully_ready_without(victim), "capacity elsewhere", timeout_s=120
                )
            finally:
                cluster.reconnect_node(victim)
        with load.window(f"{victim} reconnected") as healed:
            wait_for(lambda: cluster.is_ready(victim), f"{victim} to be ready", timeout_s=60)
            healed_s = service.wait_until_ready(timeout_s=120)
    record_measurement(
        f"node disconnected: capacity restored after {ready_s:.1f} s, ready {healed_s:.1f} s after reconnect"
    )
    assert (cut.failed, cut.wrong, cut.broken_silently, service.find_duplicate_endpoints()) == (0, 0, 0, [])
    assert healed.all_succeeded()
