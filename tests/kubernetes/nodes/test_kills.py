"""A process dies or hangs under a steady load: the operator's, the autoscaler's, a router's, an engine's."""

import signal
from collections.abc import Callable
from functools import partial

import pytest

from tests.conftest import Figure
from tests.kubernetes.nodes.components import acting, is_back, leader
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.pods import Pod, signal_pod
from tests.kubernetes.nodes.service import INSTANCES, Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

WHOLE_AGAIN_S = 5.0
TAKEN_OVER_S = 15.0

WHO: dict[str, Callable[[Cluster], Pod]] = {"operator": leader, "autoscaler": acting}


@pytest.mark.timeout(480)
@pytest.mark.parametrize("who", sorted(WHO))
def test_killed_in_the_middle_of_a_flip_or_a_drain_costs_nothing(
    cluster: Cluster, service: Service, load: Load, figure: Figure, who: str
) -> None:
    with load.window(f"{who} killed in a flip") as flipping:
        instance, role = service.flip_one()
        killed = WHO[who](cluster)
        signal_pod(cluster, killed, signal.SIGKILL)
        ended_s = wait_for(lambda: service.plays(instance, role), "the flip's end", timeout_s=60)
        wait_for(partial(is_back, cluster, killed), f"the {who} to be back", timeout_s=60)
    with load.window(f"{who} killed in a drain") as draining:
        service.patch("pdservices", {"spec": {"instances": INSTANCES - 1}})
        wait_for(lambda: service.phases()["Serving"] < INSTANCES, "a drain", timeout_s=60)
        killed = WHO[who](cluster)
        signal_pod(cluster, killed, signal.SIGKILL)
        drained_s = service.wait_whole(INSTANCES - 1, timeout_s=90)
        wait_for(partial(is_back, cluster, killed), f"the {who} to be back", timeout_s=60)
        service.patch("pdservices", {"spec": {"instances": INSTANCES}})
        service.wait_whole(timeout_s=60)
    figure(f"{who} killed: the flip ended {ended_s:.1f} s, the drain {drained_s:.1f} s afterwards")
    assert (flipping.all_right(), draining.all_right()) == (True, True)
    assert ended_s <= TAKEN_OVER_S


@pytest.mark.timeout(480)
def test_killed_active_router_is_replaced_within_5_seconds(
    cluster: Cluster, service: Service, load: Load, figure: Figure
) -> None:
    dead = service.active_router()
    with load.window("active router killed") as seen:
        signal_pod(cluster, dead, signal.SIGKILL)
        wait_for(partial(is_back, cluster, dead), "the killed router to be back", timeout_s=60)
        service.wait_whole(timeout_s=60)
    figure(f"active router killed: without right answers for {seen.lost_for_s():.1f} s")
    assert seen.wrong == 0
    assert [reason for reason in seen.reasons if reason.startswith("status")] == []
    assert seen.lost_for_s() <= WHOLE_AGAIN_S


@pytest.mark.timeout(480)
def test_killed_engine_fails_nothing_before_the_first_byte(
    cluster: Cluster, service: Service, load: Load, figure: Figure
) -> None:
    victim = service.engines()[0]
    with load.window("engine killed") as seen:
        signal_pod(cluster, victim, signal.SIGKILL)
        wait_for(lambda: victim not in service.engines(), "the kill to show", timeout_s=30)
        whole_s = service.wait_whole(timeout_s=60)
    figure(f"engine killed: whole again after {whole_s:.1f} s")
    assert (seen.failed, seen.wrong, seen.broken_silently) == (0, 0, 0)


@pytest.mark.timeout(480)
def test_hung_engine_fails_nothing_before_the_first_byte(
    cluster: Cluster, service: Service, load: Load, figure: Figure
) -> None:
    victim = service.engines()[0]
    with load.window("engine hung", timeout_s=120) as seen:
        signal_pod(cluster, victim, signal.SIGSTOP)
        noticed_s = wait_for(lambda: victim not in service.engines(), "the hang to show", timeout_s=90)
        whole_s = service.wait_whole(timeout_s=90)
    figure(f"engine hung: noticed after {noticed_s:.1f} s, whole again {whole_s:.1f} s later")
    assert (seen.failed, seen.wrong, seen.broken_silently) == (0, 0, 0)
