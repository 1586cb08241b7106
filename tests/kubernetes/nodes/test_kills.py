"""Operator, autoscaler, router or engine dies or hangs under constant load."""

import signal
from collections.abc import Callable
from functools import partial

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.components import find_active_autoscaler, find_leading_operator, has_restarted
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.pods import Pod, signal_pod
from tests.kubernetes.nodes.service import INSTANCES, DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

ROUTER_OUTAGE_MAX_S = 5.0
FLIP_END_MAX_S = 15.0
HUNG_ENGINE_BACK_MAX_S = 15.0

FIND_POD: dict[str, Callable[[Cluster], Pod]] = {
    "operator": find_leading_operator,
    "autoscaler": find_active_autoscaler,
}


@pytest.mark.timeout(480)
@pytest.mark.parametrize("component", sorted(FIND_POD))
def test_killing_a_component_during_a_flip_or_drain_fails_no_request(
    cluster: Cluster,
    service: DeployedService,
    load: Load,
    record_measurement: RecordMeasurement,
    component: str,
) -> None:
    with load.window(f"{component} killed in a flip") as flipping:
        instance, role = service.flip_one_instance()
        killed = FIND_POD[component](cluster)
        signal_pod(cluster, killed, signal.SIGKILL)
        ended_s = wait_for(lambda: service.serves_role(instance, role), "the flip's end", timeout_s=60)
        wait_for(partial(has_restarted, cluster, killed), f"the {component} to restart", timeout_s=60)
    with load.window(f"{component} killed in a drain") as draining:
        service.patch("pdservices", {"spec": {"instances": INSTANCES - 1}})
        wait_for(lambda: service.phases()["Serving"] < INSTANCES, "a drain", timeout_s=60)
        killed = FIND_POD[component](cluster)
        signal_pod(cluster, killed, signal.SIGKILL)
        drained_s = service.wait_until_ready(INSTANCES - 1, timeout_s=90)
        wait_for(partial(has_restarted, cluster, killed), f"the {component} to restart", timeout_s=60)
        service.patch("pdservices", {"spec": {"instances": INSTANCES}})
        service.wait_until_ready(timeout_s=60)
    record_measurement(
        f"{component} killed: the flip ended {ended_s:.1f} s, the drain {drained_s:.1f} s afterwards"
    )
    assert (flipping.all_succeeded(), draining.all_succeeded()) == (True, True)
    assert ended_s <= FLIP_END_MAX_S


@pytest.mark.timeout(480)
def test_killed_active_router_is_replaced_within_5_seconds(
    cluster: Cluster, service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    dead = service.active_router()
    with load.window("active router killed") as window:
        signal_pod(cluster, dead, signal.SIGKILL)
        wait_for(partial(has_restarted, cluster, dead), "the killed router to restart", timeout_s=60)
        service.wait_until_ready(timeout_s=60)
    record_measurement(f"active router killed: no right responses for {window.outage_s():.1f} s")
    assert window.wrong == 0
    assert [reason for reason in window.reasons if reason.startswith("status")] == []
    assert window.outage_s() <= ROUTER_OUTAGE_MAX_S


@pytest.mark.timeout(480)
def test_killed_engine_fails_no_request_before_its_first_byte(
    cluster: Cluster, service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    victim = service.engines()[0]
    with load.window("engine killed") as window:
        signal_pod(cluster, victim, signal.SIGKILL)
        wait_for(lambda: victim not in service.engines(), "the kill to be observed", timeout_s=30)
        ready_s = service.wait_until_ready(timeout_s=60)
    record_measurement(f"engine killed: ready again after {ready_s:.1f} s")
    assert (window.failed, window.wrong, window.broken_silently) == (0, 0, 0)


@pytest.mark.timeout(480)
def test_hung_engine_fails_no_request_before_its_first_byte(
    cluster: Cluster, service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    victim, *others = service.engines()
    with load.window("engine hung", timeout_s=120) as window:
        signal_pod(cluster, victim, signal.SIGSTOP)
        noticed_s = wait_for(lambda: victim not in service.engines(), "the hang to be observed", timeout_s=90)
        ready_s = service.wait_until_ready(timeout_s=90)
    record_measurement(f"engine hung: noticed after {noticed_s:.1f} s, ready again {ready_s:.1f} s later")
    assert (window.failed, window.wrong, window.broken_silently) == (0, 0, 0)
    assert noticed_s + ready_s <= HUNG_ENGINE_BACK_MAX_S
    restarted = {(pod.name, pod.uid, pod.restarts) for pod in others} - {
        (pod.name, pod.uid, pod.restarts) for pod in service.engines()
    }
    assert restarted == set(), "the others have more load meanwhile"
