"""The API server is away for half a minute: what serves goes on, and what was missed is made up for."""

import signal
import time

import pytest

from fulcrum_core.state import RouterState
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.pods import signal_pod
from tests.kubernetes.nodes.router_state import state_port
from tests.kubernetes.nodes.service import INSTANCES, Service
from tools.kubernetes.cluster import API_SERVER, Cluster
from tools.kubernetes.waiting import wait_for

AWAY_S = 30.0
CONVERGED_S = 10.0


@pytest.mark.timeout(480)
def test_half_a_minute_without_an_api_server_fails_no_request(
    cluster: Cluster, service: Service, load: Load
) -> None:
    victim = service.engines()[0]
    with state_port(cluster, service.address()) as state, load.window("API server away for 30 s") as seen:
        cluster.kill_part(API_SERVER)
        end_s = time.monotonic() + AWAY_S
        wait_for(lambda: time.monotonic() > end_s, "the time to pass")
        cluster.start_part(API_SERVER)
        back_s = time.monotonic()
        written = service.patch("pdassignments", {"spec": {"roles": {victim.name: {"reason": "still here"}}}})
        generation = written["metadata"]["generation"]
        wait_for(lambda: state.read(min_generation=generation).generation >= generation, "the router to hear")
        wait_for(lambda: service.phases() == {"Serving": INSTANCES}, "all to serve", timeout_s=60)
        converged_s = time.monotonic() - back_s
        service.wait_whole(timeout_s=120)  # kubelets take their time to say that pods are ready
    print(f"converged {converged_s:.1f} s after the API server was back")
    assert seen.all_right()
    assert converged_s <= CONVERGED_S


@pytest.mark.timeout(480)
def test_engine_that_dies_while_the_api_server_is_away_serves_again_without_it(
    cluster: Cluster, service: Service, load: Load
) -> None:
    victim = service.engines()[0]
    with (
        state_port(cluster, service.address()) as state,
        load.window("engine killed without API server") as seen,
    ):
        cluster.kill_part(API_SERVER)
        signal_pod(cluster, victim, signal.SIGKILL)
        wait_for(lambda: not _serves(state.read(), victim.name), "the router to leave it out", timeout_s=30)
        back_s = wait_for(
            lambda: _serves(state.read(), victim.name), "the router to take it back", timeout_s=60
        )
        cluster.start_part(API_SERVER)
        service.wait_whole(timeout_s=60)
    print(f"served again after {back_s:.1f} s")
    assert (seen.failed, seen.wrong, seen.broken_silently) == (0, 0, 0)


def _serves(state: RouterState, instance: str) -> bool:
    return any(seen.name == instance and seen.serving for seen in state.instances)
