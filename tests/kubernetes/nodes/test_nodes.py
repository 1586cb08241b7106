"""Nodes are drained, cut off, and lose power, under a steady load from another node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Figure
from tests.kubernetes.nodes.components import all_ready
from tests.kubernetes.nodes.load import loaded
from tests.kubernetes.nodes.service import Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

NODES = frozenset({"n1", "n2", "n3"})


@pytest.fixture
def mended(cluster: Cluster, service: Service, archives: tuple[Path, ...]) -> Iterator[None]:
    """After the test all three nodes are there and ready, and the service is whole on them."""
    yield
    for name in sorted(NODES - cluster.nodes.keys()):
        cluster.add_node(name, archives=archives)
    wait_for(lambda: all(map(cluster.is_ready, NODES)), "all nodes to be ready", timeout_s=60)
    service.wait_whole(timeout_s=120)
    wait_for(lambda: all_ready(cluster), "the installed parts", timeout_s=60)


def _with_engines(service: Service, *, router: bool) -> tuple[str, str]:
    """A node to take away, with engines and with or without the active router; one to send load from."""
    active = service.active_router().node
    engines = {pod.node for pod in service.engines()}
    victim = active if router else min(engines - {active})
    return victim, min(NODES - {victim, active} or NODES - {victim})


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mended")
def test_drained_node_fails_no_request(cluster: Cluster, service: Service, figure: Figure, seed: int) -> None:
    victim, client = _with_engines(service, router=True)
    try:
        with (
            loaded(cluster, service, seed, node=client, tell=figure) as load,
            load.window(f"kubectl drain {victim}") as seen,
        ):
            drain = ("drain", victim, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=150s")
            cluster.kubectl(*drain)
            whole_s = service.wait_whole(timeout_s=90)
            cluster.kubectl(*drain)  # what was on its way to the node when it was cordoned
            service.wait_whole(timeout_s=90)
        left = [pod.name for pod in (*service.engines(), *service.routers()) if pod.node == victim]
    finally:
        cluster.kubectl("uncordon", victim)
    figure(f"node drained: whole {whole_s:.1f} s afterwards")
    assert (seen.all_right(), left) == (True, [])


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("router", [False, True], ids=["with engines", "with the active router"])
def test_killed_node_is_made_up_for(
    cluster: Cluster, service: Service, figure: Figure, seed: int, router: bool
) -> None:
    victim, client = _with_engines(service, router=router)
    with (
        loaded(cluster, service, seed, node=client, tell=figure) as load,
        load.window(f"{victim} killed", timeout_s=120) as seen,
    ):
        cluster.kill_node(victim)
        whole_s = wait_for(lambda: service.is_whole_without(victim), "capacity elsewhere", timeout_s=120)
    figure(
        f"node killed, with {'the active router' if router else 'engines'}: capacity restored after "
        f"{whole_s:.1f} s; without right answers for {seen.lost_for_s():.1f} s"
    )
    assert (seen.wrong, service.twice()) == (0, [])
    if not router:
        assert (seen.failed, seen.broken_silently) == (0, 0)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mended")
def test_partitioned_node_is_made_up_for_and_heals(
    cluster: Cluster, service: Service, figure: Figure, seed: int
) -> None:
    victim, client = _with_engines(service, router=False)
    with loaded(cluster, service, seed, node=client, tell=figure) as load:
        with load.window(f"{victim} cut off", timeout_s=120) as cut:
            cluster.cut_cable(victim)
            try:
                whole_s = wait_for(
                    lambda: service.is_whole_without(victim), "capacity elsewhere", timeout_s=120
                )
            finally:
                cluster.mend_cable(victim)
        with load.window(f"{victim} healed") as healed:
            wait_for(lambda: cluster.is_ready(victim), f"{victim} to be ready", timeout_s=60)
            healed_s = service.wait_whole(timeout_s=120)
    figure(f"node cut off: capacity restored after {whole_s:.1f} s, at rest {healed_s:.1f} s after it healed")
    assert (cut.failed, cut.wrong, cut.broken_silently, service.twice()) == (0, 0, 0, [])
    assert healed.all_right()
